"""The data of one pass of the loop: the rows of every job that still needs a pass, in one unit of work.

Contains no rules; those are in the modules around it. Rows are changed in place and stored when the unit of work is
committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import structlog

from elasticflow_airflow.api import EventKind, State
from elasticflow_airflow.api.event_data import EventData
from elasticflow_airflow.engines.job_files import JobFiles
from elasticflow_airflow.engines.port import STANDING, GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model.events import (
    CalendarEvent,
    Event,
    GangStarted,
    JobMeasured,
    JobProgressed,
)
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import RescaleCosts, Slot
from elasticflow_airflow.service.decisions.fault_attribution import Faults, SchedulerFaultError
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.job_documents import (
    Ending,
    InPlaceRecord,
    MeasuredCosts,
    StoredVerdict,
)
from elasticflow_airflow.service.store.documents.speed_measurement import Enough
from elasticflow_airflow.service.store.store import DATABASE_AWAY
from elasticflow_airflow.service.store.tables import AmendmentRow, GenerationRow, IncarnationRow, JobRow
from elasticflow_airflow.service.store.unit_of_work import UnitOfWork

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Held:
    """An unknown holder of a slot: nothing is planned on the slot before ``until_s`` (UTC seconds)."""

    holder: str
    until_s: float


@dataclass(frozen=True, slots=True)
class Absence:
    """When no service decided, before the first pass of this one (UTC seconds)."""

    since_s: float
    until_s: float

    def within_s(self, since_s: float, until_s: float) -> float:
        """Return how much of a time the service was away (seconds)."""
        return max(0.0, min(until_s, self.until_s) - max(since_s, self.since_s))


@dataclass(slots=True)
class PassContext:
    """Rows of one pass, the scheduler, and the time of the pass (UTC seconds)."""

    tx: UnitOfWork
    now: float
    settings: ServiceSettings
    scheduler: Scheduler
    files: JobFiles
    """The jobs' files, where the jobs run."""
    faults: Faults
    """Jobs that are set aside, and failures on single jobs in this pass."""
    jobs: dict[str, JobRow] = field(default_factory=dict)
    rows: list[IncarnationRow] = field(default_factory=list)
    """Incarnations in order of submission, without those that are set aside."""
    aside: list[IncarnationRow] = field(default_factory=list)
    """Incarnations that are set aside; only ``setting_aside.py`` may change them."""
    generations: dict[tuple[str, int], GenerationRow] = field(default_factory=dict)
    """Generations of ``rows`` whose end is not handled."""
    workers: dict[tuple[str, int], tuple[WorkerObservation, ...]] = field(default_factory=dict)
    """The members of each generation, as this pass observed them."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Columns of the samples of this pass that are not stored yet."""
    held: Mapping[Slot, Held] = field(default_factory=dict)
    """Slots with a holder that the service does not know (see ``unknown_gangs.py``)."""
    amendment: AmendmentRow | None = None
    """The amendment that the scheduler is being asked about."""
    wake_at: float | None = None
    learned: bool = False
    """Whether more is known of recurring tasks than the scheduler was told."""
    fed: list[Event | CalendarEvent] = field(default_factory=list)
    """Events that the scheduler got in this pass."""
    started: dict[str, tuple[int, GangStarted]] = field(default_factory=dict)
    """By job id: gangs that have started (generation and event), until the scheduler is told."""
    costs: dict[str, JobMeasured] = field(default_factory=dict)
    """By job id: costs that were measured anew, until the scheduler is told."""
    progressed: dict[str, JobProgressed] = field(default_factory=dict)
    """By job id: reported progress, until the scheduler is told."""
    absence: Absence | None = None
    """When the service was away; what waited for it meanwhile is no cost of a job."""
    singly: bool = False
    """Whether the scheduler gets events one at a time: it failed on them together, and on none alone."""
    decided: bool = False
    """Whether the scheduler got an event or was restored."""
    more: bool = False
    """Whether some new jobs are left to the next pass."""
    _of_job: dict[str, list[IncarnationRow]] = field(default_factory=dict)
    _gangs: dict[tuple[str, int], list[GenerationRow]] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        tx: UnitOfWork,
        now: float,
        settings: ServiceSettings,
        scheduler: Scheduler,
        files: JobFiles,
        wake_at: float | None,
        faults: Faults | None = None,
    ) -> PassContext:
        """Build a context from the rows that the unit of work has read."""
        context = cls(tx, now, settings, scheduler, files, Faults() if faults is None else faults, wake_at=wake_at)
        for job, row in tx.current_rows:
            context.jobs[job.job_id] = job
            context._of_job.setdefault(job.job_id, []).append(row)
            (context.aside if job.job_id in context.faults else context.rows).append(row)
        for generation in tx.current_generations:
            context._gangs.setdefault((generation.job_id, generation.incarnation), []).append(generation)
            if generation.job_id not in context.faults:
                context.generations[generation.job_id, generation.generation] = generation
        return context

    @contextmanager
    def on_behalf_of(self, job_id: str, doing: str) -> Iterator[None]:
        """Attribute any exception in the block to this job alone.

        The job is left out of the rest of the pass; nothing of the pass is written, and the next one starts without it.
        Errors of the database or of the scheduler as a whole belong to no job and propagate. If the job is set aside
        already, the error is only logged: a new pass could not leave it out any further.
        """
        try:
            yield
        except (*DATABASE_AWAY, SchedulerFaultError):
            raise
        except Exception as error:  # noqa: BLE001  (no error may affect the other jobs)
            if job_id in self.faults.aside:
                log.warning(
                    "what is done for a job that is set aside failed", job_id=job_id, doing=doing, error=repr(error)
                )
                return
            self.faults.note(job_id, doing, error)
            self.rows = [row for row in self.rows if row.job_id != job_id]
            self.generations = {key: one for key, one in self.generations.items() if key[0] != job_id}

    def add_generation(self, generation: GenerationRow) -> None:
        """Add a new generation, whose end is not handled."""
        self.tx.add(generation)
        self.generations[generation.job_id, generation.generation] = generation
        self._gangs.setdefault((generation.job_id, generation.incarnation), []).append(generation)

    def live(self, job_id: str) -> IncarnationRow | None:
        """Return the incarnation of a job that the scheduler may know; None if there is none."""
        if job_id in self.faults:
            return None
        return next((r for r in self._of_job.get(job_id, ()) if r.introduced and not r.terminal), None)

    def not_introduced(self) -> frozenset[tuple[str, int]]:
        """Return the incarnations that the scheduler was not asked about yet."""
        return frozenset((r.job_id, r.incarnation) for r in (*self.rows, *self.aside) if not r.introduced)

    def incarnations_of(self, job_id: str) -> Sequence[IncarnationRow]:
        """Return all incarnations of a job that this pass has, in order of submission."""
        return self._of_job.get(job_id, ())

    def row(self, job_id: str, incarnation: int) -> IncarnationRow | None:
        """Return one incarnation; None if this pass does not have it, or it is set aside."""
        if job_id in self.faults:
            return None
        return next((r for r in self._of_job.get(job_id, ()) if r.incarnation == incarnation), None)

    def open_of(self, row: IncarnationRow) -> list[GenerationRow]:
        """Return the generations of an incarnation whose end is not handled, oldest first."""
        mine = self._gangs.get((row.job_id, row.incarnation), ())
        return sorted((g for g in mine if not g.handled), key=lambda g: g.generation)

    def desired(self, row: IncarnationRow) -> GenerationRow | None:
        """Return the generation that should run; None if there is none, or its end is handled."""
        if row.desired_generation is None:
            return None
        generation = self.generations.get((row.job_id, row.desired_generation))
        return generation if generation is not None and not generation.handled else None

    def training(self, row: IncarnationRow) -> GenerationRow | None:
        """Return the generation whose workers make steps: the desired one, or its predecessor until it switches."""
        desired = self.desired(row)
        if desired is None or desired.state == GangState.RUNNING:
            return desired
        if desired.mode != RescaleMode.IN_PLACE:
            return None
        running = [g for g in self.open_of(row) if g.state == GangState.RUNNING and g.running_at is not None]
        return running[-1] if running and running[-1].generation < desired.generation else None

    def due(self, row: IncarnationRow) -> GenerationRow | None:
        """Return the generation that the engine should start now.

        This is the desired one, but an older generation that drops lost workers comes first: the survivors wait for
        it, and cannot wait for workers that have to start first.
        """
        desired, training = self.desired(row), self.training(row)
        if desired is None or training is None or desired.desired != "run":
            return desired
        for generation in self.open_of(row):
            between = training.generation < generation.generation < desired.generation
            wanted = generation.state != GangState.ENDED and not generation.notes.dropped
            if between and wanted and generation.lost:
                return generation
        return desired

    def lost_since(self, row: IncarnationRow, training: GenerationRow) -> set[str]:
        """Return the workers, of ``training`` or of unfinished changes of it, that newer generations list as lost."""
        return {
            worker_id
            for generation in self.open_of(row)
            if generation.generation > training.generation
            for worker_id in generation.lost
        }

    def knows(self, job_id: str) -> bool:
        """Return whether the scheduler has this job."""
        return self.scheduler.state(job_id) is not None

    def knows_curve(self, row: IncarnationRow) -> bool:
        """Return whether the speed of a job was measured at all sizes worth it, so that its whole curve is known."""
        if not row.speeds or row.submission.scaling_curve:
            return False
        return self.scheduler.knows_curve(row.job_id)

    def event(self, what: EventKind | EventData, reason: Reason, row: IncarnationRow) -> None:
        """Write an event of an incarnation."""
        self.tx.add_event(what, reason, row)

    def give_verdict(self, row: IncarnationRow, what: EventKind | EventData, verdict: StoredVerdict) -> None:
        """Record the verdict on a job, and an event with the verdict's reason."""
        row.verdict = verdict
        self.tx.add_event(what, verdict.reason, row, is_verdict=True)

    def end(
        self,
        row: IncarnationRow,
        state: State,
        reason: Reason,
        *,
        failure: Reason | str | None = None,
        use_checkpoint: bool = False,
    ) -> None:
        """Decide how a job ends; it is over when its last worker has left. The first decision counts."""
        if row.terminal or row.ending:
            return
        row.ending = Ending(state, reason, None if failure is None else str(failure), use_checkpoint)
        row.desired_generation = None
        row.state_reason = reason

    def costs_of(self, row: IncarnationRow) -> RescaleCosts:
        """Return the measured costs of start-up, pause and tail, and the settings' defaults for the rest."""
        return costs_from(self.settings, row.costs, row.in_place)

    def measured_cost(
        self,
        row: IncarnationRow,
        name: Literal["startup_s", "pause_s", "tail_s"],
        cost_s: float,
        between: tuple[float, float],
    ) -> None:
        """Record a cost of a job, measured ``between`` two times (UTC seconds).

        If the service was away in between, the rest says only how much it was at least: it raises the cost, or nothing.
        """
        away_s = 0.0 if self.absence is None else self.absence.within_s(*between)
        cost_s = max(0.0, cost_s - away_s)
        if not away_s or cost_s > getattr(self.costs_of(row), name):
            row.costs = row.costs.updated(**{name: cost_s})

    def lived_s(self, row: IncarnationRow) -> float:
        """Return an incarnation's age by the service's clock (seconds): nothing that it reports took longer."""
        return max(0.0, self.now - row.submitted_at)

    @property
    def enough(self) -> Enough:
        """How much must be seen for a speed to count as measured."""
        s = self.settings
        return Enough(skip_steps=s.profile_skip_steps, steps=s.profile_steps, seconds=s.profile_s)


def costs_from(s: ServiceSettings, measured: MeasuredCosts, in_place: InPlaceRecord) -> RescaleCosts:
    """Return the costs to plan with: measured ones, else the settings' defaults; ``in_place`` records such changes."""
    known = measured.known()
    startup_s = known.get("startup_s", s.default_startup_s)
    least_s = known.get("startup_s", 0.0)  # of a restart, which ends with a start
    pause_s, join_s = known.get("pause_s", max(s.default_pause_s, least_s)), 0.0
    able = measured.in_place_pause_s is not None if in_place.able is None else in_place.able
    if able and in_place.failures < s.in_place_attempts:
        join_s = known.get("join_s", s.default_join_s)
        pause_s = known.get("in_place_pause_s", s.default_in_place_pause_s)
    return RescaleCosts(
        startup_s=startup_s, pause_s=pause_s, tail_s=known.get("tail_s", s.default_tail_s), join_s=join_s
    )


def alive(generation: GenerationRow) -> bool:
    """Return whether a generation may have processes."""
    return generation.state in STANDING


def can_be_stopped(generation: GenerationRow) -> bool:
    """Return whether the engine has something to stop: processes, or a start that it has not begun."""
    return alive(generation) or generation.state == GangState.PENDING
