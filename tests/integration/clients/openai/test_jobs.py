"""Fine-tuning jobs by the real `openai` client."""

from __future__ import annotations

import csv
import io
import json

import openai
import pytest

HEADER = ["step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy"]
REQUIRED = (
    "id", "object", "created_at", "error", "fine_tuned_model", "finished_at", "hyperparameters", "model", "organization_id",
    "result_files", "seed", "status", "trained_tokens", "training_file", "validation_file",
)  # fmt: skip
PAIR = {
    "input": {"messages": [{"role": "user", "content": "train"}]},
    "preferred_output": [{"role": "assistant", "content": "good"}],
    "non_preferred_output": [{"role": "assistant", "content": "bad"}],
}


def test_from_file_to_results(server, client, jobs, row, jsonl):
    training, validation = server.upload(row(), row()), server.upload(row())
    made = jobs.create(
        model="tiny", training_file=training, validation_file=validation, suffix="my run", seed=7, metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.5}}},
    )  # fmt: skip
    assert (made.status, made.error, made.finished_at, made.fine_tuned_model) == ("validating_files", None, None, None)
    assert (made.training_file, made.validation_file, made.seed, made.metadata) == (training, validation, 7, {"team": "a"})
    assert (made.hyperparameters.n_epochs, made.hyperparameters.batch_size) == (2, "auto")
    done = server.wait(made, "succeeded", "failed")
    assert done.status == "succeeded", done.error
    assert set(REQUIRED) <= set(json.loads(done.to_json(exclude_unset=False)))
    assert isinstance(done.created_at, int)
    assert isinstance(done.finished_at, int)
    assert done.fine_tuned_model == f"ft:tiny:posttrain:my-run:{made.id}"
    assert done.method.supervised.hyperparameters.to_dict() == {"n_epochs": 2, "batch_size": 1, "learning_rate_multiplier": 0.5}
    assert done.trained_tokens == 40
    spec = server.runtime.services.jobs.get(made.id).job.spec
    assert (spec["training"]["num_epochs"], spec["training"]["effective_batch_size"]) == (2, 1)
    assert (spec["training"]["learning_rate"], spec["training"]["random_seed"]) == (1e-5, 7)
    assert "check" not in spec

    (result,) = done.result_files
    assert client.files.retrieve(result).purpose == "fine-tune-results"
    table = list(csv.reader(io.StringIO(client.files.content(result).text)))
    assert table[0] == HEADER
    assert table[1:] == [["1", "1.0", "0.5", "", ""], ["2", "0.5", "0.5", "1.0", "0.25"],
                         ["3", repr(1 / 3), "0.5", "", ""], ["4", "0.25", "0.5", "0.5", "0.25"]]  # fmt: skip
    assert result in [file.id for file in client.files.list(purpose="fine-tune-results")]

    found = list(jobs.checkpoints.list(made.id, limit=1))
    assert [checkpoint.step_number for checkpoint in found] == [4, 2], "over two pages, highest step first"
    assert found[0].fine_tuned_model_checkpoint == f"{done.fine_tuned_model}:ckpt-step-4"
    assert found[0].id == next(iter(jobs.checkpoints.list(made.id))).id, "ids are stable"
    assert (found[0].metrics.step, found[0].metrics.train_loss, found[0].metrics.valid_loss) == (4, 0.25, 0.5)

    events = list(jobs.list_events(made.id, limit=3))
    assert len({event.id for event in events}) == len(events) > 6
    assert [event.created_at for event in events] == sorted((event.created_at for event in events), reverse=True)
    metrics = [event.data for event in events if event.type == "metrics"]
    assert metrics[0] == {
        "step": 4, "total_steps": 4, "train_loss": 0.25, "train_mean_token_accuracy": 0.5, "valid_loss": 0.5, "valid_mean_token_accuracy": 0.25,
    }  # fmt: skip
    assert [point["step"] for point in metrics] == [4, 3, 2, 1]
    assert {event.type for event in events} == {"message", "metrics"}
    assert "checked" in events[-1].message


def test_a_result_is_a_model_and_goes_with_its_job(server, client, jobs):
    done = server.wait(server.create(), "succeeded")
    listed = {model.id: model for model in client.models.list()}
    assert {"tiny", done.fine_tuned_model} <= set(listed)
    model = client.models.retrieve(done.fine_tuned_model)
    assert (model.object, isinstance(model.created, int)) == ("model", True)
    assert client.models.retrieve(f"{done.fine_tuned_model}:ckpt-step-2").id.endswith(":ckpt-step-2")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/none")
    assert client.models.delete(f"{done.fine_tuned_model}:ckpt-step-2").deleted
    assert [checkpoint.step_number for checkpoint in jobs.checkpoints.list(done.id)] == [4]
    assert client.models.delete(done.fine_tuned_model).deleted
    assert done.fine_tuned_model not in [model.id for model in client.models.list()]
    assert jobs.retrieve(done.id).status == "succeeded", "the job's record stays"
    with pytest.raises(openai.PermissionDeniedError):
        client.models.delete("tiny")
    server.runtime.services.jobs.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(done.result_files[0])
    with pytest.raises(openai.NotFoundError):
        jobs.retrieve(done.id)


def test_bad_lines_end_the_job_and_are_told(server, jobs, row):
    rows = [row(), b"not json", {"messages": []}, row(), {"nothing": 1}, {"messages": [{"role": "user", "content": "unanswered"}]}]
    made = jobs.create(model="tiny", training_file=server.upload(*rows))
    assert made.status == "validating_files"
    failed = server.wait(made, "failed")
    assert (failed.error.code, failed.error.param) == ("invalid_data", "training_file")
    for line in (2, 3, 5, 6):
        assert f"line {line}:" in failed.error.message
    messages = [event.message for event in jobs.list_events(made.id) if event.level == "error"]
    assert [line for line in (2, 3, 5, 6) if any(f"training_file, line {line}:" in text for text in messages)] == [2, 3, 5, 6]
    assert failed.result_files == []
    skipping = jobs.create(model="tiny", training_file=server.upload(*rows), extra_body={"training": {"invalid_rows": "skip"}})
    assert server.wait(skipping, "succeeded", "failed").status == "succeeded"


def test_a_bad_validation_file_is_named(server, jobs, row):
    made = jobs.create(model="tiny", training_file=server.upload(row()), validation_file=server.upload({"x": 1}))
    error = server.wait(made, "failed").error
    assert (error.code, error.param) == ("invalid_data", "validation_file")
    assert "line 1:" in error.message


@pytest.mark.parametrize(
    ("options", "kind", "code", "param"),
    [
        ({"training_file": "file-0"}, openai.UnprocessableEntityError, "file_not_found", "training_file"),
        ({"model": "nothing"}, openai.UnprocessableEntityError, None, "model"),
        ({"method": {"type": "reinforcement"}}, openai.BadRequestError, "unsupported_method", "method.type"),
        ({"seed": -1}, openai.UnprocessableEntityError, "invalid_request", "seed"),
        ({"suffix": "x" * 65}, openai.UnprocessableEntityError, "invalid_request", "suffix"),
        ({"hyperparameters": {"n_epochs": 0}}, openai.UnprocessableEntityError, "invalid_request", None),
        ({"metadata": {str(n): "x" for n in range(17)}}, openai.UnprocessableEntityError, "invalid_request", "metadata"),
        ({"integrations": [{"type": "other"}]}, openai.UnprocessableEntityError, "unsupported_integration", "integrations.0"),
        ({"extra_body": {"resources": {"devices": 99}}}, openai.UnprocessableEntityError, None, "resources.devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_code_and_param(server, jobs, row, options, kind, code, param):
    before = len(list(jobs.list()))
    request = {"model": "tiny", "training_file": server.upload(row())} | options
    with pytest.raises(kind) as caught:
        jobs.create(**request)
    assert caught.value.body["message"] in str(caught.value)
    assert caught.value.request_id
    assert code is None or caught.value.code == code
    assert param is None or caught.value.param == param
    assert len(list(jobs.list())) == before, "nothing was stored"


def test_cancel_pause_resume(server, client, jobs):
    made = server.create("wait")
    server.wait_for_step(made, 2)
    waiting = server.create("train")
    assert server.wait(waiting, "queued").status == "queued"
    assert jobs.pause(made.id).status in ("running", "paused")
    assert server.wait(made, "paused").status == "paused"
    assert server.wait(waiting, "succeeded").status == "succeeded", "a paused job holds no device"
    assert jobs.pause(made.id).status == "paused", "repeating is harmless"
    assert jobs.resume(made.id).status == "queued"
    done = server.wait(made, "succeeded")
    with pytest.raises(openai.ConflictError) as caught:
        jobs.pause(done.id)
    assert caught.value.response.headers["x-should-retry"] == "false"
    ended = server.create("wait")
    server.wait_for_step(ended, 2)
    jobs.cancel(ended.id)
    assert server.wait(ended, "cancelled").status == "cancelled"
    assert jobs.cancel(ended.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError) as unknown:
        jobs.cancel("none")
    assert unknown.value.code == "job_not_found"


def test_a_failed_run_tells_why(server, jobs):
    failed = server.wait(server.create("fail"), "failed")
    assert (failed.error.code, failed.error.message) == ("out_of_memory", "no memory left")
    assert len(failed.result_files) == 1, "its metrics are kept"


def test_lists_page_and_filter(server, client, jobs, row):
    file = server.upload(row())
    made = [jobs.create(model="tiny", training_file=file, metadata={"batch": "list", "n": str(n)}).id for n in range(5)]
    plain = jobs.create(model="tiny", training_file=file).id
    found = [job.id for job in jobs.list(limit=2, metadata={"batch": "list"})]
    assert found == made[::-1]
    assert [job.id for job in jobs.list(metadata={"batch": "list", "n": "3"})] == [made[3]]
    without = [job.id for job in jobs.list(extra_query={"metadata": "null"})]
    assert plain in without
    assert not set(made) & set(without)
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        jobs.list(after="none")
    assert caught.value.param == "after"


def test_own_knobs_ride_in_extra_body(server, jobs, row):
    made = jobs.create(
        model="tiny", training_file=server.upload(row()), hyperparameters={"learning_rate_multiplier": 2},
        extra_body={"adapter": {"kind": "lora", "rank": 4}, "training": {"max_seq_len": 64}, "resources": {"priority": 3}, "odd": 1},
    )  # fmt: skip
    job = server.runtime.services.jobs.get(made.id).job
    assert (job.spec["training"]["lora"]["rank"], job.spec["training"]["max_seq_len"], job.priority) == (4, 64, 3)
    assert job.spec["training"]["learning_rate"] == 4e-4, "twice the rate of an adapter"
    assert any("odd" in warning for warning in made.warnings)


def test_preferences_in_openais_format(server, jobs, row):
    made = jobs.create(
        model="tiny", training_file=server.upload(PAIR, PAIR), method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
    )
    done = server.wait(made, "succeeded", "failed")
    assert done.status == "succeeded", done.error
    assert done.method.dpo.hyperparameters.beta == 0.2
    spec = server.runtime.services.jobs.get(made.id).job.spec
    assert (spec["method"]["kind"], spec["training"]["learning_rate"]) == ("dpo", 5e-7)
    wrong = jobs.create(model="tiny", training_file=server.upload(row()), method={"type": "dpo"})
    assert "line 1:" in server.wait(wrong, "failed").error.message


def test_chat_rows_with_weights_and_tools(server, jobs, row):
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "now", "description": "time", "parameters": {"type": "object", "properties": {}}}}]
    rows = [
        {"messages": [{"role": "user", "content": "train"}, {"role": "assistant", "content": "a", "weight": 0},
                      {"role": "user", "content": "b"}, {"role": "assistant", "content": "c", "weight": 1}]},
        {"messages": [{"role": "user", "content": "when?"}, {"role": "assistant", "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c1", "content": "noon"}, {"role": "assistant", "content": "noon"}],
         "tools": tools, "parallel_tool_calls": False},
    ]  # fmt: skip
    done = server.wait(jobs.create(model="tiny", training_file=server.upload(*rows)), "succeeded", "failed")
    assert done.status == "succeeded", done.error


def test_a_job_is_one_job_in_every_face(server, client, jobs, row):
    made = server.create("wait", suffix="shared", metadata={"face": "openai"})
    native = server.runtime.services.jobs.get(made.id).job
    assert (native.name, native.metadata) == ("shared", {"face": "openai"})
    answer = client.get(f"{server.base_url.removesuffix('/v1')}/post_training/jobs/{made.id}", cast_to=dict)
    assert answer["job_uuid"] == made.id
    body = {"model": "tiny", "dataset": {"rows": [row()]}, "name": "other way"}
    other = client.post(f"{server.base_url.removesuffix('/v1')}/post_training/jobs", body=body, cast_to=dict)["job_uuid"]
    seen = jobs.retrieve(other)
    assert (seen.status, seen.training_file, seen.hyperparameters.n_epochs) == ("queued", "inline", 1)
    assert other in [job.id for job in jobs.list()]
    server.wait_for_step(made, 2)
    server.go(made)
    assert server.wait(seen, "succeeded").fine_tuned_model == f"ft:tiny:posttrain:other-way:{other}"


def test_a_repeated_request_with_a_key_is_the_same_job(server, jobs, row):
    file = server.upload(row())
    made = [jobs.create(model="tiny", training_file=file, extra_headers={"Idempotency-Key": "k1"}).id for _ in range(2)]
    assert made[0] == made[1]
    with pytest.raises(openai.UnprocessableEntityError):
        jobs.create(model="tiny", training_file=file, seed=3, extra_headers={"Idempotency-Key": "k1"})
