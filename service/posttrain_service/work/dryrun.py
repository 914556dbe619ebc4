"""What a request would start, with nothing stored: every default, the command, the devices, an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain_service.domain.slots import fit
from posttrain_service.errors import Unavailable
from posttrain_service.ids import new_run_id
from posttrain_service.launch.backend import LaunchBackend, Plan
from posttrain_service.launch.tools import run_tool
from posttrain_service.settings import Settings
from posttrain_service.work.datasets import as_file
from posttrain_service.work.prepare import torch_arguments, train_arguments
from posttrain_service.work.submit import Checked, Submitter, make_spec
from posttrain_trainer.contract.rundir import RunDir

if TYPE_CHECKING:
    from posttrain_service.wire.jobs import JobRequest

ESTIMATE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class DryRun:
    """Makes plans.

    Attributes:
        settings: Of the service.
        submitter: Checks the request as a real submission does.
        backend: Makes the command.
        slots: Names of all devices of this host.
    """

    settings: Settings
    submitter: Submitter
    backend: LaunchBackend
    slots: Sequence[str]

    def plan(self, request: JobRequest) -> dict[str, Any]:
        """See `JobService.plan`."""
        checked = self.submitter.check(request)
        spec = make_spec(checked, {stem: f"data/{stem}{source.suffix}" for stem, source in checked.sources})
        devices = fit(request.devices, self.slots, ()) or ()
        run_id = new_run_id()
        run_dir = RunDir(self.settings.jobs_dir / run_id)
        train_args = train_arguments(spec, run_dir, self.settings.base_models_dir, checked.prepared.model)
        torch_args = torch_arguments(spec, len(devices))
        plan = self.backend.plan(run_id, 1, run_dir, train_args, torch_args, list(devices))
        estimate, warnings = self._estimate(checked, plan)
        return {
            "spec": spec,
            "argv": [self._shown(word) for word in plan.argv],
            "env": sorted(plan.env),
            "devices": list(devices),
            "dataset": checked.train_report,
            "memory": estimate.get("memory"),
            "parameters": estimate.get("parameters"),
            "trainable_parameters": estimate.get("trainable"),
            "steps": estimate.get("steps"),
            "tokens": estimate.get("tokens"),
            "packing": estimate.get("packing"),
            "warnings": [*checked.warnings, *warnings],
        }

    def _estimate(self, checked: Checked, plan: Plan) -> tuple[dict[str, Any], list[str]]:
        train_args = dict(plan.arguments["train_args"])
        with as_file(checked.train, self.settings) as path:
            # The validation set costs no memory and no training step.
            train_args |= {"data_path": str(path), "ckpt_output_dir": str(path.parent), "data_output_dir": None}
            train_args |= {"validation_data_path": None, "validation_every_steps": None, "max_validation_steps": None}
            if checked.validation is not None:
                train_args |= {"keep_best": 0}
            payload = {"train_args": train_args, "nproc": plan.arguments["torch_args"]["nproc_per_node"]}
            try:
                return run_tool(self.settings.trainer_python, "estimate", payload, ESTIMATE_TIMEOUT_S), []
            except Unavailable as error:
                return {}, [f"memory and steps could not be estimated: {error.message}"]

    def _shown(self, word: str) -> str:
        """A word of the command; server paths are shown on loopback only."""
        if self.settings.is_loopback:
            return word
        for folder in (self.settings.storage_dir, Path(self.settings.trainer_python).parent):
            word = word.replace(f"{folder}/", "")
        return word
