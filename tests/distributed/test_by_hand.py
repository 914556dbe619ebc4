"""Several nodes by hand: `posttrain train` on each, with the same endpoint and the same folder."""

import socket
import subprocess
import sys

import pytest

from posttrain_trainer.contract.rundir import RunDir

from .conftest import losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_commands_train_together_as_one_does(lab, unbroken, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    profile = tmp_path / "profile.yaml"
    arguments = lab.args(tmp_path / "out").model_dump_json(exclude_none=True)
    endpoint = f'{{"nnodes": 2, "nproc_per_node": 1, "rdzv_endpoint": "127.0.0.1:{port}", "rdzv_id": 123}}'
    profile.write_text(f'{{"train_args": {arguments}, "torch_args": {endpoint}}}')
    command = [sys.executable, "-m", "posttrain_service", "train", "--train-profile", str(profile), "--node-rank"]
    nodes = []
    try:
        for node in ("0", "1"):
            nodes.append(subprocess.Popen([*command, node], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        ends = [node.communicate(timeout=800) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    for node, (out, err) in zip(nodes, ends, strict=True):
        assert node.returncode == 0, err
        assert out.startswith("completed after step 10 of 10")
    run_dir = RunDir(tmp_path / "out")
    assert run_dir.attempt(1).log_sources() == ["torchrun", "rank-0", "rank-1"]
    alone, together = losses(unbroken(1)), losses(run_dir)
    assert list(together) == list(alone)
    assert max(abs(alone[step] - together[step]) for step in alone) < 1e-4
