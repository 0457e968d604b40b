"""A modelled gang: what the workers of one generation would do and report, as a function of time alone.

Knows no clock (the time is passed in), no thread and no process. The only files it writes are candidate checkpoints,
where a real worker would write them, so that a service can judge and promote them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake.loss_target import modelled_loss, reached_at, said_of_target
from elasticflow_airflow.engines.fake.slow_workers import said_of_workers, slowest
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangSpec, GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import DEVICE_FAULT, Promotion, Report, ReportKind, candidate_name
from elasticflow_airflow.runtime.stores.manifest import publish, writing

FIRST_SAVE_S = 60.0
MAX_REPORTS_AN_ADVANCE = 500
"""When a virtual clock jumps far, progress reports are thinned out to about this many."""
NOISE_SCALE = 1840.0
"""Gradient noise scale that every modelled training reports, in samples."""

_LEASE_GRAIN_S = 5.0

CheckpointWriter = Callable[[GangSpec, int, bool], tuple[str, int]]
"""(gang, step, damaged) -> (digest, size in bytes): writes one candidate checkpoint."""


def write_fake_checkpoint(spec: GangSpec, step: int, damaged: bool) -> tuple[str, int]:
    """Write a small candidate as a session would; a damaged one does not match its manifest."""
    checkpoints = spec.session.checkpoint_dir
    with writing(checkpoints, spec.generation, step) as folder:
        (folder / "fake.json").write_text(json.dumps({"step": step}))
        info = publish(
            folder,
            checkpoints,
            incarnation=spec.incarnation,
            generation=spec.generation,
            step=step,
            metadata={"fake": True},
        )
    if damaged:
        (info.path / "fake.json").write_text("{")
    return info.digest, info.size_bytes


@dataclass(slots=True, kw_only=True)
class FakeGang:
    """One generation. Mutable; :meth:`advance` moves it to a later time."""

    spec: GangSpec
    behaviour: FakeBehaviour
    phase: str = "pending"
    """pending, starting, running, hanging, saving, tail or ended; in place (see change_in_place.py) also joining,
    switching, broken (a worker is dead, the others wait), handing (over to its successor) or thinning (workers that
    are not in the newer plan are leaving)."""
    now_s: float = 0.0
    phase_ends_s: float = math.inf
    step: float = 0.0
    next_report_s: float = math.inf
    next_checkpoint_s: float = math.inf
    reported_step: int = 0
    reported_s: float = 0.0
    leave_s: float | None = None
    grace_s: float = 0.0
    lease_ends_s: float = math.inf
    outcome: GangOutcome | None = None
    exit_codes: list[int | None] = field(default_factory=list)
    failure: str | None = None
    failed_rank: int | None = None
    started: bool = False
    """Whether the gang ever had workers."""
    reports: list[Report] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    """In place: ids of the workers by rank, including those that continue."""
    continues: int | None = None
    """In place: the generation whose workers continue."""
    dead: dict[str, int] = field(default_factory=dict)
    """Exit codes of workers that died while others are alive."""
    hung: list[str] = field(default_factory=list)
    """Workers that are alive but hang: no worker makes progress until they are killed."""
    doomed: list[str] = field(default_factory=list)
    """Joining workers that will die as soon as they are up."""
    gone_on: list[str] = field(default_factory=list)
    """Workers that train in a newer generation: they stay alive when this one has ended."""
    recovers: bool = False
    """Whether the change in progress removes workers that died."""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.spec.placement)

    @property
    def total_steps(self) -> int | None:
        """Length of the training in steps, as known to the session."""
        session = self.spec.session
        if session.steps is not None:
            return session.steps
        samples = session.samples or self.behaviour.samples
        if samples is None:
            return None
        return (session.epochs or 1) * -(-samples // session.global_batch_size)

    @property
    def last_step(self) -> int | None:
        """Step at which the training ends: after all steps, when the modelled loss reaches its target, or early."""
        ends = (self.total_steps, reached_at(self), self.behaviour.early_at_step)
        return min((step for step in ends if step is not None), default=None)

    def worker_id(self, rank: int) -> str:
        """Return the id of a worker, which is also the name of its log."""
        if self.members:
            return self.members[rank]
        return f"g{self.spec.generation:06d}-r{rank:03d}"

    def mark(self) -> object:
        """Return a value that changes whenever anything but the time changes."""
        lease = self.lease_ends_s // _LEASE_GRAIN_S
        fence = self.spec.cleared_generation
        harm = tuple(self.dead), tuple(self.hung)
        return self.phase, len(self.reports), self.leave_s, lease, self.outcome, fence, harm

    def living(self) -> list[int]:
        """Return the ranks of the workers that are alive and not in a newer generation."""
        if not self.started or self.phase == "ended":
            return []
        gone = {*self.dead, *self.gone_on}
        return [rank for rank in range(self.workers) if self.worker_id(rank) not in gone]

    def start(self, now_s: float) -> None:
        """Start the workers; the caller is responsible for the fence."""
        self.started = True
        self.now_s = now_s
        self.phase = "starting"
        self.phase_ends_s = now_s + self.behaviour.startup_s

    def leave(self, now_s: float, grace_s: float) -> None:
        """Order the workers to save and leave; only the first order counts."""
        if self.phase == "pending":
            self.phase, self.outcome, self.now_s = "ended", GangOutcome.STOPPED, now_s
        elif self.phase in ("joining", "switching"):
            self.now_s = now_s
            self.end(GangOutcome.STOPPED, 0)
        elif self.phase != "ended" and self.leave_s is None:
            self.leave_s, self.grace_s = now_s, grace_s

    @property
    def _save_interval_s(self) -> float:
        """Interval between saves; the default is the initial interval of a real session."""
        chosen_s = self.spec.session.checkpoint_interval_s
        return FIRST_SAVE_S if chosen_s is None else chosen_s

    def end(self, outcome: GangOutcome, exit_code: int, failure: str | None = None, rank: int | None = None) -> None:
        """End all processes now."""
        if self.phase == "ended":
            return
        self.phase, self.outcome, self.failure, self.failed_rank = "ended", outcome, failure, rank
        codes = [exit_code if rank in (None, r) else -9 for r in range(self.workers)]
        names = [self.worker_id(r) for r in range(self.workers)]
        self.exit_codes = [
            None if name in self.gone_on else self.dead.get(name, code) for name, code in zip(names, codes, strict=True)
        ]

    def break_down(self, rank: int, exit_code: int) -> None:
        """Let one worker die; the others wait for a plan without it."""
        self.dead[self.worker_id(rank)] = exit_code
        if self.phase == "hanging" and set(self.hung) <= set(self.dead):  # the others are no longer blocked
            self.behaviour = replace(self.behaviour, hang_at_step=None)
            self.hung.clear()
            self.phase = "running"
        self.wait_for_plan()

    def wait_for_plan(self) -> None:
        """Stop after the last completed step if a worker is dead."""
        if self.phase == "running" and self.dead:
            self.step = float(math.floor(self.step + 1e-9))
            self.phase, self.phase_ends_s = "broken", self.now_s + self.behaviour.plan_wait_s

    def advance(self, now_s: float, write: CheckpointWriter) -> None:
        """Advance the model to ``now_s``; a clock that goes backwards changes nothing."""
        report_s, save_s = self._intervals_s(now_s - self.now_s)
        while self.phase not in ("pending", "ended"):
            at_s, what = self._next_event()
            if at_s > now_s:
                break
            self._move_to(max(at_s, self.now_s))
            if what == "lease":
                self.leave(self.now_s, self.spec.grace_s)
            elif what == "leave":
                self._begin_to_leave()
            elif what == "phase":
                self._phase_ended(write)
            elif what == "report":
                self._progress()
                self.next_report_s = self.now_s + report_s
            elif what == "checkpoint":
                self._checkpoint(write)
                self.next_checkpoint_s = self.now_s + save_s
            else:
                self._reached(what, write)
        self._move_to(now_s)

    def _intervals_s(self, jump_s: float) -> tuple[float, float]:
        """Return the intervals between reports and between saves for a clock jump of ``jump_s``."""
        report_s, save_s, most = self.behaviour.report_interval_s, self._save_interval_s, self.behaviour.reports_a_jump
        if most is None:
            stretch = max(1.0, jump_s / (MAX_REPORTS_AN_ADVANCE * report_s))
            return report_s * stretch, save_s * stretch
        return max(report_s, jump_s / most), max(save_s, jump_s / most)

    def observation(self, reports: tuple[Report, ...]) -> GangObservation:
        """Return the observation of this gang that an engine would report."""
        state = {
            "pending": GangState.PENDING,
            "starting": GangState.STARTING,
            "joining": GangState.STARTING,
            "switching": GangState.STARTING,
            "thinning": GangState.LEAVING,
            "ended": GangState.ENDED,
        }.get(self.phase, GangState.RUNNING)
        if self.leave_s is not None and state is not GangState.ENDED:
            state = GangState.LEAVING
        living = [self.dead.get(self.worker_id(rank)) for rank in range(self.workers)]
        codes = self.exit_codes or living
        return GangObservation(
            job_id=self.spec.job_id,
            incarnation=self.spec.incarnation,
            generation=self.spec.generation,
            state=state,
            outcome=self.outcome,
            workers=tuple(
                WorkerObservation(
                    worker_id=self.worker_id(rank),
                    rank=rank,
                    slot=slot,
                    pid=None,
                    exit_code=codes[rank],
                    log_name=self.worker_id(rank),
                )
                for rank, slot in enumerate(self.spec.placement)
            )
            if self.started
            else (),
            reports=reports,
            failure=self.failure,
            failed_rank=self.failed_rank,
        )

    def next_turn_s(self) -> float:
        """Return when it will next start training, end, fail or leave without outside influence; infinity: never."""
        return math.inf if self.phase == "ended" else self._next_event(by_the_way=False)[0]

    # The model: which event comes next, and what it does.

    def _next_event(self, *, by_the_way: bool = True) -> tuple[float, str]:
        events = [(self.phase_ends_s, "phase")]
        leaves = ("starting", "running", "hanging", "broken", "handing")
        if self.phase in leaves and self.leave_s is not None:
            events.append((self.leave_s, "leave"))
        if self.leave_s is None and by_the_way:
            events.append((self.lease_ends_s, "lease"))
        if self.phase == "running":
            if by_the_way:
                events += [(self.next_report_s, "report"), (self.next_checkpoint_s, "checkpoint")]
            speed = self.behaviour.speed(self.workers) / slowest(self)
            marks = {
                "fail": self.behaviour.fail_at_step,
                "exit": self.behaviour.exit_at_step,
                "hang": self.behaviour.hang_at_step,
                "nan": self.behaviour.nan_loss_at_step,
                "finish": self.last_step,
            }
            events += [
                (self.now_s + max(0.0, mark - self.step) / speed, what)
                for what, mark in marks.items()
                if mark is not None
            ]
        return min(events, key=lambda event: event[0])

    def _move_to(self, now_s: float) -> None:
        if now_s <= self.now_s or self.phase == "ended":
            return
        if self.phase == "running":
            self.step += (now_s - self.now_s) * self.behaviour.speed(self.workers) / slowest(self)
            if self.last_step is not None:
                self.step = min(self.step, float(self.last_step))
        self.now_s = now_s

    def _begin_to_leave(self) -> None:
        if self.behaviour.ignores_leave or self.phase == "hanging":
            self.phase, self.phase_ends_s = "saving", self.now_s + 2 * self.grace_s
            self.exit_codes = [-9] * self.workers
        elif self.phase in ("starting", "broken"):
            self.end(GangOutcome.STOPPED, 0)
        else:
            self.step = math.floor(self.step + 1e-9)
            self.phase, self.phase_ends_s = "saving", self.now_s + self.behaviour.save_s

    def _phase_ended(self, write: CheckpointWriter) -> None:
        if self.phase == "starting":
            self._begin_to_train()
        elif self.phase == "saving":
            killed = bool(self.exit_codes)
            if not killed and self.behaviour.reports:
                self._checkpoint(write)
                for rank in range(self.workers):
                    self._say(ReportKind.STOPPED, rank)
            self.end(GangOutcome.STOPPED, -9 if killed else 0)
        elif self.phase == "broken":
            message = f"no plan without {', '.join(self.dead)} came within {self.behaviour.plan_wait_s:g} s"
            self._say(ReportKind.FAILED, self.living()[0], message=message)
            self.end(GangOutcome.FAILED, 75, message)
        elif self.phase == "thinning":
            for rank in self.living():
                self._say(ReportKind.STOPPED, rank)
            self.end(GangOutcome.STOPPED, 0)
        else:
            self.end(GangOutcome.FINISHED, 0)

    def _begin_to_train(self) -> None:
        session = self.spec.session
        promotion = Promotion.read(session.checkpoint_dir)
        micro = self._micro_batch_size()
        limit = self.behaviour.out_of_memory_above
        if limit is not None and micro > limit:
            message = f"torch.OutOfMemoryError: a micro-batch of {micro} does not fit"
            self._say(ReportKind.OUT_OF_MEMORY, 0, micro_batch_size=micro, message=message)
            self.end(GangOutcome.FAILED, 1, message, 0)
            return
        if self._met_a_broken_device():
            return
        logical = self._logical_workers()
        if logical is not None and logical < self.workers:
            self._say(ReportKind.STOPPED, 0, logical_workers=logical)
            self.end(GangOutcome.FINISHED, 0)
            return
        self.phase, self.phase_ends_s = "running", math.inf
        self.step = float(promotion.step) if promotion else 0.0
        if self.behaviour.uses_session:
            self._say(ReportKind.USES_SESSION, 0)
        if self.behaviour.reports:
            for rank in range(self.workers):
                resumed_from = promotion.path if promotion else None
                self.say_started(rank, resumed_from=resumed_from, init_from=session.init_from)
            self.begin_to_report()

    def _met_a_broken_device(self) -> bool:
        broken = self.behaviour.broken_devices
        names = [f"{node_id}:{index}" for node_id, index in self.spec.placement]
        rank = next((rank for rank, name in enumerate(names) if name in broken), None)
        if rank is None:
            return False
        for other in range(self.workers):  # Whoever waits for the worker may be first to say that it is gone.
            if other != rank:
                self._say(ReportKind.FAILED, other, message="RuntimeError: connection closed by peer", kind="exception")
        self._say(ReportKind.FAILED, rank, message=broken[names[rank]], kind=DEVICE_FAULT)
        self.end(GangOutcome.FAILED, 1, broken[names[rank]], rank)
        return True

    def begin_to_report(self) -> None:
        """Begin periodic progress reports and checkpoints."""
        self.reported_step, self.reported_s = self._shown_step(), self.now_s
        self.next_report_s = self.now_s + self.behaviour.report_interval_s
        self.next_checkpoint_s = self.now_s + self._save_interval_s

    def speak(self) -> None:
        """Report the progress now."""
        if self.phase == "running" and self.behaviour.reports:
            self._progress()

    def say_started(self, rank: int, **data: Any) -> None:
        """Report that a worker has started in this generation; ``data`` describes where it resumed from."""
        self._say(
            ReportKind.STARTED,
            rank,
            samples=self.spec.session.samples or self.behaviour.samples,
            steps=self.total_steps,
            micro_batch_size=self._micro_batch_size(),
            in_place=self.behaviour.in_place,
            threads=self.behaviour.threads,
            logical_workers=self._logical_workers(),
            seed=self.behaviour.seed if self.spec.session.seed is None else self.spec.session.seed,
            **data,
        )

    def _logical_workers(self) -> int | None:
        session, said = self.spec.session, self.behaviour.logical_workers
        return said if session.script_decides and said is not None else session.logical_workers

    def _micro_batch_size(self) -> int:
        session = self.spec.session
        return session.micro_batch_size or -(-session.global_batch_size // self.workers)

    def _reached(self, what: str, write: CheckpointWriter) -> None:
        if what == "fail":
            self._say(ReportKind.FAILED, 0, message=self.behaviour.failure, kind="exception")
            self.end(GangOutcome.FAILED, 1, self.behaviour.failure, 0)
        elif what == "nan":
            message = f"the loss is not a number at step {self._shown_step()}"
            self._say(ReportKind.FAILED, 0, message=message, kind="nan_loss")
            self.end(GangOutcome.FAILED, 1, message, 0)
        elif what == "exit":
            self.end(GangOutcome.FINISHED if not self.behaviour.reports else GangOutcome.FAILED, 0)
            if self.outcome is GangOutcome.FAILED:
                self.failure = "the script ended with status 0 before the session reported finished"
        elif what == "hang":
            self.phase = "hanging"
        else:
            self.step = float(self.last_step or self.step)  # remove the rounding error
            if self.behaviour.reports:
                self._progress()
                path = self._checkpoint(write)
                said = {
                    "path": path,
                    "loss": self._loss(),
                    "metrics": dict(self.behaviour.metrics),
                    **said_of_target(self, ended=True),
                }
                if self.step == self.behaviour.early_at_step and self.behaviour.early:
                    said["early"] = self.behaviour.early
                self._say(ReportKind.FINISHED, 0, **said)
            self.phase, self.phase_ends_s = "tail", self.now_s + self.behaviour.tail_s

    def _shown_step(self) -> int:
        step = math.floor(self.step + 1e-9)
        limit = self.behaviour.backwards_at_step
        return step - limit if limit is not None and step >= limit else step

    def _loss(self) -> float:
        return modelled_loss(self.behaviour, self.step)

    def _progress(self) -> None:
        step = self._shown_step()
        window_steps, window_s = step - self.reported_step, self.now_s - self.reported_s
        if window_steps == 0:
            return
        self._say(
            ReportKind.PROGRESS,
            0,
            loss=self._loss(),
            window_steps=window_steps,
            window_s=window_s,
            samples=step * self.spec.session.global_batch_size,
            samples_per_s=window_steps * self.spec.session.global_batch_size / window_s if window_s > 0 else None,
            noise_scale=NOISE_SCALE,
            **said_of_target(self),
        )
        for rank, said in enumerate(said_of_workers(self, window_steps, window_s)):
            self._say(ReportKind.WORKER, rank, **said)
        self.reported_step, self.reported_s = step, self.now_s

    def _checkpoint(self, write: CheckpointWriter) -> str:
        step = self._shown_step()
        path = candidate_name(self.spec.generation, step)
        digest, size = hashlib.sha256(path.encode()).hexdigest(), 0
        if self.spec.incarnation_dir.is_dir():
            digest, size = write(self.spec, step, self.behaviour.damaged_checkpoints)
        self._say(ReportKind.CHECKPOINT, 0, path=path, digest=digest, size_bytes=size, write_s=self.behaviour.save_s)
        return path

    def _say(self, kind: ReportKind, rank: int, /, **data: Any) -> None:
        self.reports.append(
            Report(
                kind=kind,
                generation=self.spec.generation,
                worker_id=self.worker_id(rank),
                rank=rank,
                step=self._shown_step(),
                at_s=self.now_s,
                data={key: value for key, value in data.items() if value is not None},
            )
        )
