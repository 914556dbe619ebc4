"""Every call of a real llama-stack-client against a server, in that client's own environment; prints what came of each.

Arguments: the server's address, the client's version, a prefix for the ids of what is made here.
"""

import json
import sys
import time

import llama_stack_client
from llama_stack_client import LlamaStackClient

URL, VERSION, MARK = sys.argv[1:4]
assert llama_stack_client.__version__ == VERSION, llama_stack_client.__version__
OLD = tuple(int(part) for part in VERSION.split(".")) < (0, 2, 16)
NO_ARGUMENT = VERSION in ("0.4.5", "0.5.4", "0.6.1")
client = LlamaStackClient(base_url=URL, api_key="any")
training = client.post_training if hasattr(client, "post_training") else client.alpha.post_training
data_sets = client.beta.datasets if hasattr(getattr(client, "beta", None), "datasets") else client.datasets
NAMES_A_JOB = ("job.status", "job.artifacts", "job.cancel")
seen = {}


def call(name, do):
    """Do one call, remember how it went, and give its result."""
    try:
        result = do()
    except Exception as error:
        seen[name] = f"{type(error).__name__}: {error}"[:300]
        raise
    seen[name] = "works with extra_query or extra_body" if NO_ARGUMENT and name in NAMES_A_JOB else "works"
    return result


def the_job(method, job_uuid):
    """A call that names a job, as this version can."""
    if not NO_ARGUMENT:
        return method(job_uuid=job_uuid)
    return method(extra_body={"job_uuid": job_uuid}) if method.__name__ == "cancel" else method(extra_query={"job_uuid": job_uuid})


def row(todo):
    return {"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": "b"}]}


def config(dataset_id):
    data = {"dataset_id": dataset_id, "batch_size": 1, "shuffle": False, "data_format": "dialog"}
    return {"n_epochs": 1, "max_steps_per_epoch": 0, "gradient_accumulation_steps": 1, "data_config": data}


def tune(job_uuid, dataset_id, **more):
    return training.supervised_fine_tune(
        job_uuid=job_uuid, training_config=config(dataset_id), hyperparam_search_config={}, logger_config={}, **({"model": "tiny"} | more)
    )


def wait(job_uuid, *states):
    deadline = time.monotonic() + 60
    while (now := the_job(training.job.status, job_uuid)).status not in states:
        assert time.monotonic() < deadline, now
        time.sleep(0.02)
    return now


def fails(error, do):
    try:
        do()
    except error as caught:
        return caught
    raise AssertionError(f"{error.__name__} was not raised")


def register(name, *rows):
    return data_sets.register(dataset_id=name, purpose="post-training/messages", source={"type": "rows", "rows": list(rows)})


rows, slow, pairs = f"{MARK}-rows", f"{MARK}-slow", f"{MARK}-pairs"
made = call("datasets.register", lambda: register(rows, row("train"), row("again")))
assert made.identifier == rows, made
register(slow, row("wait"))
register(pairs, {"prompt": "train", "chosen": "b", "rejected": "c"})
assert rows in [one.identifier for one in call("datasets.list", data_sets.list)]
assert call("datasets.retrieve", lambda: data_sets.retrieve(rows)).provider_id == "posttrain"
page = call("datasets.iterrows", lambda: data_sets.iterrows(dataset_id=rows, start_index=1, limit=5))
assert (page.data, page.has_more) == ([row("again")], False), page

lora = {"type": "LoRA", "lora_attn_modules": ["q_proj"], "apply_lora_to_mlp": False, "apply_lora_to_output": False, "rank": 4, "alpha": 8}
first = call("supervised_fine_tune", lambda: tune(f"{MARK}-sft", rows, algorithm_config=lora))
assert first.job_uuid == f"{MARK}-sft", first
assert tune(f"{MARK}-sft", rows, algorithm_config=lora).job_uuid == first.job_uuid  # the same again is the same job
done = call("job.status", lambda: wait(first.job_uuid, "completed", "failed"))
assert (done.status, done.job_uuid, done.error) == ("completed", first.job_uuid, None), done
assert done.started_at is not None
assert done.completed_at is not None
made = call("job.artifacts", lambda: the_job(training.job.artifacts, first.job_uuid))
checkpoint = made.checkpoints[-1] if isinstance(made.checkpoints[-1], dict) else made.checkpoints[-1].to_dict()
assert checkpoint["path"].endswith("/checkpoints/step-000004/model"), checkpoint
assert (checkpoint["epoch"], checkpoint["post_training_job_id"]) == (1, first.job_uuid), checkpoint
assert checkpoint["training_metrics"]["train_loss"] == 0.25, checkpoint
assert checkpoint["training_metrics"]["validation_loss"] == 0.5, checkpoint
again = tune(f"{MARK}-more", rows, model=checkpoint["identifier"])  # what one job made is the next one's model
assert wait(again.job_uuid, "completed", "failed").status == "completed"

loss = {"reward_scale": 1.0, "reward_clip": 1.0, "epsilon": 0.1, "gamma": 1.0} if OLD else {"beta": 0.2, "loss_type": "ipo"}
preferred = call("preference_optimize", lambda: training.preference_optimize(
    job_uuid=f"{MARK}/dpo 1", finetuned_model="tiny", algorithm_config=loss, training_config=config(pairs), hyperparam_search_config={},
    logger_config={}))  # fmt: skip
assert preferred.job_uuid == f"{MARK}/dpo 1", preferred
ended = wait(preferred.job_uuid, "completed", "failed")
assert ended.status == "completed", ended
assert ("older llama-stack" in " ".join(ended.warnings)) == OLD, ended.warnings

waiting = tune(f"{MARK}-stop", slow)
wait(waiting.job_uuid, "in_progress")
assert call("job.cancel", lambda: the_job(training.job.cancel, waiting.job_uuid)) is None
assert wait(waiting.job_uuid, "cancelled", "failed").status == "cancelled"
listed = {job.job_uuid: job.status for job in call("job.list", training.job.list)}
assert listed[first.job_uuid] == "completed", listed
assert listed[waiting.job_uuid] == "cancelled", listed

unknown = fails(llama_stack_client.NotFoundError, lambda: the_job(training.job.status, "nobody's"))
assert unknown.body["error"]["code"] == "job_not_found", unknown.body
wrong = fails(llama_stack_client.BadRequestError, lambda: tune(f"{MARK}-x", "nowhere"))
assert "no such file or data set" in str(wrong), wrong
taken = fails(llama_stack_client.ConflictError, lambda: tune(first.job_uuid, slow))
assert taken.body["error"]["code"] == "job_exists", taken.body
seen["errors as exceptions"] = "works"
call("datasets.unregister", lambda: data_sets.unregister(pairs))
assert pairs not in [one.identifier for one in data_sets.list()]
print(json.dumps(seen))
