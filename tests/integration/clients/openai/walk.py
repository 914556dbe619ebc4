"""Every call of a real `openai` client against a running service. Arguments: base address, the client's version.

Prints what came of each call as JSON. Runs with any version from 1.109 on.
"""

import json
import sys
import time

import openai

URL, VERSION = sys.argv[1:]
assert openai.__version__ == VERSION, openai.__version__
client = openai.OpenAI(base_url=URL, api_key="any", max_retries=0)
jobs = client.fine_tuning.jobs
seen = {}


def call(name, do):
    result = do()
    seen[name] = "works"
    return result


def lines(*rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def row(todo="train", **more):
    return {"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": "b", **more}]}


def upload(*rows):
    return client.files.create(file=("rows.jsonl", lines(*rows)), purpose="fine-tune").id


def wait(job, *states):
    deadline = time.monotonic() + 60
    while (job := jobs.retrieve(job.id)).status not in (states or ("succeeded", "failed", "cancelled")):
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
    return job


def fails(error, do):
    try:
        do()
    except error as caught:
        return caught
    raise AssertionError(f"{error.__name__} was not raised")


weighed = {"messages": [*row(weight=0)["messages"], *row()["messages"]]}
rows = call("files.create", lambda: upload(row(), weighed))
assert call("files.retrieve", lambda: client.files.retrieve(rows)).purpose == "fine-tune"
assert call("files.content", lambda: client.files.content(rows)).read() == lines(row(), weighed)
part_of = call("uploads.create", lambda: client.uploads.create(bytes=3, filename="a.jsonl", mime_type="x", purpose="fine-tune"))
part = call("uploads.parts.create", lambda: client.uploads.parts.create(part_of.id, data=b"abc"))
assert call("uploads.complete", lambda: client.uploads.complete(part_of.id, part_ids=[part.id])).file.bytes == 3
dropped = client.uploads.create(bytes=3, filename="a.jsonl", mime_type="x", purpose="fine-tune")
assert call("uploads.cancel", lambda: client.uploads.cancel(dropped.id)).status == "cancelled"

made = call("fine_tuning.jobs.create (supervised)", lambda: jobs.create(
    model="tiny", training_file=rows, suffix="walk", seed=3, metadata={"client": VERSION}, validation_file=upload(row()),
    method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": "auto", "batch_size": "auto"}}}))  # fmt: skip
assert made.status == "validating_files", made
done = call("fine_tuning.jobs.retrieve", lambda: wait(made))
assert (done.status, done.seed) == ("succeeded", 3), done
assert done.fine_tuned_model.startswith("ft:tiny:posttrain:walk:"), done
result = call("result_files (CSV)", lambda: client.files.content(done.result_files[0]).text)
assert result.startswith("step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy\n1,1.0,0.5,,\n"), result
found = call("fine_tuning.jobs.checkpoints.list", lambda: list(jobs.checkpoints.list(made.id, limit=1)))
assert [checkpoint.step_number for checkpoint in found] == [4, 2], found
events = call("fine_tuning.jobs.list_events", lambda: list(jobs.list_events(made.id, limit=3)))
assert len({event.id for event in events}) == len(events) > 6, events

pair = {"input": {"messages": row()["messages"][:1]}, "preferred_output": row()["messages"][1:], "non_preferred_output": [{"role": "assistant", "content": "c"}]}
dpo = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}
preferred = wait(call("fine_tuning.jobs.create (dpo)", lambda: jobs.create(model="tiny", training_file=upload(pair), method=dpo)))
assert (preferred.status, preferred.method.type) == ("succeeded", "dpo"), preferred
again = call("fine_tuning.jobs.create (extra_body)", lambda: jobs.create(model=done.fine_tuned_model, training_file=rows, extra_body={"training": {"max_grad_norm": 0.5}}))
assert wait(again).status == "succeeded"
assert made.id in [job.id for job in call("fine_tuning.jobs.list", lambda: list(jobs.list(limit=1)))]
filtered = call("fine_tuning.jobs.list (metadata)", lambda: list(jobs.list(extra_query={"metadata[client]": VERSION})))
assert [job.id for job in filtered] == [made.id], filtered

held = jobs.create(model="tiny", training_file=upload(row("wait")))
wait(held, "running")
call("fine_tuning.jobs.pause", lambda: jobs.pause(held.id))
wait(held, "paused")
assert call("fine_tuning.jobs.resume", lambda: jobs.resume(held.id)).status == "queued"
call("fine_tuning.jobs.cancel", lambda: jobs.cancel(held.id))
assert wait(held).status == "cancelled"

failed = wait(jobs.create(model="tiny", training_file=upload({})))
assert "line 1:" in failed.error.message, failed
seen["bad lines are told"] = "works"
refused = fails(openai.BadRequestError, lambda: jobs.create(model="tiny", training_file=rows, method={"type": "reinforcement"}))
assert refused.code == "unsupported_method", refused
assert fails(openai.NotFoundError, lambda: jobs.retrieve("none")).code == "job_not_found"
fails(openai.ConflictError, lambda: jobs.pause(done.id))
seen["errors as exceptions"] = "works"

assert done.fine_tuned_model in [model.id for model in call("models.list", lambda: list(client.models.list()))]
assert call("models.retrieve", lambda: client.models.retrieve(done.fine_tuned_model)).id == done.fine_tuned_model
assert call("models.delete", lambda: client.models.delete(preferred.fine_tuned_model)).deleted
assert rows in [file.id for file in call("files.list", lambda: list(client.files.list(purpose="fine-tune", limit=2)))]
spare = upload(row())
assert call("files.delete", lambda: client.files.delete(spare)).deleted
print(json.dumps(seen))
