"""`posttrain jobs tensorboard`: a job's metrics in TensorBoard, fetched over HTTP, whether or not the job wrote event files."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain_service.cli.common import DEFAULT_SERVER, JobArgument, KeyFileOption, ServerOption, connected, fail, say
from posttrain_service.cli.watching import RETRY_FOR_S, RetryOption, tell_loss

_NO_CURVES = frozenset({"v", "attempt", "step", "time", "skipped"})


def tensorboard(
    job_uuid: JobArgument,
    logdir: Annotated[
        Path | None, typer.Option(help="Folder in which the job's event files get a folder of their own; a temporary one unless told.", file_okay=False)
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of TensorBoard on this machine; 0 = any free one.")] = 6006,
    write_only: Annotated[bool, typer.Option("--write-only", help="Write what there is into --logdir and end, without TensorBoard.")] = False,
    retry_for: RetryOption = RETRY_FOR_S,
    server: ServerOption = DEFAULT_SERVER,
    key_file: KeyFileOption = None,
) -> None:
    """Show a job in TensorBoard on this machine; what a live one measures is added as it comes."""
    if importlib.util.find_spec("tensorboard") is None:
        fail("tensorboard is not installed here: pip install tensorboard")
    if write_only and logdir is None:
        fail("--write-only needs --logdir")
    with connected(server, key_file) as client, contextlib.ExitStack() as stack:
        client.job(job_uuid)  # an unknown one is told before anything is made
        top = logdir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="posttrain-tensorboard-")))
        folder = top / job_uuid
        if write_only:
            write_points(client.metrics(job_uuid), folder)
            print(folder)
            return
        argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(top), "--host", "127.0.0.1", "--port", str(port)]
        shown = stack.enter_context(subprocess.Popen(argv))
        stack.callback(shown.terminate)
        with contextlib.suppress(KeyboardInterrupt):
            stream = client.follow(job_uuid, "metrics", patience_s=retry_for, on_gone=tell_loss)
            write_points((event.data for event in stream if event.event == "metric"), folder)
            say(f"job {job_uuid} has ended; TensorBoard goes on until Ctrl-C")
            shown.wait()


def write_points(points: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Every finite number of the points as a scalar named like its field, each point as soon as it is there."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    try:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.items() if _is_curve(name, value)]
            measured_at = datetime.fromisoformat(point["time"]).timestamp()
            writer.add_event(Event(wall_time=measured_at, step=point["step"], summary=Summary(value=values)))
            writer.flush()
    finally:
        writer.close()


def _is_curve(name: str, value: object) -> bool:
    return name not in _NO_CURVES and isinstance(value, int | float) and math.isfinite(value)
