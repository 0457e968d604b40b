"""Collects the changes of one pass of the loop, and writes them in one short transaction at its end, or not at all.

The loop may plan for seconds. No transaction is open meanwhile, so handlers can write and never wait for a plan.
Handlers and the loop write different columns, and only changed columns are written, so neither overwrites the other.
If a decision depends on a column that handlers write, it is registered with :meth:`UnitOfWork.rely_on`, and the column
is compared again when the decision is written (optimistic concurrency control; Fowler, Patterns of Enterprise
Application Architecture, Unit of Work).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any, TypeVar, cast

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import StaleDataError

from elasticflow_airflow.api import EventKind
from elasticflow_airflow.api.event_data import EventData, kind_and_data
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service import crashpoints
from elasticflow_airflow.service.store.storable import check_storable
from elasticflow_airflow.service.store.store import Reader, Store, in_parts
from elasticflow_airflow.service.store.stored_bounds import until_out_of_bounds
from elasticflow_airflow.service.store.tables import (
    CANDIDATE_IS_THERE,
    AmendmentRow,
    AvoidedSlotRow,
    Base,
    CandidateRow,
    DrainRow,
    EventRow,
    GenerationRow,
    HistoryRow,
    IncarnationRow,
    RecurringTaskRow,
    SampleRow,
    WorkerTimesRow,
)

_R = TypeVar("_R", bound=Base)


_SAMPLES = cast(sa.Table, SampleRow.__table__)
"""Not the mapped class: that would write rows without a loss, or without a speed, with statements of their own."""
_KEY = "of_"
"""Begins the names of the parameters by which a row is found."""
_DRAIN_ANEW = "say anew with elasticflow drain when it goes away, or with --undo that it stays"
_FORGET = "delete its row from the table avoided_slot"


class StaleReadError(Exception):
    """A value that a decision depends on has changed since it was read. Nothing was written; start the pass again."""


class UnstorableError(Exception):
    """A value does not fit its column, or a row exists already. ``job_id`` is None if the row belongs to no job."""

    def __init__(self, job_id: str | None, what: str) -> None:
        super().__init__(what)
        self.job_id = job_id


@dataclass(slots=True, eq=False)
class NewEvent:
    """An event that is not written yet."""

    row: IncarnationRow | None
    columns: dict[str, Any]
    is_verdict: bool = False
    """The verdict of the row refers to this event."""


class UnitOfWork(Reader):
    """Queries see the changes made here. None of them is in the database before :meth:`commit` returns."""

    def __init__(self, session: Session, store: Store) -> None:
        super().__init__(session)
        self._store = store
        self._added: dict[type[Base], list[Any]] = {}
        self._events: list[NewEvent] = []
        self._samples: list[dict[str, Any]] = []
        self._orders: list[tuple[sa.Executable, Sequence[dict[str, Any]] | None]] = []
        """Statements for :meth:`commit`, and their parameters. No closures: each would refer to this object, whose rows
        would then all wait for a garbage collection, and everything else for that."""
        self._candidates: dict[tuple[str, int], list[CandidateRow]] = {}
        self._worker_times: dict[tuple[str, int, str], WorkerTimesRow] = {}
        self._relied_on: dict[tuple[Any, str], Any] = {}
        session.connection(execution_options=store.read_options)
        self.current_rows = self.undrained()
        """Every undrained incarnation, with its job, in order of submission."""
        self.current_generations = self.open_generations()
        """Every generation whose end is not handled, oldest first."""
        has_amendments, has_drains, has_avoided = self.rare()
        self._amendments = super().open_amendments() if has_amendments else []
        self._drains = super().drains() if has_drains else {}
        self._avoided = super().avoided() if has_avoided else []
        session.commit()  # ends the read transaction; the rows stay loaded
        session.bind = store.engine_without_transactions

    # -- queries that see the changes ----------------------------------------------------------------------------

    def generation(self, job_id: str, generation: int) -> GenerationRow | None:
        """Return one generation, or None."""
        new = self._new(GenerationRow, lambda row: (row.job_id, row.generation) == (job_id, generation))
        return new[0] if new else super().generation(job_id, generation)

    def generations(self, job_id: str, incarnation: int) -> list[GenerationRow]:
        """Return all generations of an incarnation, oldest first."""
        new = self._new(GenerationRow, lambda row: (row.job_id, row.incarnation) == (job_id, incarnation))
        return sorted([*super().generations(job_id, incarnation), *new], key=lambda row: row.generation)

    def candidates(self, job_id: str, incarnation: int) -> list[CandidateRow]:
        """Return the candidate checkpoints of an incarnation, oldest first."""
        new = self._new(CandidateRow, lambda row: (row.job_id, row.incarnation) == (job_id, incarnation))
        stored = self._candidates.get((job_id, incarnation))
        stored = super().candidates(job_id, incarnation) if stored is None else stored
        return sorted([*stored, *new], key=lambda row: (row.generation, row.step))

    def load_candidates(self, incarnations: Collection[tuple[str, int]]) -> None:
        """Load the candidates of these incarnations with one query; :meth:`candidates` then needs none."""
        found: dict[tuple[str, int], list[CandidateRow]] = {key: [] for key in incarnations}
        for some in in_parts(sorted({job_id for job_id, _ in incarnations})):
            for row in self.session.scalars(sa.select(CandidateRow).where(CandidateRow.job_id.in_(some))):
                found.get((row.job_id, row.incarnation), []).append(row)
        self._candidates.update(found)

    def open_candidates(self) -> list[CandidateRow]:
        """Return the existing candidates (not verified yet, or valid) of all undrained incarnations, oldest first."""
        found = [*super().open_candidates(), *self._new(CandidateRow)]
        there = (row for row in found if row.status in CANDIDATE_IS_THERE)
        return sorted(there, key=lambda row: (row.generation, row.step))

    def open_amendments(self) -> list[AmendmentRow]:
        """Return the amendments without an answer, oldest first."""
        return [row for row in self._amendments if row.answer is None]

    def drains(self) -> dict[str, float]:
        """Return the draining nodes, and when each goes away (UTC seconds), without those of :meth:`ignored`."""
        return {node_id: at for node_id, at in self._drains.items() if until_out_of_bounds(at) is None}

    def avoided(self) -> list[AvoidedSlotRow]:
        """Return the slots that are avoided for a while, without those of :meth:`ignored`."""
        return [row for row in self._avoided if until_out_of_bounds(row.until_at) is None]

    def ignored(self) -> list[str]:
        """Describe drains and avoided slots with a time out of bounds (from an older version, or written by hand)."""
        drains = ((f"the drain of node {node_id!r}", at, _DRAIN_ANEW) for node_id, at in sorted(self._drains.items()))
        avoided = ((f"slot {row.node_id}:{row.slot_index} to avoid", row.until_at, _FORGET) for row in self._avoided)
        return [
            f"{what} is stored with a time that cannot be, and is not heeded: {problem}; {remedy}"
            for what, at, remedy in (*drains, *avoided)
            if (problem := until_out_of_bounds(at)) is not None
        ]

    def history(self, recurring_key: str, signature: str) -> HistoryRow | None:
        """Return the history of a task's past runs for one signature."""
        new = self._new(HistoryRow, lambda row: (row.recurring_key, row.signature) == (recurring_key, signature))
        return new[0] if new else super().history(recurring_key, signature)

    def recurring_task(self, recurring_key: str) -> RecurringTaskRow | None:
        """Return what is stored about the runs of a recurring task."""
        new = self._new(RecurringTaskRow, lambda row: row.recurring_key == recurring_key)
        return new[0] if new else super().recurring_task(recurring_key)

    def recurring_tasks(self) -> list[RecurringTaskRow]:
        """Return all recurring tasks with a run that is due."""
        changed = [row for row in self.session.dirty if isinstance(row, RecurringTaskRow)]
        found = {row.recurring_key: row for row in (*super().recurring_tasks(), *changed, *self._new(RecurringTaskRow))}
        return [row for _, row in sorted(found.items()) if row.next_due_at is not None]

    def worker_time(self, job_id: str, incarnation: int, worker_id: str) -> WorkerTimesRow | None:
        """Return the time breakdown of one worker."""
        key = (job_id, incarnation, worker_id)
        if key in self._worker_times:
            return self._worker_times[key]
        new = self._new(WorkerTimesRow, lambda row: (row.job_id, row.incarnation, row.worker_id) == key)
        return new[0] if new else super().worker_time(job_id, incarnation, worker_id)

    def load_worker_times(self, workers: Collection[tuple[str, int, str]]) -> None:
        """Load the time breakdowns of workers with one query; :meth:`worker_time` then needs none.

        ``workers``: job ids, incarnations and worker ids.
        """
        found: dict[tuple[str, int, str], WorkerTimesRow] = {}
        names = sorted({worker_id for _, _, worker_id in workers})
        for some in in_parts(sorted({job_id for job_id, _, _ in workers})):
            for part in in_parts(names):
                query = sa.select(WorkerTimesRow).where(
                    WorkerTimesRow.job_id.in_(some), WorkerTimesRow.worker_id.in_(part)
                )
                found |= {(row.job_id, row.incarnation, row.worker_id): row for row in self.session.scalars(query)}
        self._worker_times = {key: found[key] for key in workers if key in found}

    def _new(self, kind: type[_R], which: Callable[[_R], bool] = lambda _: True) -> list[_R]:
        return [row for row in self._added.get(kind, ()) if which(row)]

    # -- changes -------------------------------------------------------------------------------------------------

    def add(self, row: Base) -> None:
        """Add a row."""
        self.session.add(row)
        self._added.setdefault(type(row), []).append(row)
        if isinstance(row, AvoidedSlotRow):
            self._avoided.append(row)

    def add_samples(self, columns: Sequence[dict[str, Any]]) -> None:
        """Add samples, all at once."""
        rows = list(columns)
        for job_id, values in ((row["job_id"], row) for row in rows):
            self._check(job_id, SampleRow, values)
        self._samples += rows

    def thin_samples(self, job_id: str, incarnation: int, stride: int) -> None:
        """Delete the samples of an incarnation whose number is not a multiple of ``stride``."""
        which = (SampleRow.job_id == job_id, SampleRow.incarnation == incarnation, SampleRow.number % stride != 0)
        self._orders.append((sa.delete(SampleRow).where(*which), None))

    def forget_drain(self, node_id: str) -> None:
        """Delete the drain of a node that has gone: if the node comes back, it stays."""
        if self._drains.pop(node_id, None) is not None:
            self._orders.append((sa.delete(DrainRow).where(DrainRow.node_id == node_id), None))

    def avoid(self, node_id: str, slot_index: int, until_at: float, reason: Reason) -> None:
        """Avoid a slot until this time (UTC seconds), also one that is avoided already."""
        known = next((row for row in self._avoided if (row.node_id, row.slot_index) == (node_id, slot_index)), None)
        if known is None:
            known = AvoidedSlotRow(node_id=node_id, slot_index=slot_index)
            self.add(known)
        known.until_at, known.reason = until_at, reason

    def forget_avoided(self, row: AvoidedSlotRow) -> None:
        """Stop avoiding a slot."""
        self._avoided.remove(row)
        self.session.delete(row)

    def add_event(
        self,
        what: EventKind | EventData,
        reason: Reason,
        row: IncarnationRow | None = None,
        *,
        is_verdict: bool = False,
    ) -> None:
        """Add an event (of an incarnation). With ``is_verdict``, the row's verdict names it once its id is known."""
        kind, data = kind_and_data(what)
        event = NewEvent(
            row,
            {
                "job_id": row.job_id if row else None,
                "incarnation": row.incarnation if row else None,
                "at": self._store.clock(),
                "kind": kind.value,
                "reason": reason,
                "data": data,
            },
            is_verdict,
        )
        self._events.append(event)

    def rely_on(self, row: Base, column: str) -> None:
        """Register that a decision depends on a column that handlers write: it must be unchanged at :meth:`commit`."""
        state = sa.inspect(row)
        value = state.committed_state.get(column, getattr(row, column)) if state.persistent else None
        self._relied_on.setdefault((row, column), value)

    # -- writing -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that everything to be written can be stored. Raises UnstorableError, which names the job."""
        for event in self._events:
            self._check(event.columns["job_id"], EventRow, event.columns)
        for row in (*self.session.new, *self.session.dirty):
            values = {name: getattr(row, name) for name in sa.inspect(row).committed_state}
            self._check(getattr(row, "job_id", None), type(row), values)

    @staticmethod
    def _check(job_id: str | None, kind: type[Base], values: dict[str, Any]) -> None:
        try:
            check_storable(kind, values)
        except ValueError as error:
            raise UnstorableError(job_id, str(error)) from error

    def commit(self) -> None:
        """Write everything in one transaction. Raises StaleReadError or UnstorableError; then nothing was written."""
        self.check()
        with self._store.alone_in_writing(self.session):
            for (row, column), value in self._relied_on.items():
                if self._stored(row, column) != value:
                    raise StaleReadError(f"{column} of {sa.inspect(row).identity} has changed meanwhile")
            new = list(self.session.new)
            try:
                self._write_events()
                self._write_changes()
                if new or self.session.deleted:
                    self.session.flush()
                if self._samples:
                    self.session.execute(sa.insert(_SAMPLES), self._samples)
                for statement, rows in self._orders:
                    self.session.execute(statement, rows)
            except sa.exc.IntegrityError as error:
                self.session.rollback()
                if (doubled := self._doubled(new)) is None:
                    raise
                raise doubled from error
            crashpoints.point("before commit")
            self.session.expunge_all()  # Otherwise a flush would look once more for changes in each row.
            self.session.commit()
        crashpoints.point("after commit")

    def _doubled(self, new: Sequence[Base]) -> UnstorableError | None:
        """Find the job with a new row that exists already (its number came from a stale count), or return None."""
        for row in (*new, *(SampleRow(**values) for values in self._samples)):
            kind: type[Any] = type(row)
            key = sa.inspect(row).mapper.primary_key_from_instance(row)
            job_id = getattr(row, "job_id", None)
            if job_id is not None and None not in key and self.session.get(kind, key) is not None:
                return UnstorableError(job_id, f"{row.__tablename__} {tuple(key)} is stored already")
        return None

    def _stored(self, row: Base, column: str) -> Any:
        kind, state = type(row), sa.inspect(row)
        identity = state.identity if state.identity is not None else state.mapper.primary_key_from_instance(row)
        keys = zip(state.mapper.primary_key, identity, strict=True)
        return self.session.scalar(sa.select(getattr(kind, column)).where(*(key == part for key, part in keys)))

    def _write_events(self) -> None:
        if not self._events:
            return
        insert = sa.insert(EventRow).returning(EventRow.event_id, sort_by_parameter_order=True)
        ids = self.session.execute(insert, [event.columns for event in self._events]).scalars().all()
        for event, event_id in zip(self._events, ids, strict=True):
            if event.row is not None:
                event.row.last_event_id = event_id
                if event.is_verdict:
                    event.row.verdict = replace(event.row.verdict, event_id=event_id)

    def _write_changes(self) -> None:
        """Write the changed columns of stored rows: one statement for all rows in which the same columns changed.

        A flush writes in order of the primary key, with a new statement whenever the columns differ from those of the
        row before: one for almost every row, as jobs in different phases change in different columns.
        """
        changed: dict[tuple[type[Base], frozenset[str]], list[Base]] = {}
        for row in self.session.dirty:
            before = sa.inspect(row).committed_state
            names = frozenset(name for name, value in before.items() if value != getattr(row, name))
            if names:
                changed.setdefault((type(row), names), []).append(row)
        for (kind, names), rows in changed.items():
            keys = [str(key.key) for key in sa.inspect(kind).primary_key]
            values = [
                {**{name: getattr(row, name) for name in names}, **{_KEY + key: getattr(row, key) for key in keys}}
                for row in rows
            ]
            connection = self.session.connection()
            written = connection.execute(_update(kind, names), values)
            counted = len(rows) == 1 or connection.dialect.supports_sane_multi_rowcount
            if counted and written.rowcount != len(rows):
                raise StaleDataError(f"a row of {kind.__tablename__} that changed is not stored any more")
            for row, name in product(rows, names):
                set_committed_value(row, name, getattr(row, name))


@lru_cache(maxsize=1000)
def _update(kind: type[Base], names: frozenset[str]) -> sa.Update:
    """Return the statement that writes these columns of a row: to build one costs as much as to run it."""
    table = cast(sa.Table, kind.__table__)
    row = (key == sa.bindparam(_KEY + str(key.key)) for key in table.primary_key)
    return sa.update(table).where(*row).values({name: sa.bindparam(name) for name in sorted(names)})


@contextmanager
def unit_of_work(store: Store) -> Iterator[UnitOfWork]:
    """Begin a unit of work; without a :meth:`UnitOfWork.commit` in the block, all its changes are dropped."""
    with store.sessions(autoflush=False) as session:
        yield UnitOfWork(session, store)
