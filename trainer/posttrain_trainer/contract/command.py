"""The argv list and the variables that start the ranks of one attempt: used by `train_torchrun` and by the service's launch plan.

No shell, and no value of a request on the command line: the ranks read their arguments from the attempt's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from posttrain_trainer.contract.spec import TorchrunArguments

RANK_ENVIRONMENT: Mapping[str, str] = {
    # Threads that spin while they wait for each other take the cores from whoever else is at work here: on two busy cores
    # a step took 33 s instead of 9; on idle ones the two differ by less than runs do.
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc hands every large tensor back to the system when it is freed, and the next one is zeroed page by page again. What
    # is kept is used by the next step: a copy of 50 MB takes 8 ms instead of 59. Other C libraries don't read these.
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}
"""What ranks run faster with; a variable that is set already is left as it is."""


def torchrun_argv(python: str, args: TorchrunArguments, attempt_dir: Path) -> list[str]:
    """The command for one node of one attempt.

    Args:
        python: The interpreter that has torch and posttrain_trainer.
        args: Where and how many ranks. A single node without an endpoint gets a private rendezvous (`--standalone`);
            an explicit endpoint that another job listens on would silently join that job.
        attempt_dir: Absolute path of the attempt's folder, which holds arguments.json.
    """
    argv = [python, "-m", "posttrain_trainer", "torchrun", f"--nproc-per-node={args.nproc_per_node}"]
    if args.rdzv_endpoint is not None:
        argv += [f"--nnodes={args.nnodes}", f"--node-rank={args.node_rank}", "--rdzv-backend=c10d"]
        argv += [f"--rdzv-endpoint={args.rdzv_endpoint}", f"--rdzv-id={args.rdzv_id}"]
    elif args.master_addr is not None:
        argv += [f"--nnodes={args.nnodes}", f"--node-rank={args.node_rank}"]
        argv += [f"--master-addr={args.master_addr}", f"--master-port={args.master_port}"]
    else:
        argv += ["--standalone"]
    # Its own notes go into the attempt's folder: otherwise each run leaves a folder behind in the system's temporary one.
    argv += [f"--log-dir={attempt_dir / 'torchelastic'}", f"--shutdown-timeout={args.shutdown_timeout_s}"]
    argv += ["-m", "posttrain_trainer", "rank", str(attempt_dir)]
    return argv
