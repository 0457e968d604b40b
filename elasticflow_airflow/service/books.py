"""What one pass of the loop works on: the rows of every job that still matters, inside one write transaction.

Holds no rules; the modules around it do. Rows are changed in place and are stored when the transaction ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.values import RescaleCosts
from elasticflow_airflow.service.measuring import Enough
from elasticflow_airflow.service.models import AmendmentRow, GenerationRow, IncarnationRow, JobRow
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store import Writer
from elasticflow_airflow.wire import State


@dataclass(slots=True)
class Books:
    """Rows of one pass, the scheduler, and the time of the pass (UTC seconds)."""

    tx: Writer
    now: float
    settings: ServiceSettings
    scheduler: Scheduler
    jobs: dict[str, JobRow] = field(default_factory=dict)
    rows: list[IncarnationRow] = field(default_factory=list)
    generations: dict[tuple[str, int], GenerationRow] = field(default_factory=dict)
    """Generations whose end is not handled."""
    amendment: AmendmentRow | None = None
    """The one that the scheduler is asked about right now."""
    wake_at: float | None = None
    fed: bool = False
    """The scheduler heard something in this pass."""

    @classmethod
    def open(
        cls, tx: Writer, now: float, settings: ServiceSettings, scheduler: Scheduler, wake_at: float | None
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
        """What was measured of start-up, pause and tail; the settings' defaults for the rest."""
        s, known = self.settings, row.costs
        return RescaleCosts(
            startup_s=float(known.get("startup_s", s.default_startup_s)),
            pause_s=float(known.get("pause_s", s.default_pause_s)),
            tail_s=float(known.get("tail_s", s.default_tail_s)),
        )

    @property
    def enough(self) -> Enough:
        """When a speed counts as measured."""
        s = self.settings
        return Enough(skip_steps=s.profile_skip_steps, steps=s.profile_steps, seconds=s.profile_s)


def incarnation_dir(state_dir: Path, job_id: str, incarnation: int) -> Path:
    """Folder of one incarnation."""
    return state_dir / "jobs" / job_id / f"i{incarnation:06d}"


def alive(generation: GenerationRow) -> bool:
    """Whether it may have processes."""
    return generation.state in (GangState.STARTING, GangState.RUNNING, GangState.LEAVING)
