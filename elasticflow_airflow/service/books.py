"""What one pass of the loop works on: the rows of every job that still matters, inside one write transaction.

Holds no rules; the modules around it do. Rows are changed in place and are stored when the transaction ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.port import GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import RescaleMode, checkpoint_dir
from elasticflow_airflow.scheduler_core.policies.port import ServicePolicy
from elasticflow_airflow.scheduler_core.values import JobState, RescaleCosts
from elasticflow_airflow.service.measuring import Enough
from elasticflow_airflow.service.models import AmendmentRow, GenerationRow, IncarnationRow, JobRow
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store import Writer
from elasticflow_airflow.wire import State

_GAIN_UNKNOWN = 0.75
"""From one worker to four, if four are four times as fast."""


@dataclass(slots=True)
class Books:
    """Rows of one pass, the scheduler, and the time of the pass (UTC seconds)."""

    tx: Writer
    now: float
    settings: ServiceSettings
    scheduler: ServicePolicy
    jobs: dict[str, JobRow] = field(default_factory=dict)
    rows: list[IncarnationRow] = field(default_factory=list)
    generations: dict[tuple[str, int], GenerationRow] = field(default_factory=dict)
    """Generations whose end is not handled."""
    workers: dict[tuple[str, int], tuple[WorkerObservation, ...]] = field(default_factory=dict)
    """The members of each generation, as this pass observed them."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Columns of the samples of this pass that are not stored yet."""
    amendment: AmendmentRow | None = None
    """The one that the scheduler is asked about right now."""
    wake_at: float | None = None
    learned: bool = False
    """Something is known better of recurring tasks than the scheduler was told."""
    fed: bool = False
    """The scheduler heard something in this pass."""

    @classmethod
    def open(
        cls, tx: Writer, now: float, settings: ServiceSettings, scheduler: ServicePolicy, wake_at: float | None
    ) -> Books:
        """Read the rows."""
        books = cls(tx, now, settings, scheduler, wake_at=wake_at)
        for job, row in tx.undrained():
            books.jobs[job.job_id] = job
            books.rows.append(row)
        for generation in tx.open_generations():
            books.generations[generation.job_id, generation.generation] = generation
        return books

    def live(self, job_id: str) -> IncarnationRow | None:
        """The incarnation of a job that the scheduler may know."""
        return next((r for r in self.rows if r.job_id == job_id and r.introduced and not r.terminal), None)

    def checkpoints_of(self, job_id: str, incarnation: int) -> Path:
        """Folder of the checkpoints of one incarnation."""
        return checkpoint_dir(incarnation_dir(self.settings.state_dir, job_id, incarnation))

    def row(self, job_id: str, incarnation: int) -> IncarnationRow | None:
        """One incarnation that still matters."""
        return next((r for r in self.rows if r.job_id == job_id and r.incarnation == incarnation), None)

    def open_of(self, row: IncarnationRow) -> list[GenerationRow]:
        """Generations of an incarnation whose end is not handled, oldest first."""
        mine = [g for g in self.generations.values() if g.job_id == row.job_id and g.incarnation == row.incarnation]
        return sorted((g for g in mine if not g.handled), key=lambda g: g.generation)

    def desired(self, row: IncarnationRow) -> GenerationRow | None:
        """The generation that should run, while its end is not handled."""
        if row.desired_generation is None:
            return None
        generation = self.generations.get((row.job_id, row.desired_generation))
        return generation if generation is not None and not generation.handled else None

    def training(self, row: IncarnationRow) -> GenerationRow | None:
        """The generation whose workers make steps: the desired one, or the one that it continues until it switches."""
        desired = self.desired(row)
        if desired is None or desired.state == GangState.RUNNING:
            return desired
        if desired.mode != RescaleMode.IN_PLACE:
            return None
        running = [g for g in self.open_of(row) if g.state == GangState.RUNNING and g.running_at is not None]
        return running[-1] if running and running[-1].generation < desired.generation else None

    def due(self, row: IncarnationRow) -> GenerationRow | None:
        """The generation that the engine should bring about now.

        The desired one; but first one without lost workers, as those that live wait for it, and can wait for nothing
        that has to start first.
        """
        desired, training = self.desired(row), self.training(row)
        if desired is None or training is None or desired.desired != "run":
            return desired
        for generation in self.open_of(row):
            between = training.generation < generation.generation < desired.generation
            wanted = generation.state != GangState.ENDED and not generation.notes.get("dropped")
            if between and wanted and generation.lost:
                return generation
        return desired

    def lost_since(self, row: IncarnationRow, training: GenerationRow) -> set[str]:
        """Workers of ``training``, or of changes of it that have not come about, that newer plans know to be lost."""
        return {
            worker_id
            for generation in self.open_of(row)
            if generation.generation > training.generation
            for worker_id in generation.lost
        }

    def state_of(self, job_id: str) -> JobState | None:
        """What the scheduler remembers of a job; None when it does not know it."""
        return next((state for state in self.scheduler.states() if state.job.job_id == job_id), None)

    def knows(self, job_id: str) -> bool:
        """Whether the scheduler has this job."""
        return any(state.job.job_id == job_id for state in self.scheduler.states())

    def event(self, kind: str, reason: str, row: IncarnationRow, **data: Any) -> int:
        """Write an event of an incarnation; returns its id."""
        return self.tx.add_event(kind, reason, row, data)

    def set_state(self, row: IncarnationRow, state: State, reason: str) -> None:
        """Move a job to another state."""
        row.state, row.state_reason = state.value, reason

    def end(
        self,
        row: IncarnationRow,
        state: State,
        reason: str,
        *,
        failure: str | None = None,
        use_checkpoint: bool = False,
    ) -> None:
        """Decide how a job ends; it is over when its last worker has left. The first decision counts."""
        if row.terminal or row.ending:
            return
        row.ending = {"state": state.value, "reason": reason, "failure": failure, "use_checkpoint": use_checkpoint}
        row.desired_generation = None
        row.state_reason = reason

    def costs_of(self, row: IncarnationRow) -> RescaleCosts:
        """What was measured of start-up, pause and tail; the settings' defaults for the rest.

        The pause of a change in place is that of the training, and what it loses because new workers have to start
        first: so long it goes on at its old speed and not at its new one. How much that is depends on the two speeds;
        the most that the known speeds allow is taken, as promises are made with it.
        """
        speeds = row.speeds or row.submission["scaling_curve"] or {}
        return costs_from(self.settings, row.costs, row.in_place, speeds)

    @property
    def enough(self) -> Enough:
        """When a speed counts as measured."""
        s = self.settings
        return Enough(skip_steps=s.profile_skip_steps, steps=s.profile_steps, seconds=s.profile_s)


def costs_from(
    s: ServiceSettings, known: Mapping[str, Any], in_place: Mapping[str, Any], speeds: Mapping[str, Any]
) -> RescaleCosts:
    """Costs out of what was measured (``known``), how changes in place went, and the speeds known so far."""
    pause_s = float(known.get("pause_s", s.default_pause_s))
    attempts = int(in_place.get("failures", 0)) < s.in_place_attempts
    if attempts and in_place.get("able", "in_place_pause_s" in known):
        join_s = float(known.get("join_s", s.default_join_s))
        pause_s = float(known.get("in_place_pause_s", s.default_in_place_pause_s)) + join_s * _most_gain(speeds)
    return RescaleCosts(
        startup_s=float(known.get("startup_s", s.default_startup_s)),
        pause_s=pause_s,
        tail_s=float(known.get("tail_s", s.default_tail_s)),
    )


def _most_gain(known: Mapping[str, Any]) -> float:
    """The largest part of its speed that a gang may lack while it waits for more workers: 1 - slowest / fastest."""
    speeds = [float(speed) for speed in known.values()]
    return 1.0 - min(speeds) / max(speeds) if len(speeds) > 1 else _GAIN_UNKNOWN


def incarnation_dir(state_dir: Path, job_id: str, incarnation: int) -> Path:
    """Folder of one incarnation."""
    return state_dir / "jobs" / job_id / f"i{incarnation:06d}"


def alive(generation: GenerationRow) -> bool:
    """Whether it may have processes."""
    return generation.state in (GangState.STARTING, GangState.RUNNING, GangState.LEAVING)
