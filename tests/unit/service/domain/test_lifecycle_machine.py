"""A job under random verbs, crashes, silence and time, judged by `decide` and nothing else.

The world below plays the launch backend and the store. Whatever happens, no rule of the lifecycle is broken, and once
the supervisor can look again and time goes on, no job stays in a state that only a restart could clear.
"""

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from posttrain_service.domain.deadlines import Limits, on_entry
from posttrain_service.domain.decide import Act, decide
from posttrain_service.domain.job import Job, RetryPolicy
from posttrain_service.domain.lifecycle import (
    LIVE,
    REASON_STATE,
    TERMINAL,
    EndReason,
    JobState,
    answer,
    check_move,
)

S = JobState
LIMITS = Limits(
    queue_ttl_s=1000, launch_timeout_s=60, stop_grace_s=30, paused_ttl_s=5000, retention_ttl_s=10000,
    heartbeat_s={"import": 100, "train": 50},
)  # fmt: skip
OOM = {"code": "out_of_memory", "message": "no memory", "rank": 0}


@dataclass
class Attempt:
    """What is on disk and in the process table for one attempt."""

    started: bool = False
    shim: bool = False
    ranks: bool = False
    stop: str | None = None
    exit: dict | None = None
    result: dict | None = None
    error: dict | None = None
    heartbeat: dict | None = None
    silence_s: float | None = None
    readable: bool = True
    orphans: bool = False
    starts: int = 0

    @property
    def liveness(self):
        if not self.readable:
            return "unknown"
        return "alive" if self.shim else "dead"

    def look(self):
        return replace(self, orphans=self.ranks and not self.shim)

    def end(self, reason, **record):
        self.ranks = self.shim = False
        self.exit = {"reason": reason, "exit_code": 1, "stop_want": self.stop} | record


@dataclass
class World:
    job: Job
    now: float = 1000.0
    attempts: dict[int, Attempt] = field(default_factory=dict)
    devices: bool = False
    history: list = field(default_factory=list)
    asked_to_pause: bool = False
    """The last word of whoever owns the job."""

    @property
    def attempt(self):
        return self.attempts[self.job.attempt]

    def move(self, to, changes=None, via=None, by="supervisor"):
        """What `JobRows.move` does."""
        for source, target in zip((self.job.state, via), (via, to), strict=True) if via else [(self.job.state, to)]:
            check_move(source, target)
            self.history.append((source, target, by))
            if source is S.PAUSED and target is S.QUEUED and by == "supervisor":
                assert not self.asked_to_pause, "what somebody paused goes on only when somebody says so"
                assert self.job.reason is EndReason.PREEMPTED
        changes = on_entry(self.job, to, self.now, LIMITS) | (changes or {})
        if to is S.QUEUED:
            changes = {"reason": None, "error": None, "want": None, "ended_at": None, "expires_at": None} | changes
        if to in TERMINAL:
            changes = {"ended_at": self.now} | changes
        if to not in LIVE:
            assert not any(a.shim or a.ranks for a in self.attempts.values()), "devices freed under a living process"
            self.devices = False
        self.job = replace(self.job, state=to, moved_at=self.now, **changes)

    def start(self):
        """A second start of the same attempt, and one after a stop request, start nothing."""
        attempt = self.attempt
        if attempt.started or attempt.shim or attempt.exit is not None:
            return
        attempt.started = True
        if attempt.stop is not None:
            attempt.end("stopped")
            return
        attempt.shim = attempt.ranks = True
        attempt.starts += 1

    def supervise(self):
        job = self.job
        seen = self.attempt.look() if job.state in LIVE else None
        action = decide(job, seen, self.now, LIMITS)
        if seen is not None and seen.liveness == "unknown" and seen.exit is None:
            assert action.act is Act.WAIT, "UNKNOWN waits"
        if action.act is Act.START:
            self.start()
        elif action.act is Act.CONFIRM:
            self.move(action.to, action.changes)
        elif action.act is Act.STOP:
            if action.to is not None:
                self.move(action.to, action.changes)
            self.stop(action.stop_want)
        elif action.act is Act.SWEEP:
            self.sweep()
        elif action.act is Act.FINISH:
            assert not (job.state in LIVE and self.attempt.ranks), "its records may still change"
            if action.sweep:
                self.stop(action.stop_want)
                self.sweep()
            self.check_end(action, seen)
            self.move(action.to, action.changes, action.via)
        return action

    def stop(self, want):
        if self.attempt.exit is None and self.attempt.stop != "cancel":
            self.attempt.stop = want

    def sweep(self):
        self.attempt.shim = self.attempt.ranks = False

    def check_end(self, action, seen):
        """No end is mislabelled."""
        end = action.via or action.to
        if end is S.SUCCEEDED:
            assert seen.result["status"] == "completed"
        elif seen is not None and seen.result is not None:
            assert seen.result["status"] != "completed", "finished work is never called anything else"
        if end is S.CANCELLED and seen is not None:
            assert self.job.want == "cancel"
        if end is S.PAUSED:
            assert self.job.want == "pause" or seen.result["want"] == "pause"
        if end is S.FAILED:
            assert action.via or action.changes["error"]["message"]


class LifecycleMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.world = World(
            Job(
                run_id="r", job_uuid="r", owner="o", state=S.QUEUED, method="sft", model="m", spec={}, body_digest="d",
                created_at=1000.0, moved_at=1000.0, deadline_at=2000.0,
            )
        )  # fmt: skip

    @initialize(max_duration_s=st.sampled_from([None, 400.0]), max_attempts=st.sampled_from([1, 2, 3]))
    def the_request_says(self, max_duration_s, max_attempts):
        self.world.job = replace(self.world.job, max_duration_s=max_duration_s, retry=RetryPolicy(max_attempts))

    def live(self):
        return self.world.job.state in LIVE

    def running(self):
        return self.live() and self.world.attempt.shim and self.world.attempt.ranks

    @rule(verb=st.sampled_from(["cancel", "pause", "resume", "retry"]))
    def somebody_asks(self, verb):
        world, job = self.world, self.world.job
        if answer(verb, job.state, job.want, job.reason) != "act":
            return
        if verb in ("resume", "retry"):
            world.move(S.QUEUED, {"retries": 0} if verb == "retry" else None, by=verb)
            world.asked_to_pause = False
            return
        world.asked_to_pause = verb == "pause"
        if job.state in (S.QUEUED, S.PAUSED):
            reason, to = (EndReason.CANCELLED, S.CANCELLED) if verb == "cancel" else (EndReason.PAUSED, S.PAUSED)
            world.move(to, {"want": verb, "reason": reason}, by=verb)
        elif job.state is S.STOPPING:
            world.job = replace(job, want=verb, reason=None)
        else:
            world.move(S.STOPPING, {"want": verb}, by=verb)

    @precondition(lambda self: self.world.job.state is S.RUNNING)
    @rule()
    def a_more_important_job_needs_its_devices(self):
        self.world.move(S.STOPPING, {"want": "pause", "reason": EndReason.PREEMPTED}, by="scheduler")

    @precondition(lambda self: self.world.job.state is S.QUEUED)
    @rule(how=st.sampled_from(["comes up", "hangs", "server dies"]))
    def the_scheduler_launches(self, how):
        world = self.world
        assert not world.devices
        world.move(S.LAUNCHING)
        world.devices = True
        assert world.job.attempt not in world.attempts, "an attempt's number is used once"
        world.attempts[world.job.attempt] = Attempt()
        if how == "comes up":
            world.start()
        elif how == "hangs":
            world.attempt.shim = True  # it holds its lock and never gets further

    @rule(times=st.integers(1, 3))
    def the_supervisor_looks(self, times):
        for _ in range(times):
            self.world.supervise()

    @rule(seconds=st.sampled_from([1.0, 6.0, 45.0, 120.0, 1500.0]))
    def time_passes(self, seconds):
        self.world.now += seconds

    @precondition(lambda self: self.running())
    @rule(phase=st.sampled_from(["import", "train"]))
    def the_trainer_beats(self, phase):
        self.world.attempt.heartbeat = {"time": self.world.now, "phase": phase, "step": 3}

    @precondition(lambda self: self.running())
    @rule()
    def the_trainer_completes(self):
        self.world.attempt.result = {"status": "completed", "steps": 9}
        self.world.attempt.end("exited", exit_code=0)

    @precondition(lambda self: self.running())
    @rule()
    def the_trainer_fails(self):
        self.world.attempt.error = OOM
        self.world.attempt.end("exited")

    @precondition(lambda self: self.running() and self.world.attempt.stop is not None)
    @rule(saved=st.booleans())
    def the_trainer_obeys(self, saved):
        attempt = self.world.attempt
        if saved:
            attempt.result = {"status": "stopped", "want": attempt.stop}
        attempt.end("stopped" if saved else "killed")

    @precondition(lambda self: self.running())
    @rule()
    def somebody_sends_sigterm(self):
        self.world.attempt.result = {"status": "stopped", "want": "pause"}
        self.world.attempt.end("exited")

    @precondition(lambda self: self.running())
    @rule()
    def the_shim_is_killed(self):
        self.world.attempt.shim = False

    @precondition(lambda self: self.live() and self.world.attempt.ranks and not self.world.attempt.shim)
    @rule()
    def orphans_complete(self):
        self.world.attempt.result = {"status": "completed", "steps": 9}
        self.world.attempt.ranks = False

    @precondition(lambda self: self.running())
    @rule()
    def the_host_goes_down(self):
        self.world.attempt.shim = self.world.attempt.ranks = False

    @precondition(lambda self: self.live())
    @rule(readable=st.booleans())
    def the_disk_can_or_cannot_be_read(self, readable):
        self.world.attempt.readable = readable

    @invariant()
    def the_row_is_sound(self):
        job = self.world.job
        assert self.world.devices == (job.state in LIVE)
        assert (job.ended_at is not None) == (job.state in TERMINAL)
        assert (job.expires_at is not None) == (job.state in TERMINAL)
        assert (job.error is not None) == (job.state is S.FAILED)
        if job.state in TERMINAL or job.state is S.PAUSED:
            assert REASON_STATE[job.reason] is job.state
        elif job.state is not S.RUNNING:  # whose time is the heartbeat's, and max_duration_s if it is given
            assert job.deadline_at is not None, "every unfinished state has its time"
        assert all(attempt.starts <= 1 for attempt in self.world.attempts.values()), "an attempt runs once at most"
        assert job.attempt == len(self.world.attempts)
        assert job.retries <= job.retry.max_attempts - 1, "no more failures are retried than the policy says"

    @invariant()
    def only_a_retry_leaves_an_end(self):
        for (_, state, _), (source, target, by) in zip(self.world.history, self.world.history[1:], strict=False):
            assert source is state
            if source in TERMINAL:
                assert target is S.QUEUED
                assert by in ("retry", "supervisor")

    def teardown(self):
        """The world becomes readable and time goes on: the job must come to rest by itself."""
        world = self.world
        for attempt in world.attempts.values():
            attempt.readable = True
        for _ in range(60):
            if world.job.state in TERMINAL:
                break
            world.now += 700.0
            world.supervise()
        assert world.job.state in TERMINAL, f"stuck in {world.job.state}"
        self.the_row_is_sound()


LifecycleMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestLifecycleMachine = LifecycleMachine.TestCase
