"""A real client of a real llama-stack server with posttrain inside, before that server is killed and after.

Arguments: the server's address, the client's version, `before` or `after`, and `ogx` where that is the server. Prints what came of each call.
"""

import json
import sys
import time

import llama_stack_client
from llama_stack_client import LlamaStackClient

URL, VERSION, PHASE, *MORE = sys.argv[1:]
assert llama_stack_client.__version__ == VERSION, llama_stack_client.__version__
OLD = VERSION.startswith("0.2.")
NO_ARGUMENT = VERSION == "0.6.1"
TOLD = (lambda status, name: getattr(status, name)) if "ogx" in MORE else (lambda status, name: status.resources_allocated[name])
client = LlamaStackClient(base_url=URL, max_retries=0)
training = client.post_training if OLD else client.alpha.post_training
data_sets = client.datasets if OLD else client.beta.datasets
seen = {}


def call(name, do):
    result = do()
    seen[name] = "works with extra_query or extra_body" if NO_ARGUMENT and name in ("job.status", "job.artifacts", "job.cancel") else "works"
    return result


def the_job(method, job_uuid):
    if not NO_ARGUMENT:
        return method(job_uuid=job_uuid)
    return method(extra_body={"job_uuid": job_uuid}) if method.__name__ == "cancel" else method(extra_query={"job_uuid": job_uuid})


def tune(job_uuid, dataset_id, **more):
    data = {"dataset_id": dataset_id, "batch_size": 1, "shuffle": False, "data_format": "dialog"}
    config = {"n_epochs": 1, "max_steps_per_epoch": 0, "gradient_accumulation_steps": 1, "data_config": data} | more.pop("config", {})
    return training.supervised_fine_tune(
        job_uuid=job_uuid, training_config=config, hyperparam_search_config={}, logger_config={}, **({"model": "tiny"} | more)
    )


def wait(job_uuid, *states):
    deadline = time.monotonic() + 60
    while (now := the_job(training.job.status, job_uuid)).status not in states:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now


def fails(error, do):
    try:
        do()
    except error as caught:
        return caught
    raise AssertionError(f"{error.__name__} was not raised")


def row(todo):
    return {"messages": [{"role": "user", "content": todo}, {"role": "assistant", "content": "b"}]}


if PHASE == "before":
    for name, rows in (("rows", [row("train")]), ("slow", [row("wait")]), ("pairs", [{"prompt": "train", "chosen": "b", "rejected": "c"}])):
        data_sets.register(dataset_id=name, purpose="post-training/messages", source={"type": "rows", "rows": rows})
    made = call("supervised_fine_tune", lambda: tune("killed", "slow"))
    assert made.job_uuid == "killed", made
    assert tune("killed", "slow").job_uuid == "killed"  # the same again is the same job
    call("job.status", lambda: wait("killed", "in_progress"))
else:
    done = wait("killed", "completed", "failed", "cancelled")
    assert done.status == "completed", done
    assert TOLD(done, "error") is None
    made = call("job.artifacts", lambda: the_job(training.job.artifacts, "killed"))
    last = made.checkpoints[-1] if isinstance(made.checkpoints[-1], dict) else made.checkpoints[-1].to_dict()
    assert last["path"].endswith("/checkpoints/step-000004/model"), last
    assert last["training_metrics"]["validation_loss"] == 0.5, last
    assert tune("killed", "slow").job_uuid == "killed"
    seen["a job survives kill -9 of the stack"] = "works"
    loss = {"reward_scale": 1.0, "reward_clip": 1.0, "epsilon": 0.1, "gamma": 1.0} if OLD else {"beta": 0.2, "loss_type": "ipo"}
    data = {"dataset_id": "pairs", "batch_size": 1, "shuffle": False, "data_format": "dialog"}
    call("preference_optimize", lambda: training.preference_optimize(
        job_uuid="dpo", finetuned_model="tiny", algorithm_config=loss, hyperparam_search_config={}, logger_config={},
        training_config={"n_epochs": 1, "max_steps_per_epoch": 1, "gradient_accumulation_steps": 1, "data_config": data}))  # fmt: skip
    ended = wait("dpo", "completed", "failed")
    assert ended.status == "completed", ended
    assert "send 0" in " ".join(TOLD(ended, "warnings")), ended
    tune("stopped", "slow")
    wait("stopped", "in_progress")
    assert call("job.cancel", lambda: the_job(training.job.cancel, "stopped")) is None
    assert wait("stopped", "cancelled", "failed").status == "cancelled"
    assert {job.job_uuid for job in call("job.list", training.job.list)} == {"killed", "dpo", "stopped"}
    bad = llama_stack_client.BadRequestError
    unknown = fails(bad if OLD else llama_stack_client.NotFoundError, lambda: the_job(training.job.status, "nobodys"))
    assert "nobodys" in str(unknown), unknown
    wrong = fails(bad, lambda: tune("wrong", "rows", config={"dtype": "int3"}))
    assert "training_config.dtype" in str(wrong), wrong
    taken = fails(bad if OLD else llama_stack_client.ConflictError, lambda: tune("killed", "rows"))
    assert "taken" in str(taken), taken
    seen["errors as exceptions"] = "works"
print(json.dumps(seen))
