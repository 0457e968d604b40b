"""The store: all SQL of the service, over SQLite (WAL) or PostgreSQL.

Writes are serialised: one write transaction at a time, in this process and among processes, as the database itself is
asked for that at its begin (``BEGIN IMMEDIATE``, or an advisory lock of PostgreSQL). Every rule that reads before it
writes therefore holds. Knows no scheduling and no HTTP.
"""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session, defer, load_only, sessionmaker

from elasticflow_airflow.api import EventKind, JobIdentity, State
from elasticflow_airflow.api.event_data import EventData, kind_and_data
from elasticflow_airflow.api.insight import DagAsked
from elasticflow_airflow.engines.port import STANDING
from elasticflow_airflow.service import crashpoints
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.generation_notes import GenerationNotes
from elasticflow_airflow.service.store.documents.job_documents import AmendmentAnswer
from elasticflow_airflow.service.store.migrate import ensure_schema
from elasticflow_airflow.service.store.tables import (
    CANDIDATE_IS_THERE,
    AmendmentRow,
    AvoidedSlotRow,
    CandidateRow,
    DrainRow,
    EventRow,
    GenerationRow,
    HistoryRow,
    IncarnationRow,
    JobRow,
    RecurringTaskRow,
    SampleRow,
    WorkerTimesRow,
)

DATABASE_AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError, sa.exc.TimeoutError)
"""What is raised when the database cannot be used now: it is away, locked, has no room, or takes no writes."""
_BUSY_TIMEOUT_S = 30.0
_POSTGRES = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
"""So that a server whose machine is gone, and which refuses nothing, counts as away long before a lease ends."""
_I = TypeVar("_I", str, int)
_IDS_AT_ONCE = 500
_ROWS_AT_ONCE = 1000
_MEASURED = (GenerationRow.window, GenerationRow.folded, GenerationRow.log_names, GenerationRow.lost)
_SHOWN = (
    GenerationRow.job_id,
    GenerationRow.incarnation,
    GenerationRow.generation,
    GenerationRow.state,
    GenerationRow.handled,
    GenerationRow.mode,
    GenerationRow.placement,
    GenerationRow.log_names,
)
_LISTED = (
    IncarnationRow.job_id,
    IncarnationRow.incarnation,
    IncarnationRow.submission,
    IncarnationRow.submitted_at,
    IncarnationRow.cancel_reason,
    IncarnationRow.acknowledged,
    IncarnationRow.introduced,
    IncarnationRow.state,
    IncarnationRow.terminal,
    IncarnationRow.state_reason,
    IncarnationRow.verdict,
    IncarnationRow.deadline_at,
    IncarnationRow.best_effort,
    IncarnationRow.value,
    IncarnationRow.parked,
    IncarnationRow.lease_expires_at,
    IncarnationRow.logical_workers,
    IncarnationRow.seed,
    IncarnationRow.target,
    IncarnationRow.step,
    IncarnationRow.total_steps,
    IncarnationRow.loss,
    IncarnationRow.steps_per_s,
    IncarnationRow.projected_finish_at,
    IncarnationRow.at_risk,
    IncarnationRow.result,
    IncarnationRow.failure,
    IncarnationRow.last_event_id,
    IncarnationRow.set_aside,
)
"""What a status shows of an incarnation."""
_OUTLINE = (
    IncarnationRow.submitted_at,
    IncarnationRow.introduced,
    IncarnationRow.terminal,
    IncarnationRow.verdict,
    IncarnationRow.deadline_at,
    IncarnationRow.finished_at,
    IncarnationRow.result,
)
_WRITES, _NO_TRANSACTION = "elasticflow_write", "elasticflow_no_transaction"
_WRITE_LOCK_KEY = 0x456C4673  # any constant that everybody who writes agrees on


def in_parts(ids: Sequence[_I]) -> Iterator[Sequence[_I]]:
    """Ids, so many at once as one statement may name."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield ids[start : start + _IDS_AT_ONCE]


class Current(NamedTuple):
    """A job, its current incarnation, and all generations of that, oldest first."""

    job: JobRow
    row: IncarnationRow
    generations: list[GenerationRow]


class HeldSlots(NamedTuple):
    """When a generation held which slots: what a ``GenerationRow`` says of that, by the same names."""

    generation: int
    placement: list[Any]
    mode: str
    continues: int | None
    holding_at: float | None
    running_at: float | None
    ended_at: float | None
    last_step_at: float | None
    notes: GenerationNotes


class Reader:
    """Queries over one open session; rows stay readable after it is closed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._loaded: list[HistoryRow] = []
        """Kept, as a session forgets rows that nobody holds."""

    def job(self, job_id: str) -> JobRow | None:
        """The job of an id."""
        return self.session.get(JobRow, job_id)

    def incarnation(self, job_id: str, incarnation: int) -> IncarnationRow | None:
        """One incarnation of a job."""
        return self.session.get(IncarnationRow, (job_id, incarnation))

    def current(self, job_id: str) -> tuple[JobRow, IncarnationRow] | None:
        """A job with its current incarnation."""
        job = self.job(job_id)
        row = job and self.incarnation(job_id, job.incarnation)
        return (job, row) if job and row else None

    def current_of(self, job_ids: Collection[str]) -> dict[str, Current]:
        """By id, those of these jobs that are there, with their current incarnations and the generations of these.

        Of the generations only what a status shows of them.
        """
        found: dict[str, Current] = {}
        current = sa.and_(IncarnationRow.job_id == JobRow.job_id, IncarnationRow.incarnation == JobRow.incarnation)
        ids = sorted(job_ids)
        for some in in_parts(ids):
            query = sa.select(JobRow, IncarnationRow).join(IncarnationRow, current).where(JobRow.job_id.in_(some))
            found |= {job.job_id: Current(job, row, []) for job, row in self.session.execute(query)}
        self._add_generations(found)
        return found

    def with_generations(self, jobs: Iterable[tuple[JobRow, IncarnationRow]]) -> list[Current]:
        """Jobs with the generations of their current incarnations, in the same order; of these what a status shows."""
        found = {job.job_id: Current(job, row, []) for job, row in jobs}
        self._add_generations(found)
        return list(found.values())

    def _add_generations(self, found: Mapping[str, Current]) -> None:
        ids = sorted(found)
        its = sa.and_(GenerationRow.job_id == JobRow.job_id, GenerationRow.incarnation == JobRow.incarnation)
        for some in in_parts(ids):
            rows = (
                sa.select(GenerationRow)
                .options(load_only(*_SHOWN, raiseload=True))
                .join(JobRow, its)
                .where(JobRow.job_id.in_(some))
                .order_by(GenerationRow.job_id, GenerationRow.generation)
            )
            for row in self.session.scalars(rows):
                found[row.job_id].generations.append(row)

    def decided(self, wanted: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        """Those incarnations of jobs of which the loop has said something, or that are over."""
        said = sa.or_(
            IncarnationRow.terminal, sa.and_(IncarnationRow.introduced, IncarnationRow.state != State.SUBMITTED)
        )
        found: set[tuple[str, int]] = set()
        ids = sorted({job_id for job_id, _ in wanted})
        for some in in_parts(ids):
            query = sa.select(IncarnationRow.job_id, IncarnationRow.incarnation).where(
                IncarnationRow.job_id.in_(some), said
            )
            found |= {(job_id, incarnation) for job_id, incarnation in self.session.execute(query)}
        return found & set(wanted)

    def list_current(
        self,
        *,
        state: str | None,
        dag_id: str | Sequence[str] | None,
        live: bool | None,
        limit: int,
        identity: Mapping[str, str | int] | None = None,
        after: tuple[float, str] | None = None,
        shown_only: bool = False,
    ) -> list[tuple[JobRow, IncarnationRow]]:
        """Jobs with their current incarnations, newest first; of one DAG or of several.

        ``shown_only``: of the incarnations only what a status shows of them.

        ``identity``: what else they share, of namespace, run_id, task_id and map_index. ``after``: only those that come
        after a job that was submitted then (UTC seconds), with this id.
        """
        query = (
            sa.select(JobRow, IncarnationRow)
            .join(
                IncarnationRow,
                sa.and_(IncarnationRow.job_id == JobRow.job_id, IncarnationRow.incarnation == JobRow.incarnation),
            )
            .order_by(IncarnationRow.submitted_at.desc(), JobRow.job_id)
            .limit(limit)
        )
        if shown_only:
            query = query.options(load_only(*_LISTED, raiseload=True))
        if after is not None:
            at, job_id = after
            same = sa.and_(IncarnationRow.submitted_at == at, JobRow.job_id > job_id)
            query = query.where(IncarnationRow.submitted_at <= at, sa.or_(IncarnationRow.submitted_at < at, same))
        if state is not None:
            query = query.where(IncarnationRow.state == state)
        dag_ids = [dag_id] if isinstance(dag_id, str) else dag_id
        if dag_ids is not None:
            query = query.where(JobRow.dag_id.in_(dag_ids))
        if live is not None:
            # Few live, so that their index is the shortest way; of the many others those at one end are wanted.
            over = IncarnationRow.terminal if live else sa.func.coalesce(IncarnationRow.terminal, sa.false())
            query = query.where(over.is_(not live))
        shared = dict(identity or {})
        if dag_ids is not None and len(dag_ids) == 1 and shared.keys() >= {"namespace", "task_id", "map_index"}:
            whole = JobIdentity.as_stored({"run_id": "any", **shared, "dag_id": dag_ids[0]})
            query = query.where(JobRow.recurring_key == whole.recurring_key)  # by its index: a DAG may map thousands
            shared = {part: value for part, value in shared.items() if part == "run_id"}
        for part, value in shared.items():
            known: Any = JobRow.identity[part]
            query = query.where((known.as_integer() if part == "map_index" else known.as_string()) == value)
        return [(job, row) for job, row in self.session.execute(query)]

    def undrained(self) -> list[tuple[JobRow, IncarnationRow]]:
        """Every incarnation that still matters to the loop, in order of submission."""
        query = (
            sa.select(JobRow, IncarnationRow)
            .join(IncarnationRow, IncarnationRow.job_id == JobRow.job_id)
            .where(IncarnationRow.drained.is_(False))
            .order_by(IncarnationRow.submitted_at, IncarnationRow.job_id, IncarnationRow.incarnation)
        )
        return [(job, row) for job, row in self.session.execute(query)]

    def not_introduced(self) -> set[tuple[str, int]]:
        """Incarnations that are not over and that the scheduler was not asked about yet."""
        query = sa.select(IncarnationRow.job_id, IncarnationRow.incarnation).where(
            IncarnationRow.terminal.is_(False), IncarnationRow.introduced.is_(False)
        )
        return {(job_id, incarnation) for job_id, incarnation in self.session.execute(query)}

    def over_since(self, submitted_after: float) -> list[IncarnationRow]:
        """Incarnations with a deadline that were submitted after a moment and are over, in order of submission."""
        query = sa.select(IncarnationRow).where(
            IncarnationRow.terminal.is_(True),
            IncarnationRow.deadline_at.is_not(None),
            IncarnationRow.submitted_at > submitted_after,
        )
        return list(self.session.scalars(query.order_by(IncarnationRow.submitted_at, IncarnationRow.job_id)))

    def live_count(self) -> int:
        """How many incarnations are not over."""
        query = sa.select(sa.func.count()).select_from(IncarnationRow).where(IncarnationRow.drained.is_(False))
        return self.session.scalar(query) or 0

    def open_generations(self) -> list[GenerationRow]:
        """Generations whose end is not handled yet, oldest first."""
        query = (
            sa.select(GenerationRow)
            .where(GenerationRow.handled.is_(False))
            .order_by(GenerationRow.job_id, GenerationRow.generation)
        )
        return list(self.session.scalars(query))

    def slots_held(self) -> list[tuple[str, list[Any]]]:
        """The jobs whose gangs may have processes, each with a gang's slots."""
        query = sa.select(GenerationRow.job_id, GenerationRow.placement).where(
            GenerationRow.handled.is_(False), GenerationRow.state.in_(STANDING)
        )
        return [(job_id, placement) for job_id, placement in self.session.execute(query)]

    def with_gangs(self) -> list[str]:
        """Jobs that may have workers."""
        query = sa.select(GenerationRow.job_id).where(GenerationRow.handled.is_(False)).distinct()
        return sorted(self.session.scalars(query))

    def generation(self, job_id: str, generation: int) -> GenerationRow | None:
        """One generation."""
        return self.session.get(GenerationRow, (job_id, generation))

    def generations(self, job_id: str, incarnation: int) -> list[GenerationRow]:
        """All generations of an incarnation, oldest first."""
        query = (
            sa.select(GenerationRow)
            .where(GenerationRow.job_id == job_id, GenerationRow.incarnation == incarnation)
            .order_by(GenerationRow.generation)
        )
        return list(self.session.scalars(query))

    def live_generations(self) -> dict[tuple[str, int], list[GenerationRow]]:
        """All generations of every incarnation that is not over, by job and incarnation, oldest first."""
        query = (
            sa.select(GenerationRow)
            .join(IncarnationRow)
            .where(IncarnationRow.terminal.is_(False))
            .order_by(GenerationRow.job_id, GenerationRow.generation)
        )
        found: dict[tuple[str, int], list[GenerationRow]] = {}
        for row in self.session.scalars(query):
            found.setdefault((row.job_id, row.incarnation), []).append(row)
        return found

    def generations_between(self, from_at: float, until_at: float, limit: int) -> list[tuple[JobRow, GenerationRow]]:
        """The newest generations that held slots between two moments, with their jobs, oldest first.

        Without what was measured in them: there may be thousands.
        """
        query = (
            sa.select(JobRow, GenerationRow)
            .options(*(defer(column, raiseload=True) for column in _MEASURED))
            .join(JobRow, JobRow.job_id == GenerationRow.job_id)
            .where(*_held_between(from_at, until_at))
            .order_by(GenerationRow.holding_at.desc(), GenerationRow.job_id, GenerationRow.generation.desc())
            .limit(limit)
        )
        return [(job, row) for job, row in self.session.execute(query)][::-1]

    def holdings_between(self, from_at: float, until_at: float) -> Iterator[tuple[str, list[HeldSlots]]]:
        """By job, all that held slots between two moments, oldest first; the job is told by its recurring key.

        There may be very many: one after the other, and only what is needed of each.
        """
        notes = sa.case((GenerationRow.continues.is_not(None), GenerationRow.notes))
        query = (
            sa.select(
                GenerationRow.job_id,
                JobRow.recurring_key,
                GenerationRow.generation,
                GenerationRow.placement,
                GenerationRow.mode,
                GenerationRow.continues,
                GenerationRow.holding_at,
                GenerationRow.running_at,
                GenerationRow.ended_at,
                GenerationRow.last_step_at,
                sa.type_coerce(notes, GenerationRow.notes.type),
            )
            .join(JobRow, JobRow.job_id == GenerationRow.job_id)
            .where(*_held_between(from_at, until_at))
            .order_by(GenerationRow.job_id, GenerationRow.generation)
            .execution_options(yield_per=_ROWS_AT_ONCE)
        )
        for (_, recurring_key), rows in itertools.groupby(self.session.execute(query), key=lambda row: row[:2]):
            yield recurring_key, [HeldSlots._make((*row[2:-1], row[-1] or GenerationNotes())) for row in rows]

    def totals_between(self, from_at: float, until_at: float) -> list[DagAsked]:
        """By DAG, what was asked for and how it went, of all that was submitted and not over between two moments."""
        began = (
            sa.select(sa.func.min(GenerationRow.running_at))
            .where(
                GenerationRow.job_id == IncarnationRow.job_id, GenerationRow.incarnation == IncarnationRow.incarnation
            )
            .scalar_subquery()
        )
        asked = (
            sa.select(
                sa.func.coalesce(JobRow.identity["namespace"].as_string(), "").label("namespace"),
                JobRow.dag_id,
                sa.type_coerce(IncarnationRow.verdict, sa.JSON)["decision"].as_string().label("decision"),
                IncarnationRow.result["met"].as_boolean().label("met"),
                (began - IncarnationRow.submitted_at).label("wait_s"),
            )
            .join(JobRow, JobRow.job_id == IncarnationRow.job_id)
            .where(*_asked_between(from_at, until_at))
            .subquery()
        )
        whose = (asked.c.namespace, asked.c.dag_id)
        rank = sa.func.row_number().over(partition_by=whose, order_by=asked.c.wait_s)
        waits = (
            sa.select(*whose, asked.c.wait_s, rank.label("rank"), sa.func.count().over(partition_by=whose).label("of"))
            .where(asked.c.wait_s.is_not(None))
            .subquery()
        )
        middle = (
            sa.select(waits.c.namespace, waits.c.dag_id, sa.func.avg(waits.c.wait_s).label("wait_s"))
            .where((2 * waits.c.rank).between(waits.c.of, waits.c.of + 2))
            .group_by(waits.c.namespace, waits.c.dag_id)
            .subquery()
        )
        sums = (
            sa.select(
                *whose,
                sa.func.count().label("runs"),
                sa.func.count(sa.case((asked.c.decision == "rejected", 1))).label("rejected"),
                sa.func.count(asked.c.met).label("judged"),
                sa.func.count(sa.case((asked.c.met.is_(sa.true()), 1))).label("met"),
            )
            .group_by(*whose)
            .subquery()
        )
        same = sa.and_(middle.c.namespace == sums.c.namespace, middle.c.dag_id == sums.c.dag_id)
        query = (
            sa.select(sums, middle.c.wait_s.label("median_wait_s"))
            .outerjoin(middle, same)
            .order_by(sums.c.namespace, sums.c.dag_id)
        )
        return [DagAsked.model_validate(dict(row)) for row in self.session.execute(query).mappings()]

    def incarnations_between(self, from_at: float, until_at: float, limit: int) -> list[tuple[JobRow, IncarnationRow]]:
        """The newest incarnations that were submitted and not over between two moments, oldest first.

        Of each only when, what was said of it, and how it ended: there may be thousands.
        """
        query = (
            sa.select(JobRow, IncarnationRow)
            .options(load_only(*_OUTLINE, raiseload=True))
            .join(JobRow, JobRow.job_id == IncarnationRow.job_id)
            .where(*_asked_between(from_at, until_at))
            .order_by(IncarnationRow.submitted_at.desc(), IncarnationRow.job_id)
            .limit(limit)
        )
        return [(job, row) for job, row in self.session.execute(query)][::-1]

    def began_between(self, from_at: float, until_at: float) -> dict[tuple[str, int], float]:
        """When the first workers of each incarnation that was not over between two moments began to train."""
        query = (
            sa.select(IncarnationRow.job_id, IncarnationRow.incarnation, sa.func.min(GenerationRow.running_at))
            .join(GenerationRow)
            .where(*_asked_between(from_at, until_at), GenerationRow.running_at.is_not(None))
            .group_by(IncarnationRow.job_id, IncarnationRow.incarnation)
        )
        found = self.session.execute(query)
        return {(job_id, incarnation): at for job_id, incarnation, at in found if at is not None}

    def incarnations_over_before(self, moment: float, limit: int) -> list[tuple[str, int]]:
        """Incarnations that were over before a moment, and of which there are generations still, oldest first."""
        query = (
            sa.select(GenerationRow.job_id, GenerationRow.incarnation)
            .join(IncarnationRow)
            .where(
                GenerationRow.ended_at < moment,
                IncarnationRow.finished_at < moment,
                IncarnationRow.terminal.is_(True),
                IncarnationRow.drained.is_(True),
            )
            .group_by(GenerationRow.job_id, GenerationRow.incarnation)
            .order_by(sa.func.min(GenerationRow.ended_at))
            .limit(limit)
        )
        return [(job_id, incarnation) for job_id, incarnation in self.session.execute(query)]

    def first_event_id(self) -> int:
        """Id of the oldest event that is kept; 0 when there is none."""
        return self.session.scalar(sa.select(sa.func.min(EventRow.event_id))) or 0

    def event_times(self, event_ids: Sequence[int]) -> dict[int, float]:
        """When some events were."""
        found: dict[int, float] = {}
        for some in in_parts(event_ids):
            query = sa.select(EventRow.event_id, EventRow.at).where(EventRow.event_id.in_(some))
            found.update((event_id, at) for event_id, at in self.session.execute(query))
        return found

    def runs_of(self, recurring_key: str, limit: int) -> list[tuple[JobRow, IncarnationRow]]:
        """The last runs of a recurring task, each with its current incarnation, newest first."""
        query = (
            sa.select(JobRow, IncarnationRow)
            .join(
                IncarnationRow,
                sa.and_(IncarnationRow.job_id == JobRow.job_id, IncarnationRow.incarnation == JobRow.incarnation),
            )
            .where(JobRow.recurring_key == recurring_key)
            .order_by(IncarnationRow.submitted_at.desc(), JobRow.job_id)
            .limit(limit)
        )
        return [(job, row) for job, row in self.session.execute(query)]

    def candidates(self, job_id: str, incarnation: int) -> list[CandidateRow]:
        """Candidate checkpoints of an incarnation, oldest first."""
        query = (
            sa.select(CandidateRow)
            .where(CandidateRow.job_id == job_id, CandidateRow.incarnation == incarnation)
            .order_by(CandidateRow.generation, CandidateRow.step)
        )
        return list(self.session.scalars(query))

    def samples(self, job_id: str, incarnation: int) -> list[SampleRow]:
        """How an incarnation did, oldest first."""
        query = sa.select(SampleRow).where(SampleRow.job_id == job_id, SampleRow.incarnation == incarnation)
        return list(self.session.scalars(query.order_by(SampleRow.number)))

    def worker_time(self, job_id: str, incarnation: int, worker_id: str) -> WorkerTimesRow | None:
        """Where the time of a worker went."""
        return self.session.get(WorkerTimesRow, (job_id, incarnation, worker_id))

    def worker_times(self, job_id: str, incarnation: int) -> list[WorkerTimesRow]:
        """Where the time of every worker that an incarnation ever had went, in order of rank."""
        query = sa.select(WorkerTimesRow).where(
            WorkerTimesRow.job_id == job_id, WorkerTimesRow.incarnation == incarnation
        )
        return list(self.session.scalars(query.order_by(WorkerTimesRow.rank, WorkerTimesRow.worker_id)))

    def open_candidates(self) -> list[CandidateRow]:
        """Candidates of all undrained incarnations that are there: not verified yet, or valid. Oldest first."""
        query = (
            sa.select(CandidateRow)
            .join(
                IncarnationRow,
                sa.and_(
                    IncarnationRow.job_id == CandidateRow.job_id, IncarnationRow.incarnation == CandidateRow.incarnation
                ),
            )
            .where(IncarnationRow.drained.is_(False), CandidateRow.status.in_(CANDIDATE_IS_THERE))
            .order_by(CandidateRow.generation, CandidateRow.step)
        )
        return list(self.session.scalars(query))

    def open_amendments(self) -> list[AmendmentRow]:
        """Amendments without an answer, oldest first."""
        query = sa.select(AmendmentRow).where(AmendmentRow.answer.is_(None)).order_by(AmendmentRow.amendment_id)
        return list(self.session.scalars(query))

    def answered(self, amendment_ids: Collection[int]) -> dict[int, AmendmentAnswer]:
        """By id, what the loop has said to these amendments, as far as it has."""
        query = sa.select(AmendmentRow).where(AmendmentRow.amendment_id.in_(sorted(amendment_ids)))
        answers = ((row.amendment_id, readable(row.answer)) for row in self.session.scalars(query))
        return {amendment_id: answer for amendment_id, answer in answers if answer is not None}

    def events(self, after: int, job_id: str | None, limit: int) -> list[EventRow]:
        """Events with a larger id, oldest first."""
        query = sa.select(EventRow).where(EventRow.event_id > after).order_by(EventRow.event_id).limit(limit)
        if job_id is not None:
            query = query.where(EventRow.job_id == job_id)
        return list(self.session.scalars(query))

    def last_event_id(self) -> int:
        """Id of the newest event; 0 when there is none."""
        return self.session.scalar(sa.select(sa.func.max(EventRow.event_id))) or 0

    def drains(self) -> dict[str, float]:
        """Nodes that go away, and when (UTC seconds)."""
        return {row.node_id: row.until_at for row in self.session.scalars(sa.select(DrainRow))}

    def avoided(self) -> list[AvoidedSlotRow]:
        """Slots that are avoided for a while."""
        query = sa.select(AvoidedSlotRow).order_by(AvoidedSlotRow.node_id, AvoidedSlotRow.slot_index)
        return list(self.session.scalars(query))

    def history(self, recurring_key: str, signature: str) -> HistoryRow | None:
        """What past runs of a task showed."""
        return self.session.get(HistoryRow, (recurring_key, signature))

    def recurring_task(self, recurring_key: str) -> RecurringTaskRow | None:
        """What is known of a recurring task's runs."""
        return self.session.get(RecurringTaskRow, recurring_key)

    def recurring_tasks(self) -> list[RecurringTaskRow]:
        """All tasks of which a run is due."""
        query = sa.select(RecurringTaskRow).where(RecurringTaskRow.next_due_at.is_not(None))
        return list(self.session.scalars(query.order_by(RecurringTaskRow.recurring_key)))

    def recurring_tasks_of(self, recurring_keys: Sequence[str]) -> dict[str, RecurringTaskRow]:
        """What is known of some recurring tasks, a few hundred at most, by key."""
        query = sa.select(RecurringTaskRow).where(RecurringTaskRow.recurring_key.in_(recurring_keys))
        return {row.recurring_key: row for row in self.session.scalars(query)}

    def load_histories(self, recurring_keys: Sequence[str]) -> None:
        """Read the histories of some tasks, a few hundred at most, at once: :meth:`history` then asks no more."""
        query = sa.select(HistoryRow).where(HistoryRow.recurring_key.in_(recurring_keys))
        self._loaded = list(self.session.scalars(query))

    def last_success(self, recurring_key: str, other_than: str) -> IncarnationRow | None:
        """The newest successful incarnation of a recurring task in another run than this job."""
        query = (
            sa.select(IncarnationRow)
            .join(JobRow, JobRow.job_id == IncarnationRow.job_id)
            .where(
                JobRow.recurring_key == recurring_key,
                JobRow.job_id != other_than,
                IncarnationRow.state == "succeeded",
                IncarnationRow.promoted.is_not(None),
            )
            .order_by(IncarnationRow.finished_at.desc())
            .limit(1)
        )
        return self.session.scalar(query)


class Writer(Reader):
    """A write transaction: what it changes is there as a whole, or not at all."""

    def __init__(self, session: Session, now: Callable[[], float]) -> None:
        super().__init__(session)
        self._now = now

    def add(self, row: Any) -> None:
        """Add a row."""
        self.session.add(row)

    def forget_details(self, job_id: str, incarnation: int) -> None:
        """Delete generations, samples and times of workers of an incarnation."""
        for table in (SampleRow, WorkerTimesRow, GenerationRow):
            self.session.execute(sa.delete(table).where(table.job_id == job_id, table.incarnation == incarnation))

    def forget_events(self, moment: float, limit: int) -> int:
        """Delete the oldest events, as far as they are older than a moment, at most ``limit``; how many it were."""
        query = sa.select(EventRow.event_id, EventRow.at).order_by(EventRow.event_id).limit(limit)
        old = list(itertools.takewhile(lambda one: one.at < moment, self.session.execute(query)))
        if old:
            self.session.execute(sa.delete(EventRow).where(EventRow.event_id <= old[-1].event_id))
        return len(old)

    def add_event(self, what: EventKind | EventData, reason: str, row: IncarnationRow | None = None) -> int:
        """Write an event (of an incarnation) and return its id."""
        kind, data = kind_and_data(what)
        event = EventRow(
            job_id=row.job_id if row else None,
            incarnation=row.incarnation if row else None,
            at=self._now(),
            kind=kind.value,
            reason=reason,
            data=data,
        )
        self.session.add(event)
        self.session.flush()
        if row is not None:
            row.last_event_id = event.event_id
        return event.event_id


class Store:
    """Opens sessions on one database. Thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], float] = time.time,
        check: Callable[[sa.Connection], None] = lambda _: None,
    ) -> None:
        """``check`` is called in each write transaction, and raises when this process may not write any more."""
        self.clock, self._check = clock, check
        self._writing = threading.RLock()
        self.engine = _open_engine(url)
        ensure_schema(self.engine)
        self.sessions = sessionmaker(self.engine, expire_on_commit=False, autoflush=True)
        # SQLite's read transactions see one state of the database anyway.
        postgresql = self.engine.dialect.name == "postgresql"
        self.read_options = {"isolation_level": "REPEATABLE READ"} if postgresql else {}
        alone = {"isolation_level": "AUTOCOMMIT"} if postgresql else {_NO_TRANSACTION: True}
        self.engine_without_transactions = self.engine.execution_options(**alone)
        """Each statement stands alone."""
        self._engine_for_writing = self.engine.execution_options(**{_WRITES: True})

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """A consistent view of the database."""
        with self.sessions() as session:
            session.connection(execution_options=self.read_options)
            yield Reader(session)

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """A write transaction: committed at the end of the block, rolled back when it raises."""
        with self.sessions() as session, self.alone_in_writing(session):
            yield Writer(session, self.clock)
            session.flush()
            crashpoints.point("before commit")
            session.commit()
        crashpoints.point("after commit")

    @contextmanager
    def alone_in_writing(self, session: Session) -> Iterator[None]:
        """Begin the transaction in which a session writes; nobody else's is under way meanwhile."""
        with self._writing:
            session.bind = self._engine_for_writing
            connection = session.connection()
            if connection.dialect.name == "postgresql":
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITE_LOCK_KEY})
            self._check(connection)
            yield


def connect_options(url: str) -> dict[str, Any]:
    """How to connect to PostgreSQL, where the URL does not say otherwise."""
    parsed = sa.make_url(url)
    understood = _POSTGRES if parsed.get_driver_name().startswith("psycopg") else {}
    return {name: value for name, value in understood.items() if name not in parsed.query}


def _open_engine(url: str) -> sa.Engine:
    if not url.startswith("sqlite"):
        return sa.create_engine(
            url,
            connect_args=connect_options(url),
            pool_size=25,
            max_overflow=0,
            pool_pre_ping=True,
            hide_parameters=True,
        )
    engine = sa.create_engine(  # all are kept: what overflows would be opened and closed for each question
        url,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=25,
        max_overflow=0,
        hide_parameters=True,  # They may be secrets, and errors are logged.
    )

    @sa.event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # The driver would begin (and end) transactions by its own rules.
        cursor = connection.cursor()
        for pragma in _PRAGMAS:
            cursor.execute(f"PRAGMA {pragma}")
        if cursor.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            _switch_to_wal(cursor)
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        if not options.get(_NO_TRANSACTION):
            connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")

    return engine


def _switch_to_wal(cursor: Any) -> None:
    """Switch a new database to WAL: the one statement for which SQLite does not wait while others do the same."""
    end = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > end:
                raise
        time.sleep(0.05)


def _held_between(from_at: float, until_at: float) -> tuple[sa.ColumnElement[bool], ...]:
    """Generations that held slots between two moments."""
    goes_on = sa.and_(GenerationRow.ended_at.is_(None), GenerationRow.handled.is_(False))
    return GenerationRow.holding_at < until_at, sa.or_(GenerationRow.ended_at > from_at, goes_on)


def _asked_between(from_at: float, until_at: float) -> tuple[sa.ColumnElement[bool], ...]:
    """Incarnations that were submitted and not over between two moments."""
    goes_on = IncarnationRow.finished_at.is_(None)
    return IncarnationRow.submitted_at < until_at, sa.or_(IncarnationRow.finished_at > from_at, goes_on)


_PRAGMAS: Sequence[str] = (
    f"busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}",
    "synchronous=FULL",
    "foreign_keys=ON",
    "cache_size=-4096",
)
