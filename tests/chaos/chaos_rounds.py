"""One round: a job is brought to a phase, a fault strikes a process, and afterwards nothing may be lost, doubled or untrue."""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from chaos_lab import GRACE_S, HEARTBEAT_S, IMPORT_S, SETTLED, Lab, broken_checkpoints, until

from posttrain_service.client import ApiError, ServerGone
from posttrain_trainer.contract import proc
from posttrain_trainer.contract.locks import is_held
from posttrain_trainer.contract.rundir import read_json

TARGETS = ("server", "shim", "torchrun", "rank", "all")
PHASES = ("queued", "launching", "data", "train", "save", "stopping", "end", "ended")
"""end: after the last step, before the result is written; ended: after it, while the processes are still there."""
FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP")
SETTLE_S = 90.0


@dataclass
class Round:
    """What is done, and what came of it."""

    target: str
    phase: str
    fault: str
    want: str = "cancel"
    """What the stop of phase "stopping" is asked for."""
    ranks: int = 2
    retry: bool = False
    delay_s: float = 0.0
    """Between the phase's beginning and the strike."""
    struck: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float = 0.0
    end: str = ""

    @staticmethod
    def drawn(dice: random.Random) -> Round:
        """Any one of them."""
        return Round(
            dice.choice(TARGETS), dice.choice(PHASES), dice.choice(FAULTS), dice.choice(("cancel", "pause")), dice.choice((1, 2)),
            dice.random() < 0.5, dice.choice((0.0, dice.uniform(0, 0.4))),
        )  # fmt: skip

    def __str__(self) -> str:
        more = f" ({self.want})" if self.phase == "stopping" else ""
        return f"{self.fault} to {self.target}, {self.phase}{more}, {self.ranks} rank(s){', retried' if self.retry else ''}, after {self.delay_s:.2f} s"

    def run(self, lab: Lab) -> Round:
        """Make it; what is wrong is in `violations`."""
        begun = time.monotonic()
        try:
            self._run(lab)
        except (TimeoutError, AssertionError, ServerGone, ApiError) as error:
            self.violations.append(f"{type(error).__name__}: {error}")
        self.seconds = time.monotonic() - begun
        return self

    def _run(self, lab: Lab) -> None:
        hold = {"queued": "train", "stopping": "train"}.get(self.phase, self.phase)
        more: dict[str, Any] = {"resources": {"devices": self.ranks}}
        if self.retry:
            more["retry"] = {"max_attempts": 2}
        job = lab.submit(f"hold={hold}", **more)
        waiting = lab.submit("quick", resources={"devices": 2})  # finds devices only after the first one's end
        self._reach(lab, job)
        time.sleep(self.delay_s)
        self._strike(lab, job)
        lab.go(job)
        self._settle(lab, job, waiting)
        Check(self, lab, job, waiting).all()

    def _reach(self, lab: Lab, job: str) -> None:
        if self.phase == "launching":
            return
        if self.phase == "ended":
            until(lambda: (a := lab.attempt(job)) and a.result.exists(), "the result")
            return
        want = {"data": ("data", 0), "save": ("save", 2), "end": ("train", 4)}.get(self.phase, ("train", 2))
        until(lambda: lab.phase_of(job) == want, f"phase {self.phase}")
        if self.phase == "stopping":
            lab.verb(job, self.want)

    def _strike(self, lab: Lab, job: str) -> None:
        names = ["shim", "torchrun", *(f"rank-{r}" for r in range(self.ranks))] if self.target == "all" else []
        if self.target in ("shim", "torchrun"):
            names = [self.target]
        if self.target == "rank":
            names = [f"rank-{self.ranks - 1}"]
        number = signal.Signals[self.fault]
        if self.target in ("server", "all"):
            lab.server.send(number)
            self.struck.append("server")
        for name in names:
            identity = self._find(lab, job, name)
            if identity is not None and proc.send(identity, number):
                self.struck.append(name)
        if "server" in self.struck:
            if self.fault == "SIGSTOP":
                time.sleep(HEARTBEAT_S + 1)  # what is waited for is that time passes
                lab.server.send(signal.SIGCONT)
            else:
                lab.server.revive()

    def _find(self, lab: Lab, job: str, name: str) -> proc.Identity | None:
        """The process; while the job is being launched it is waited for, but not when the server is struck as well."""
        if self.phase != "launching" or self.target == "all":
            return lab.process(job, name)
        deadline = time.monotonic() + 10
        while (found := lab.process(job, name)) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return found

    def _settle(self, lab: Lab, job: str, waiting: str) -> None:
        for one, name in ((job, "the job"), (waiting, "the job that waited")):
            until(lambda one=one: lab.job(one)["status"] in SETTLED, f"the end of {name}", SETTLE_S)


@dataclass
class Check:
    """The invariants, after a round."""

    round: Round
    lab: Lab
    job: str
    waiting: str

    def all(self) -> None:
        """Look at each."""
        for check in (self.listed, self.once, self.true_end, self.no_process, self.devices, self.checkpoints, self.events, self.database):
            self.round.violations += [f"{check.__name__}: {fault}" for fault in check()]

    def listed(self) -> list[str]:
        there = {job["job_uuid"] for job in self.lab.server.ask(lambda client: list(client.jobs(limit=100)))}
        return [f"job {job} is missing" for job in self.lab.accepted if job not in there]

    def once(self) -> list[str]:
        faults = []
        for job in (self.job, self.waiting):
            path = self.lab.run_dir(job).path
            starts = (path / "starts").read_text().split() if (path / "starts").exists() else []
            if len(set(starts)) != len(starts):
                faults.append(f"an attempt of {job} was started twice: {starts}")
            if (path / "overlap").exists():
                faults.append(f"two attempts of {job} ran at the same time")
        return faults

    def true_end(self) -> list[str]:
        view = self.lab.job(self.job)
        state, reason, attempt = view["status"], view["reason"], self.lab.run_dir(self.job).attempt(view["attempt"])
        self.round.end = f"{state}/{reason}/{view['attempt']}"
        result = (read_json(attempt.result) or {}).get("status")
        faults = []
        if (result == "completed") != (state == "succeeded"):
            faults.append(f"the job is {state} ({reason}), but its result is {result}")
        if (state, reason) not in self._possible():
            faults.append(f"the job is {state} ({reason}: {(view['error'] or {}).get('message')}), which {self.round} does not explain")
        if self.lab.job(self.waiting)["status"] != "succeeded":
            faults.append(f"the job that waited is {self.lab.job(self.waiting)['status']}")
        return faults

    def _possible(self) -> set[tuple[str, str]]:
        """The ends that the round explains. A fault that met nobody explains none but the plain one."""
        one = self.round
        asked = {"cancel": ("cancelled", "cancelled"), "pause": ("paused", "paused")}[one.want]
        plain = {asked, ("succeeded", "completed")} if one.phase == "stopping" else {("succeeded", "completed")}
        hit = set(one.struck) - {"server"}
        if one.phase == "stopping" and "server" not in one.struck:
            plain -= {("succeeded", "completed")} if not hit else set()
        if not hit:
            return plain
        ends = {
            # A launcher or rank that is told to end by somebody else saves and ends, if all of them are told.
            "SIGTERM": {("paused", "preempted"), ("failed", "lost"), ("failed", "launch_failed")},
            "SIGKILL": {("failed", "lost"), ("failed", "launch_failed")},
            "SIGSTOP": {("failed", "heartbeat_timeout"), ("failed", "start_timeout")},
        }[one.fault]
        return plain | ends

    def no_process(self) -> list[str]:
        faults = []
        for job in (self.job, self.waiting):
            left = self.lab.alive(job)
            if left:
                faults.append(f"{len(left)} processes of {job} are left")
            for attempt in self.lab.run_dir(job).attempts():
                if is_held(attempt.run_lock) or is_held(attempt.shim_lock):
                    faults.append(f"a lock of {job} is still held")
        return faults

    def devices(self) -> list[str]:
        return [f"devices are still taken: {taken}" for taken in [self.lab.query("select device, run_id from slot_leases")] if taken]

    def checkpoints(self) -> list[str]:
        return broken_checkpoints(self.lab, self.job)

    def events(self) -> list[str]:
        """The story of the job is whole: its last state is its state, and each attempt was launched once."""
        events = self.lab.server.ask(lambda client: list(client.events(self.job)))
        view = self.lab.job(self.job)
        states = [event["type"] for event in events if event["type"] in (*SETTLED, "queued", "launching", "running", "stopping")]
        faults = [] if states[-1] == view["status"] else [f"the job is {view['status']}, but the last event says {states[-1]}"]
        if states.count("launching") != view["attempt"]:
            faults.append(f"{states.count('launching')} launches for attempt {view['attempt']}")
        took = [event["data"]["stop_took_s"] for event in events if "stop_took_s" in event["data"]]
        limit = 2 * (GRACE_S + 10) + IMPORT_S
        return faults + [f"the stop took {seconds} s" for seconds in took if seconds > limit and "server" not in self.round.struck]

    def database(self) -> list[str]:
        found = self.lab.query("pragma integrity_check")
        return [] if found == [("ok",)] else [f"the database is damaged: {found[:3]}"]
