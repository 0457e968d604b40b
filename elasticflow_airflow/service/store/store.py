"""The store: all SQL of the service, over SQLite (WAL) or PostgreSQL.

Writes are serialised: there is one write transaction at a time, within this process and across processes. Each takes
the database's own lock when it begins (``BEGIN IMMEDIATE``, or an advisory lock of PostgreSQL). Every rule that reads
before it writes therefore holds. Knows nothing of scheduling or HTTP.
"""

from __future__ import annotations

import copy
import itertools
import re
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
from elasticflow_airflow.scheduler_core.model.reason import Reason
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
    EngineRecordRow,
    EventRow,
    GenerationRow,
    HistoryRow,
    IncarnationRow,
    JobRow,
    RecurringTaskRow,
    SampleRow,
    SnapshotRow,
    WorkerTimesRow,
)

DATABASE_AWAY = (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError, sa.exc.TimeoutError)
"""Raised when the database cannot be used now: it is unreachable, locked, full, or read-only."""
OF_CURRENT_INCARNATION = sa.and_(
    IncarnationRow.job_id == JobRow.job_id, IncarnationRow.incarnation == JobRow.incarnation
)
"""Joins a job and its current incarnation."""
_BUSY_TIMEOUT_S = 30.0
_POSTGRES = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
    "prepare_threshold": None,
}
"""A server whose machine is gone refuses no connection; with these it is seen as lost long before a lease expires.

Statements are not prepared: behind a pooler of transactions the next one may reach another connection.
"""
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
"""The columns of an incarnation that a status shows."""
_OUTLINE = (
    IncarnationRow.submitted_at,
    IncarnationRow.introduced,
    IncarnationRow.terminal,
    IncarnationRow.verdict,
    IncarnationRow.deadline_at,
    IncarnationRow.finished_at,
    IncarnationRow.result,
)
# The statements of each pass of the loop and of each poll of an owner: to build one costs as much as to run it.
_IDS: sa.BindParameter[list[str]] = sa.bindparam("ids", expanding=True)
_CURRENT = sa.select(JobRow, IncarnationRow).join(IncarnationRow, OF_CURRENT_INCARNATION).where(JobRow.job_id.in_(_IDS))
_GENERATIONS_OF_CURRENT = (
    sa.select(GenerationRow)
    .options(load_only(*_SHOWN, raiseload=True))
    .join(JobRow, sa.and_(GenerationRow.job_id == JobRow.job_id, GenerationRow.incarnation == JobRow.incarnation))
    .where(JobRow.job_id.in_(_IDS))
    .order_by(GenerationRow.job_id, GenerationRow.generation)
)
_UNDRAINED = (
    sa.select(JobRow, IncarnationRow)
    .join(IncarnationRow, IncarnationRow.job_id == JobRow.job_id)
    .where(IncarnationRow.drained.is_(False))
    .order_by(IncarnationRow.submitted_at, IncarnationRow.job_id, IncarnationRow.incarnation)
)
_NOT_INTRODUCED = sa.select(IncarnationRow.job_id, IncarnationRow.incarnation).where(
    IncarnationRow.terminal.is_(False), IncarnationRow.introduced.is_(False)
)
_OPEN_GENERATIONS = (
    sa.select(GenerationRow)
    .where(GenerationRow.handled.is_(False))
    .order_by(GenerationRow.job_id, GenerationRow.generation)
)
_OPEN_CANDIDATES = (
    sa.select(CandidateRow)
    .join(
        IncarnationRow,
        sa.and_(IncarnationRow.job_id == CandidateRow.job_id, IncarnationRow.incarnation == CandidateRow.incarnation),
    )
    .where(IncarnationRow.drained.is_(False), CandidateRow.status.in_(CANDIDATE_IS_THERE))
    .order_by(CandidateRow.generation, CandidateRow.step)
)
_OPEN_AMENDMENTS = sa.select(AmendmentRow).where(AmendmentRow.answer.is_(None)).order_by(AmendmentRow.amendment_id)
_DRAINS = sa.select(DrainRow)
_AVOIDED = sa.select(AvoidedSlotRow).order_by(AvoidedSlotRow.node_id, AvoidedSlotRow.slot_index)
_RARE = sa.select(sa.exists(_OPEN_AMENDMENTS.order_by(None)), sa.exists(_DRAINS), sa.exists(_AVOIDED.order_by(None)))
_WANTS_ATTENTION = sa.select(
    sa.or_(
        sa.exists(_NOT_INTRODUCED),
        sa.exists(_OPEN_AMENDMENTS.order_by(None)),
        sa.exists(
            sa.select(IncarnationRow.job_id).where(
                IncarnationRow.terminal.is_(False), IncarnationRow.cancel_reason.is_not(None)
            )
        ),
    )
)
_WRITES, _NO_TRANSACTION = "elasticflow_write", "elasticflow_no_transaction"
_WRITE_LOCK_KEY = 0x456C4673  # any constant; all writers must use the same one
_IDLE_LIMIT = "3s"
"""The server ends a write transaction whose process stands still for so long: others wait for its lock."""
_BEGIN_WRITING = sa.text(
    "SELECT set_config('idle_in_transaction_session_timeout', :limit, true), pg_advisory_xact_lock(:key)"
)
_TELL = sa.text("SELECT pg_notify(:channel, :me)")


class LostOwnershipError(sa.exc.OperationalError):
    """This process may not decide now: nothing of its decisions may be written."""

    def __init__(self, reason: str) -> None:
        super().__init__(None, None, RuntimeError(reason))


def in_parts(ids: Sequence[_I]) -> Iterator[Sequence[_I]]:
    """Yield the ids in chunks that are small enough for one statement."""
    for start in range(0, len(ids), _IDS_AT_ONCE):
        yield ids[start : start + _IDS_AT_ONCE]


class Current(NamedTuple):
    """A job, its current incarnation, and all generations of that incarnation, oldest first."""

    job: JobRow
    row: IncarnationRow
    generations: list[GenerationRow]


class HeldSlots(NamedTuple):
    """Which slots a generation held, and when: a subset of a ``GenerationRow``, with the same field names."""

    generation: int
    placement: list[Any]
    mode: str
    continues: int | None
    holding_at: float | None
    running_at: float | None
    ended_at: float | None
    last_step_at: float | None
    notes: GenerationNotes


class NextTerms(NamedTuple):
    """What the next attempt of a job asks for instead of what its DAG says; None: what the DAG says."""

    deadline_at: float | None
    best_effort: bool
    value: float | None


class Reader:
    """Queries over one open session. Rows stay readable after the session is closed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._histories: dict[str, dict[str, HistoryRow]] = {}
        self._tasks: dict[str, RecurringTaskRow | None] = {}
        """What was loaded in advance, by recurring key: none of a task that is new."""

    def job(self, job_id: str) -> JobRow | None:
        """Return the job with this id, or None."""
        return self.session.get(JobRow, job_id)

    def incarnation(self, job_id: str, incarnation: int) -> IncarnationRow | None:
        """Return one incarnation of a job, or None."""
        return self.session.get(IncarnationRow, (job_id, incarnation))

    def current(self, job_id: str) -> tuple[JobRow, IncarnationRow] | None:
        """Return a job with its current incarnation, or None."""
        job = self.job(job_id)
        row = job and self.incarnation(job_id, job.incarnation)
        return (job, row) if job and row else None

    def current_of(self, job_ids: Collection[str]) -> dict[str, Current]:
        """Return those of these jobs that exist, by id, with their current incarnations and the generations of these.

        Of the generations, only the columns that a status shows are loaded.
        """
        found: dict[str, Current] = {}
        ids = sorted(job_ids)
        for some in in_parts(ids):
            rows = self.session.execute(_CURRENT, {"ids": some})
            found |= {job.job_id: Current(job, row, []) for job, row in rows}
        self._add_generations(found)
        return found

    def with_generations(self, jobs: Iterable[tuple[JobRow, IncarnationRow]]) -> list[Current]:
        """Add the generations of the current incarnations to the jobs, in the same order.

        Only the columns that a status shows are loaded.
        """
        found = {job.job_id: Current(job, row, []) for job, row in jobs}
        self._add_generations(found)
        return list(found.values())

    def _add_generations(self, found: Mapping[str, Current]) -> None:
        ids = sorted(found)
        for some in in_parts(ids):
            for row in self.session.scalars(_GENERATIONS_OF_CURRENT, {"ids": some}):
                found[row.job_id].generations.append(row)

    def decided(self, wanted: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return those of these incarnations that the loop has decided on, or that are terminal."""
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
        text: str | None = None,
        after: tuple[float, str] | None = None,
        shown_only: bool = False,
    ) -> list[tuple[JobRow, IncarnationRow]]:
        """List jobs with their current incarnations, newest first; ``dag_id`` names one DAG or several.

        ``shown_only`` loads only the columns of the incarnations that a status shows. ``identity`` filters by any of
        namespace, run_id, task_id and map_index. Each word of ``text`` must occur in the job's id, DAG, task, run or
        state. ``after`` is the position of a job, (submitted at in UTC seconds, id): only jobs that come after it in
        this order are listed.
        """
        query = (
            sa.select(JobRow, IncarnationRow)
            .join(IncarnationRow, OF_CURRENT_INCARNATION)
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
        for word in (text or "").split():
            places = (
                JobRow.job_id,
                JobRow.dag_id,
                *(JobRow.identity[part].as_string() for part in ("task_id", "run_id")),
            )
            found = (place.icontains(word, autoescape=True) for place in (*places, IncarnationRow.state))
            query = query.where(sa.or_(*found))
        dag_ids = [dag_id] if isinstance(dag_id, str) else dag_id
        if dag_ids is not None:
            query = query.where(JobRow.dag_id.in_(dag_ids))
        if live is not None:
            # Few are live: the index finds them fastest. The others are many, and are best read in the list's order.
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
        """Return every incarnation that the loop still has to handle, in order of submission."""
        return [(job, row) for job, row in self.session.execute(_UNDRAINED)]

    def not_introduced(self) -> set[tuple[str, int]]:
        """Return the incarnations that are not terminal and have not been submitted to the scheduler yet."""
        return {(job_id, incarnation) for job_id, incarnation in self.session.execute(_NOT_INTRODUCED)}

    def over_since(self, submitted_after: float) -> list[IncarnationRow]:
        """Return terminal incarnations with a deadline that were submitted after this time, in order of submission."""
        query = sa.select(IncarnationRow).where(
            IncarnationRow.terminal.is_(True),
            IncarnationRow.deadline_at.is_not(None),
            IncarnationRow.submitted_at > submitted_after,
        )
        return list(self.session.scalars(query.order_by(IncarnationRow.submitted_at, IncarnationRow.job_id)))

    def snapshots_in_use(self) -> set[str]:
        """Return the hashes of the code of all incarnations that are not drained."""
        code = IncarnationRow.submission["command"]["snapshot"].as_string()
        query = sa.select(code).where(IncarnationRow.drained.is_(False)).distinct()
        return {sha256 for sha256 in self.session.scalars(query) if sha256 is not None}

    def live_count(self) -> int:
        """Count the incarnations that are not drained."""
        query = sa.select(sa.func.count()).select_from(IncarnationRow).where(IncarnationRow.drained.is_(False))
        return self.session.scalar(query) or 0

    def open_generations(self) -> list[GenerationRow]:
        """Return the generations whose end is not handled yet, oldest first."""
        return list(self.session.scalars(_OPEN_GENERATIONS))

    def slots_held(self) -> list[tuple[str, list[Any]]]:
        """Return (job id, slots) of every gang that may have processes."""
        query = sa.select(GenerationRow.job_id, GenerationRow.placement).where(
            GenerationRow.handled.is_(False), GenerationRow.state.in_(STANDING)
        )
        return [(job_id, placement) for job_id, placement in self.session.execute(query)]

    def with_gangs(self) -> list[str]:
        """Return the ids of jobs that may have workers, sorted."""
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
        """Return the newest generations that held slots between two times, with their jobs, oldest first.

        The columns with measurements are not loaded: there may be thousands of rows.
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
        """Yield, for each job, its recurring key and its generations that held slots between two times, oldest first.

        There may be very many: rows are streamed, and only the needed columns are read.
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
        """Return totals by DAG over all incarnations that were submitted and not finished between two times."""
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
        """Return the newest incarnations that were submitted and not finished between two times, oldest first.

        Only their times, verdicts and results are loaded: there may be thousands.
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
        """Return when the first workers began to train, for each incarnation that was unfinished between two times."""
        query = (
            sa.select(IncarnationRow.job_id, IncarnationRow.incarnation, sa.func.min(GenerationRow.running_at))
            .join(GenerationRow)
            .where(*_asked_between(from_at, until_at), GenerationRow.running_at.is_not(None))
            .group_by(IncarnationRow.job_id, IncarnationRow.incarnation)
        )
        found = self.session.execute(query)
        return {(job_id, incarnation): at for job_id, incarnation, at in found if at is not None}

    def incarnations_over_before(self, moment: float, limit: int) -> list[tuple[str, int]]:
        """Return incarnations that finished before this time and still have generations stored, oldest first."""
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
        """Return the id of the oldest stored event; 0 when there is none."""
        return self.session.scalar(sa.select(sa.func.min(EventRow.event_id))) or 0

    def event_times(self, event_ids: Sequence[int]) -> dict[int, float]:
        """Return the times of these events (UTC seconds), by id."""
        found: dict[int, float] = {}
        for some in in_parts(event_ids):
            query = sa.select(EventRow.event_id, EventRow.at).where(EventRow.event_id.in_(some))
            found.update((event_id, at) for event_id, at in self.session.execute(query))
        return found

    def runs_of(self, recurring_key: str, limit: int) -> list[tuple[JobRow, IncarnationRow]]:
        """Return the last runs of a recurring task, each with its current incarnation, newest first."""
        query = (
            sa.select(JobRow, IncarnationRow)
            .join(IncarnationRow, OF_CURRENT_INCARNATION)
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
        """Return the samples of an incarnation, oldest first."""
        query = sa.select(SampleRow).where(SampleRow.job_id == job_id, SampleRow.incarnation == incarnation)
        return list(self.session.scalars(query.order_by(SampleRow.number)))

    def worker_time(self, job_id: str, incarnation: int, worker_id: str) -> WorkerTimesRow | None:
        """Return the time breakdown of one worker."""
        return self.session.get(WorkerTimesRow, (job_id, incarnation, worker_id))

    def worker_times(self, job_id: str, incarnation: int) -> list[WorkerTimesRow]:
        """Return the time breakdown of every worker that an incarnation ever had, in order of rank."""
        query = sa.select(WorkerTimesRow).where(
            WorkerTimesRow.job_id == job_id, WorkerTimesRow.incarnation == incarnation
        )
        return list(self.session.scalars(query.order_by(WorkerTimesRow.rank, WorkerTimesRow.worker_id)))

    def open_candidates(self) -> list[CandidateRow]:
        """Return the existing candidates (not verified yet, or valid) of all undrained incarnations, oldest first."""
        return list(self.session.scalars(_OPEN_CANDIDATES))

    def open_amendments(self) -> list[AmendmentRow]:
        """Amendments without an answer, oldest first."""
        return list(self.session.scalars(_OPEN_AMENDMENTS))

    def answered(self, amendment_ids: Collection[int]) -> dict[int, AmendmentAnswer]:
        """Return the answers of the loop to these amendments, by id; those without an answer are left out."""
        query = sa.select(AmendmentRow).where(AmendmentRow.amendment_id.in_(sorted(amendment_ids)))
        answers = ((row.amendment_id, readable(row.answer)) for row in self.session.scalars(query))
        return {amendment_id: answer for amendment_id, answer in answers if answer is not None}

    def next_terms(self, job_id: str) -> NextTerms:
        """Return what was set for the later attempts of a job since it last succeeded: the newest of each.

        A deadline that was changed while a later attempt lived was for that attempt, and ends what was set before.
        """
        succeeded = sa.select(sa.func.max(IncarnationRow.incarnation)).where(
            IncarnationRow.job_id == job_id, IncarnationRow.state == State.SUCCEEDED
        )
        query = sa.select(AmendmentRow).where(
            AmendmentRow.job_id == job_id,
            AmendmentRow.answer.is_not(None),
            AmendmentRow.incarnation > sa.func.coalesce(succeeded.scalar_subquery(), 0),
        )
        terms = NextTerms(None, best_effort=False, value=None)
        for amendment in self.session.scalars(query.order_by(AmendmentRow.amendment_id)):
            answer = readable(amendment.answer)
            if answer is None or not answer.accepted:
                continue
            if amendment.deadline_at is not None or amendment.best_effort:
                lasts = answer.for_next_attempt
                terms = terms._replace(
                    deadline_at=amendment.deadline_at if lasts else None, best_effort=lasts and amendment.best_effort
                )
            if answer.for_next_attempt and amendment.value is not None:
                terms = terms._replace(value=amendment.value)
        return terms

    def events(self, after: int, job_id: str | None, limit: int) -> list[EventRow]:
        """Return events with an id larger than ``after``, oldest first."""
        query = sa.select(EventRow).where(EventRow.event_id > after).order_by(EventRow.event_id).limit(limit)
        if job_id is not None:
            query = query.where(EventRow.job_id == job_id)
        return list(self.session.scalars(query))

    def wants_attention(self) -> bool:
        """Return whether the loop has something to do that a handler has written."""
        return bool(self.session.scalar(_WANTS_ATTENTION))

    def last_event_id(self) -> int:
        """Return the id of the newest event; 0 when there is none."""
        return self.session.scalar(sa.select(sa.func.max(EventRow.event_id))) or 0

    def drains(self) -> dict[str, float]:
        """Return the draining nodes, and when each goes away (UTC seconds)."""
        return {row.node_id: row.until_at for row in self.session.scalars(_DRAINS)}

    def avoided(self) -> list[AvoidedSlotRow]:
        """Return the slots that are avoided for a while."""
        return list(self.session.scalars(_AVOIDED))

    def rare(self) -> tuple[bool, bool, bool]:
        """Return whether there are open amendments, draining nodes and avoided slots: usually there are none."""
        amendments, drains, avoided = self.session.execute(_RARE).one()
        return bool(amendments), bool(drains), bool(avoided)

    def history(self, recurring_key: str, signature: str) -> HistoryRow | None:
        """Return the history of a task's past runs for one signature."""
        known = self._histories.get(recurring_key)
        return self.session.get(HistoryRow, (recurring_key, signature)) if known is None else known.get(signature)

    def recurring_task(self, recurring_key: str) -> RecurringTaskRow | None:
        """Return what is stored about the runs of a recurring task."""
        known = recurring_key in self._tasks
        return self._tasks[recurring_key] if known else self.session.get(RecurringTaskRow, recurring_key)

    def recurring_tasks(self) -> list[RecurringTaskRow]:
        """Return all recurring tasks with a run that is due."""
        query = sa.select(RecurringTaskRow).where(RecurringTaskRow.next_due_at.is_not(None))
        return list(self.session.scalars(query.order_by(RecurringTaskRow.recurring_key)))

    def recurring_tasks_of(self, recurring_keys: Sequence[str]) -> dict[str, RecurringTaskRow]:
        """Return what is stored about these recurring tasks (a few hundred at most), by key."""
        query = sa.select(RecurringTaskRow).where(RecurringTaskRow.recurring_key.in_(recurring_keys))
        return {row.recurring_key: row for row in self.session.scalars(query)}

    def load_histories(self, recurring_keys: Sequence[str]) -> None:
        """Load the histories of these tasks (a few hundred at most) in one query; :meth:`history` then needs none."""
        query = sa.select(HistoryRow).where(HistoryRow.recurring_key.in_(recurring_keys))
        self._histories = {key: {} for key in recurring_keys}
        for row in self.session.scalars(query):
            self._histories[row.recurring_key][row.signature] = row

    def load_tasks(self, recurring_keys: Sequence[str]) -> None:
        """Load these tasks, too, and not only their histories: :meth:`recurring_task` then needs no query either."""
        if recurring_keys:
            self.load_histories(recurring_keys)
            self._tasks = {**dict.fromkeys(recurring_keys), **self.recurring_tasks_of(recurring_keys)}

    def last_success(self, recurring_key: str, other_than: str) -> IncarnationRow | None:
        """Return the newest successful incarnation of a recurring task, from a run other than this job."""
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
    """A write transaction: its changes are applied as a whole or not at all."""

    def __init__(self, session: Session, now: Callable[[], float]) -> None:
        super().__init__(session)
        self._now = now

    def add(self, row: Any) -> None:
        """Add a row."""
        self.session.add(row)

    def forget_details(self, job_id: str, incarnation: int) -> None:
        """Delete the generations, samples and worker times of an incarnation; of a job's last, also its engine record.

        Each new leader reads all records. The number of the job's latest generation is stored with the job.
        """
        for table in (SampleRow, WorkerTimesRow, GenerationRow):
            self.session.execute(sa.delete(table).where(table.job_id == job_id, table.incarnation == incarnation))
        others = sa.select(GenerationRow.job_id).where(GenerationRow.job_id == job_id)
        self.session.execute(sa.delete(EngineRecordRow).where(EngineRecordRow.job_id == job_id, ~others.exists()))

    def forget_events(self, moment: float, limit: int) -> int:
        """Delete the oldest events that are older than this time, at most ``limit``; returns how many were deleted."""
        query = sa.select(EventRow.event_id, EventRow.at).order_by(EventRow.event_id).limit(limit)
        old = list(itertools.takewhile(lambda one: one.at < moment, self.session.execute(query)))
        if old:
            self.session.execute(sa.delete(EventRow).where(EventRow.event_id <= old[-1].event_id))
        return len(old)

    def forget_snapshots(self, moment: float, in_use: Collection[str], limit: int) -> int:
        """Delete archives of code that are not in use and were stored or submitted before this time, oldest first.

        At most ``limit``; returns how many were deleted.
        """
        old = SnapshotRow.stored_at < moment
        query = sa.select(SnapshotRow.sha256).where(old).order_by(SnapshotRow.stored_at, SnapshotRow.sha256)
        unused = list(itertools.islice((one for one in self.session.scalars(query) if one not in in_use), limit))
        if not unused:
            return 0
        # The condition once more: a submit may have asked for one meanwhile.
        delete = sa.delete(SnapshotRow).where(old, SnapshotRow.sha256.in_(unused)).returning(SnapshotRow.sha256)
        return len(self.session.scalars(delete).all())

    def add_event(self, what: EventKind | EventData, reason: Reason, row: IncarnationRow | None = None) -> int:
        """Write an event, of an incarnation if ``row`` is given, and return its id."""
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

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time, replica_id: str | None = None) -> None:
        """``replica_id``: with PostgreSQL, other replicas hear of each write of this one (``leadership/news.py``)."""
        self.clock, self._replica_id = clock, replica_id
        self._check: Callable[[sa.Connection], None] = lambda _: None
        self._writing = threading.RLock()
        self.engine = _open_engine(url)
        ensure_schema(self.engine)
        self.sessions = sessionmaker(self.engine, expire_on_commit=False, autoflush=True)
        # A read transaction of SQLite is a consistent snapshot anyway.
        postgresql = self.engine.dialect.name == "postgresql"
        self.is_shared = postgresql
        """Services on several machines may use this database: what all of them need is in it, and not in a folder."""
        self.read_options = {"isolation_level": "REPEATABLE READ"} if postgresql else {}
        alone = {"isolation_level": "AUTOCOMMIT"} if postgresql else {_NO_TRANSACTION: True}
        self.engine_without_transactions = self.engine.execution_options(**alone)
        """Each statement is its own transaction."""
        self.channel = _channel_of(self.engine) if postgresql else ""
        """Where notifications of replicas on this database are heard."""
        self._engine_for_writing = self.engine.execution_options(**{_WRITES: True})

    def for_decisions(self, check: Callable[[sa.Connection], None]) -> Store:
        """Return the same store for the loop: ``check`` is called in each write transaction before anything is read.

        It raises LostOwnershipError when this process may no longer decide.
        """
        store = copy.copy(self)
        store._check = check
        return store

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Reader]:
        """Open a consistent snapshot of the database for reading."""
        with self.sessions() as session:
            session.connection(execution_options=self.read_options)
            yield Reader(session)

    @contextmanager
    def write(self) -> Iterator[Writer]:
        """Open a write transaction: committed at the end of the block, rolled back when the block raises."""
        with self.sessions() as session, self.alone_in_writing(session):
            yield Writer(session, self.clock)
            session.flush()
            crashpoints.point("before commit")
            session.commit()
        crashpoints.point("after commit")

    @contextmanager
    def alone_in_writing(self, session: Session) -> Iterator[None]:
        """Begin the write transaction of a session. No other write transaction runs until the block ends."""
        with self._writing:
            session.bind = self._engine_for_writing
            connection = session.connection()
            if connection.dialect.name == "postgresql":
                connection.execute(_BEGIN_WRITING, {"key": _WRITE_LOCK_KEY, "limit": _IDLE_LIMIT})
                if self._replica_id is not None:  # Heard when, and only if, the transaction is committed.
                    connection.execute(_TELL, {"channel": self.channel, "me": self._replica_id})
            self._check(connection)
            yield


def connect_options(url: str) -> dict[str, Any]:
    """Return the connection options for PostgreSQL that the URL does not set itself."""
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
    engine = sa.create_engine(  # no overflow: an overflow connection would be opened and closed for each query
        url,
        connect_args={"timeout": _BUSY_TIMEOUT_S, "check_same_thread": False},
        pool_size=25,
        max_overflow=0,
        hide_parameters=True,  # Parameters may be secrets, and errors are logged.
    )

    @sa.event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # Otherwise the driver begins and ends transactions by its own rules.
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


def _channel_of(engine: sa.Engine) -> str:
    """Return a name of the channel: services on two schemas of a database do not hear each other."""
    with engine.connect() as connection:
        schema = connection.execute(sa.text("SELECT current_schema()")).scalar()
    return re.sub("[^a-z0-9_]", "_", f"elasticflow_{schema}".lower())[:63]


def _switch_to_wal(cursor: Any) -> None:
    """Switch a new database to WAL, with retries: SQLite does not wait here if another process does the same."""
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
    """Return the conditions for generations that held slots between two times."""
    goes_on = sa.and_(GenerationRow.ended_at.is_(None), GenerationRow.handled.is_(False))
    return GenerationRow.holding_at < until_at, sa.or_(GenerationRow.ended_at > from_at, goes_on)


def _asked_between(from_at: float, until_at: float) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions for incarnations that were submitted and not finished between two times."""
    goes_on = IncarnationRow.finished_at.is_(None)
    return IncarnationRow.submitted_at < until_at, sa.or_(IncarnationRow.finished_at > from_at, goes_on)


_PRAGMAS: Sequence[str] = (
    f"busy_timeout={int(_BUSY_TIMEOUT_S * 1000)}",
    "synchronous=FULL",
    "foreign_keys=ON",
    "cache_size=-4096",
)
