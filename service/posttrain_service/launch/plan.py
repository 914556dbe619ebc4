"""Arguments and slots -> argv, environment and grace of one attempt: pure and printable.

A job's environment is made of named variables of the server's own environment and of what is set here. Nothing of a
request becomes a variable, and what changes which code is loaded (PYTHONPATH, LD_PRELOAD and their like) never passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain_service.errors import InvalidRequest
from posttrain_service.launch.backend import Plan
from posttrain_trainer.contract import CONTRACT_VERSION
from posttrain_trainer.contract.command import RANK_ENVIRONMENT, torchrun_argv
from posttrain_trainer.contract.rundir import ENV_ATTEMPT, ENV_LAUNCHER_LOCK, ENV_RUN_ID, AttemptDir, RunDir
from posttrain_trainer.contract.spec import AttemptArguments, FullTrainingArguments, TorchrunArguments

_MAX_GRACE_S = 86_000
_LAUNCHER_MARGIN_S = 300

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TZ|LANG|LANGUAGE|LC_[A-Z]+|TMPDIR|XDG_[A-Z_]+_HOME"
    # Where CUDA, ROCm, oneAPI and Gaudi are, and how they and the collectives are tuned on this host.
    r"|LD_LIBRARY_PATH|(CUDA|CUDNN|NVIDIA|NCCL|RCCL|HIP|ROCR|ROCM|HSA|MIOPEN|ZE|ONEAPI|SYCL|CCL|HABANA|HCCL|GLOO|UCX|FI)_[A-Z0-9_]+"
    r"|(TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|MKL|KMP|GOMP|MALLOC|TOKENIZERS|RAYON)_[A-Z0-9_]+|GLIBC_TUNABLES"
    # Caches, proxies, certificates; tokens of the hub and of trackers belong to the server and never to a request.
    r"|(HF|TRANSFORMERS|DATASETS|SAFETENSORS|ACCELERATE)_[A-Z0-9_]+|HUGGING_FACE_HUB_TOKEN"
    r"|(HTTP|HTTPS|ALL|NO|FTP)_PROXY|(http|https|all|no|ftp)_proxy|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(WANDB|MLFLOW)_[A-Z0-9_]+"
)
_VISIBLE = {
    "gpu": ("CUDA_VISIBLE_DEVICES",),
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES",),
    "xpu": ("ZE_AFFINITY_MASK",),
    "hpu": ("HABANA_VISIBLE_MODULES",),
    "mps": (),
    "cpu": (),
}
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1")
"""For a local model folder, which needs no network: without these the hub is asked, and an unreachable one waited for."""


def make_plan(
    *,
    run_id: str,
    attempt: int,
    run_dir: RunDir,
    train_args: FullTrainingArguments,
    torch_args: TorchrunArguments,
    devices: Sequence[str],
    trainer_python: str,
    environ: Mapping[str, str],
    cores: int,
    stop_grace_s: float,
    limits: Mapping[str, str] | None = None,
) -> Plan:
    """The plan of one attempt on this host; see `LaunchBackend.plan`.

    Args:
        run_id: The run's UUID.
        attempt: Number of the attempt.
        run_dir: The run's folder.
        train_args: What to train.
        torch_args: How many ranks; "auto", "gpu" and "cpu" mean one for each of `devices`.
        devices: Slots of the run.
        trainer_python: The interpreter that has torch and the trainer.
        environ: The server's environment, to pick from.
        cores: CPU cores that this run may use; divided among its ranks.
        stop_grace_s: Grace where the request names none.
        limits: Variables that tell the run this host's quotas.

    Raises:
        InvalidRequest: More than one node, or devices of unknown or several kinds.
    """
    _check_one_node(torch_args)
    ranks = torch_args.nproc_per_node if isinstance(torch_args.nproc_per_node, int) else max(1, len(devices))
    grace_s = _grace(torch_args, stop_grace_s)
    # The shim keeps the grace, and may be given a longer one later; torchrun's own limit only backs it up.
    started = torch_args.model_copy(
        update={"nproc_per_node": ranks, "shutdown_timeout_s": math.ceil(grace_s) + _LAUNCHER_MARGIN_S}
    )
    folder = run_dir.attempt(attempt).path
    env = job_environment(environ, run_id=run_id, attempt=attempt) | visibility(devices)
    # Killed with no server to sweep after it, a shim takes its ranks along; with one, its orphans are swept anyway.
    env[ENV_LAUNCHER_LOCK] = str(AttemptDir(folder).shim_lock)
    env["OMP_NUM_THREADS"] = str(max(1, cores // ranks))
    env = {**RANK_ENVIRONMENT, **env, **(limits or {})}
    if Path(train_args.model_path).is_absolute():
        env |= OFFLINE
    arguments = AttemptArguments(contract=CONTRACT_VERSION, train_args=train_args, torch_args=started)
    argv = torchrun_argv(trainer_python, started, folder)
    return Plan(argv, env, folder, folder, run_id, attempt, grace_s, arguments.model_dump(mode="json"))


def job_environment(environ: Mapping[str, str], *, run_id: str, attempt: int) -> dict[str, str]:
    """What every process of a job is started with, before devices and threads: picked variables and its marker."""
    env = {name: value for name, value in environ.items() if _PASSED.fullmatch(name)}
    env.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    env |= {
        ENV_RUN_ID: run_id,
        ENV_ATTEMPT: str(attempt),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # `python -m` would import from the working directory first.
        "PYTHONSAFEPATH": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return env


def visibility(devices: Sequence[str]) -> dict[str, str]:
    """Variables that show a run its own devices and hide all others.

    Args:
        devices: Slot names `<kind>:<index>`, all of one kind.

    Raises:
        InvalidRequest: An unknown kind, or several.
    """
    kinds = {device.partition(":")[0] for device in devices}
    if not kinds:
        return {}
    if len(kinds) > 1 or not kinds <= set(_VISIBLE):
        raise InvalidRequest(
            f"devices {', '.join(devices)}: name devices of one kind, one of {', '.join(sorted(_VISIBLE))}",
            param="resources.devices",
        )
    [kind] = kinds
    if kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    indices = ",".join(device.partition(":")[2] for device in devices)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if kind in ("gpu", "cuda") else {}  # NVML's numbering
    return order | dict.fromkeys(_VISIBLE[kind], indices)


def _grace(torch_args: TorchrunArguments, stop_grace_s: float) -> float:
    asked = float(torch_args.shutdown_timeout_s) if "shutdown_timeout_s" in torch_args.model_fields_set else stop_grace_s
    return min(asked, float(_MAX_GRACE_S))


def _check_one_node(args: TorchrunArguments) -> None:
    named = {
        "nnodes": args.nnodes > 1,
        "node_rank": args.node_rank > 0,
        "rdzv_endpoint": args.rdzv_endpoint is not None,
        "master_addr": args.master_addr is not None,
    }
    for name, is_set in named.items():
        if is_set:
            raise InvalidRequest(
                f"torchrun.{name} is {getattr(args, name)!r}, but this backend runs a job on one host; leave it out",
                param=f"torchrun.{name}",
            )
