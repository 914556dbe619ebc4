from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from posttrain_service.errors import InvalidRequest, InvalidSettings
from posttrain_service.launch.local import LocalBackend
from posttrain_service.launch.plan import job_environment, visibility
from posttrain_service.launch.registry import backend as named_backend
from posttrain_service.settings import Settings
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.rundir import RunDir
from posttrain_trainer.contract.spec import AttemptArguments, FullTrainingArguments, TorchrunArguments

RUN_ID = "5b0c4c1e-0000-4000-8000-000000000001"
SERVER = {
    "PATH": "/usr/bin", "HOME": "/home/me", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "TMPDIR": "/scratch", "TZ": "Asia/Kathmandu",
    "HF_HOME": "/cache/hf", "HF_TOKEN": "secret", "TRANSFORMERS_CACHE": "/cache/t", "https_proxy": "http://proxy:1", "NO_PROXY": "x",
    "WANDB_API_KEY": "secret", "NCCL_DEBUG": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "x", "LD_LIBRARY_PATH": "/opt/cuda",
}  # fmt: skip
KEPT_OUT = {
    "LD_PRELOAD": "/evil.so", "LD_AUDIT": "/evil.so", "PYTHONPATH": "/evil", "PYTHONSTARTUP": "/evil", "PYTHONHOME": "/evil",
    "BASH_ENV": "/evil", "POSTTRAIN_API_KEY": "secret", "POSTTRAIN_DATABASE_URL": "secret", "AWS_SECRET_ACCESS_KEY": "secret",
    "TORCHELASTIC_RUN_ID": "another", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "elsewhere", "POSTTRAIN_JOB_UUID": "another",
    "XPATH": "no", "PATHS": "no",
}  # fmt: skip


def plan(devices: list[str], *, torch: dict[str, Any] | None = None, model: str = "/models/tiny", **options: Any) -> Any:
    backend = LocalBackend(
        trainer_python=Path("/opt/py/bin/python"), stop_grace_s=30.0, **{"environ": SERVER | KEPT_OUT, "cores": 8, **options}
    )
    train_args = FullTrainingArguments(model_path=model, data_path="/d/rows.jsonl", ckpt_output_dir="/runs/x")
    return backend.plan(RUN_ID, 3, RunDir(Path("/runs") / RUN_ID), train_args, TorchrunArguments(**(torch or {})), devices)


def test_a_plan_touches_nothing_and_says_everything() -> None:
    made = plan(["gpu:1", "gpu:3"], torch={"nproc_per_node": 2})
    folder = Path("/runs") / RUN_ID / "attempts" / "3"
    assert made.argv == [
        "/opt/py/bin/python", "-m", "posttrain_trainer", "torchrun", "--nproc-per-node=2", "--standalone", f"--log-dir={folder}/torchelastic", "--shutdown-timeout=330",
        "-m", "posttrain_trainer", "rank", str(folder),
    ]  # fmt: skip
    assert (made.attempt_dir, made.cwd, made.run_id, made.attempt, made.grace_s) == (folder, folder, RUN_ID, 3, 30.0)
    arguments = AttemptArguments.model_validate(made.arguments)
    assert arguments.contract == CONTRACT_VERSION
    assert arguments.train_args.model_path == "/models/tiny"
    assert made == plan(["gpu:1", "gpu:3"], torch={"nproc_per_node": 2})
    assert not Path("/runs").exists()


def test_the_environment_is_picked_and_marked() -> None:
    env = plan(["gpu:1"]).env
    assert SERVER.items() <= env.items()
    assert not {name for name in KEPT_OUT if name in env} - {"POSTTRAIN_JOB_UUID"}
    assert (env["POSTTRAIN_JOB_UUID"], env["POSTTRAIN_ATTEMPT"]) == (RUN_ID, "3")
    assert (env["PYTHONUNBUFFERED"], env["PYTHONSAFEPATH"]) == ("1", "1")
    assert job_environment({}, run_id="r", attempt=1)["PATH"]


def test_the_marker_cannot_be_inherited_from_the_servers_own_job() -> None:
    env = job_environment({"POSTTRAIN_JOB_UUID": "outer", "POSTTRAIN_ATTEMPT": "9"}, run_id=RUN_ID, attempt=1)
    assert (env["POSTTRAIN_JOB_UUID"], env["POSTTRAIN_ATTEMPT"]) == (RUN_ID, "1")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["gpu:0"], {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (["gpu:3", "gpu:1"], {"CUDA_VISIBLE_DEVICES": "3,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (["rocm:2"], {"HIP_VISIBLE_DEVICES": "2"}),
        (["xpu:1"], {"ZE_AFFINITY_MASK": "1"}),
        (["hpu:0", "hpu:1"], {"HABANA_VISIBLE_MODULES": "0,1"}),
        (["mps:0"], {}),
        (["cpu:0"], {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
        ([], {}),
    ],
)
def test_a_run_sees_its_own_devices_only(devices: list[str], expected: dict[str, str]) -> None:
    assert visibility(devices) == expected
    assert expected.items() <= plan(devices).env.items()


@pytest.mark.parametrize("devices", [["gpu:0", "cpu:0"], ["tpu:0"], [""]])
def test_devices_of_no_or_several_kinds_are_refused(devices: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="one kind") as caught:
        plan(devices)
    assert caught.value.param == "resources.devices"


@pytest.mark.parametrize(
    ("devices", "nproc", "cpu_slots", "threads"),
    [
        (["cpu:0"], 1, 1, "8"),
        (["cpu:0", "cpu:1"], 2, 2, "4"),
        (["cpu:1"], 1, 4, "2"),
        (["cpu:1", "cpu:2"], 2, 4, "2"),
        (["cpu:0"], 1, 100, "1"),
        (["gpu:0", "gpu:1"], 2, 4, "4"),
    ],
)
def test_threads_are_the_cores_divided_by_the_ranks(devices: list[str], nproc: int, cpu_slots: int, threads: str) -> None:
    assert plan(devices, torch={"nproc_per_node": nproc}, cpu_slots=cpu_slots).env["OMP_NUM_THREADS"] == threads


def test_ranks_get_what_they_run_faster_with_unless_the_host_says_otherwise() -> None:
    assert plan(["cpu:0"]).env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(plan(["cpu:0"]).env["MALLOC_MMAP_THRESHOLD_"]) >= 2**30
    assert plan(["cpu:0"], environ=SERVER | {"OMP_WAIT_POLICY": "ACTIVE"}).env["OMP_WAIT_POLICY"] == "ACTIVE"


@pytest.mark.parametrize("nproc", ["auto", "gpu", "cpu"])
def test_a_number_of_ranks_left_open_is_that_of_the_devices(nproc: str) -> None:
    made = plan(["gpu:0", "gpu:1", "gpu:2"], torch={"nproc_per_node": nproc})
    assert "--nproc-per-node=3" in made.argv
    assert made.arguments["torch_args"]["nproc_per_node"] == 3


def test_a_local_model_is_loaded_without_a_network() -> None:
    offline = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"}
    assert offline <= set(plan(["cpu:0"]).env)
    assert not offline & set(plan(["cpu:0"], model="org/name").env)


def test_the_grace_asked_for_counts_over_the_servers() -> None:
    made = plan(["cpu:0"], torch={"shutdown_timeout_s": 400})
    assert made.grace_s == 400
    assert "--shutdown-timeout=700" in made.argv
    longest = plan(["cpu:0"], torch={"shutdown_timeout_s": 86400})
    assert longest.grace_s == 86000
    AttemptArguments.model_validate(longest.arguments)


@pytest.mark.parametrize(
    ("torch", "param"),
    [
        ({"nnodes": 2, "rdzv_endpoint": "a:1"}, "torchrun.nnodes"),
        ({"rdzv_endpoint": "localhost:29500"}, "torchrun.rdzv_endpoint"),
        ({"master_addr": "a", "master_port": 1}, "torchrun.master_addr"),
    ],
)
def test_more_than_one_host_is_refused_by_name(torch: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="one host") as caught:
        plan(["cpu:0"], torch=torch)
    assert caught.value.param == param


def test_backends_by_name(tmp_path: Path) -> None:
    settings = Settings(storage_dir=tmp_path)
    assert isinstance(named_backend("local", settings), LocalBackend)
    with pytest.raises(InvalidSettings, match="'slurm'; there is local"):
        named_backend("slurm", settings)
