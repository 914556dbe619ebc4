"""A window of torch.profiler over some steps; each rank writes one trace for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from posttrain_trainer.device import Device

_ACTIVITIES = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


class ProfileWindow:
    """Profiles the steps from the first to the last named one.

    Args:
        steps: First and last step, counted from 1, both included; None = no profiling.
        path: The trace; its folder is made.
        device: Whose work is recorded beside the host's.
        tell: Called with a sentence and the file once it is written.
        warn: Called with a sentence when that fails, or when the run ends before the window does.
    """

    def __init__(
        self, steps: tuple[int, int] | None, path: Path, device: Device, *, tell: Callable[[str, Path], None], warn: Callable[[str], None]
    ) -> None:
        self._steps = steps
        self._path = path
        self._activities = [ProfilerActivity.CPU, *([_ACTIVITIES[device.kind]] if device.kind in _ACTIVITIES else [])]
        self._tell = tell
        self._warn = warn
        self._running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround one step; `number` counts from 1."""
        if self._steps is not None and self._running is None and self._steps[0] <= number <= self._steps[1]:
            self._running = profile(activities=self._activities, record_shapes=True)
            self._running.start()
        yield
        if self._running is not None:
            self._running.step()
            if self._steps is not None and number >= self._steps[1]:
                self._finish(number)

    def close(self, number: int) -> None:
        """The run has ended after step `number`: write what was recorded so far, or say that nothing was."""
        if self._running is not None:
            self._finish(number)
        elif self._steps is not None and number < self._steps[0]:
            self._warn(f"profile_steps begins at step {self._steps[0]}, and the run ended after step {number}: nothing was profiled")
        self._steps = None

    def _finish(self, number: int) -> None:
        assert self._running is not None
        assert self._steps is not None
        running, first, self._running, self._steps = self._running, self._steps[0], None, None
        try:
            running.stop()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            self._warn(f"the profile of steps {first} to {number} could not be written ({error})")
            return
        self._tell(f"steps {first} to {number} were profiled: {self._path.name}", self._path)
