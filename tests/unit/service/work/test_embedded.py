"""The service inside another process, asked in llama-stack's words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from posttrain_service.adapters.llama_stack import PosttrainConfig
from posttrain_service.adapters.llama_stack.embedded import Embedded, dataset_ids
from posttrain_service.errors import Conflict, InvalidRequest, NotFound

ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def body(**changes):
    data = {"dataset_id": "rows", "batch_size": 1, "shuffle": True, "data_format": "dialog"}
    config = {"n_epochs": 1, "max_steps_per_epoch": 0, "data_config": data}
    return {"job_uuid": "a/b", "model": "tiny", "training_config": config, "hyperparam_search_config": {}, "logger_config": {}} | changes


def test_a_job_from_rows_to_its_end(bench):
    embedded = Embedded(bench.runtime)
    assert dataset_ids(body()) == ["rows"]
    assert embedded.supervised_fine_tune(body(), {"rows": [ROW]}) == {"job_uuid": "a/b", "status": "scheduled"}
    assert embedded.supervised_fine_tune(body(), {"rows": [ROW]}) == {"job_uuid": "a/b", "status": "scheduled"}
    assert bench.runtime.store.datasets.all() == []
    bench.runtime.sweeper.sweep()
    [job] = bench.runtime.store.jobs.queued()
    assert (bench.runtime.settings.jobs_dir / job.run_id / job.spec["data"]["train"]).read_text().count("\n") == 1
    for rows, error in (([ROW, ROW], Conflict), ([{"a": 1}], Conflict)):
        with pytest.raises(error):
            embedded.supervised_fine_tune(body(), {"rows": rows})
    with pytest.raises(InvalidRequest, match="line 2") as caught:
        embedded.supervised_fine_tune(body(job_uuid="bad"), {"rows": [ROW, {"messages": []}]})
    assert caught.value.param == "training_config.data_config.dataset_id"
    with pytest.raises(InvalidRequest, match=r"training_config\.n_epochs"):
        embedded.supervised_fine_tune(body(training_config={}), {})
    assert bench.runtime.store.datasets.all() == []
    bench.clock.advance(0.001)  # so that the queue has an order
    preferred = {key: value for key, value in body(job_uuid="d", finetuned_model="tiny", algorithm_config={"beta": 0.1}).items() if key != "model"}
    assert embedded.preference_optimize(preferred, {"rows": [PAIR]})["job_uuid"] == "d"
    bench.rounds(2)
    seen = embedded.status("a/b")
    assert (seen["status"], seen["resources_allocated"]["error"], seen["checkpoints"]) == ("in_progress", None, [])
    assert embedded.artifacts("a/b") == {"job_uuid": "a/b", "checkpoints": []}
    embedded.cancel("d")
    assert embedded.jobs() == [{"job_uuid": "d", "status": "cancelled"}, {"job_uuid": "a/b", "status": "in_progress"}]
    with pytest.raises(NotFound):
        embedded.status("nobodys")
    assert embedded.health()["status"] in ("OK", "Error")


def test_its_configuration_is_the_services_settings(tmp_path):
    config = PosttrainConfig(storage_dir=tmp_path, cpu_slots=3)
    assert (config.cpu_slots, config.storage_dir) == (3, tmp_path)
    assert set(PosttrainConfig.sample_run_config()) <= set(PosttrainConfig.model_fields)


def test_importing_the_provider_loads_no_torch_and_no_web_server():
    script = "import sys, posttrain_service.adapters.llama_stack; print(sorted({'torch', 'uvicorn', 'llama_stack'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
