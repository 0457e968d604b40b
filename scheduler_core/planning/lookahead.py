"""One proof for several newcomers that are decided on one after another at the same moment.

A plan that keeps the promises of several newcomers keeps those of the first one of them, too: without the others, it is
the proof for that one, and with the first one admitted, it is the proof for the second. So each verdict is one that the
job could have got alone, and a crowd costs a few proofs. If no plan has several, fewer are tried together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Work
from elasticflow_airflow.scheduler_core.planning.minimum_share import ShareShape
from elasticflow_airflow.scheduler_core.planning.plan_draft import Draft
from elasticflow_airflow.scheduler_core.planning.planner import Planner
from elasticflow_airflow.scheduler_core.planning.proof import Attempt, deadline_order

_MOST = 16
"""So many newcomers are proven together at most."""
_ROUNDS = 3
"""Rounds of a proof of several newcomers: if it takes more, one of fewer of them is cheaper."""
_VAIN = 4
"""After so many newcomers in a row whom no other way has helped, none is tried for the others of a crowd."""
_FORGOTTEN_S = 60.0
"""So many seconds after a crowd the next one is another."""
_but_its_limit = attrgetter(*(field.name for field in fields(Work) if field.name != "limit_s"))


class Expected(NamedTuple):
    """A newcomer that is decided on soon."""

    work: Work
    stand_in: str | None
    """The id of the work that stood in for it, if it was expected."""


class Proven(NamedTuple):
    """A plan, and the work that it was made for, by job id."""

    draft: Draft
    works: dict[str, Work]

    def has(self, works: Sequence[Work], become: Collection[str | None]) -> bool:
        """Return whether it has all this work, unchanged, within its limits; ``become`` need not be there."""
        for work in works:
            known = self.works.get(work.job_id)
            if known is None and work.job_id in become:
                continue
            if known is None or self.draft.courses[work.job_id].promised_s > work.limit_s + TOLERANCE_S:
                return False
            if known is not work and _but_its_limit(known) != _but_its_limit(work):
                return False
        return True

    def only(self, works: Sequence[Work]) -> Draft:
        """Return a copy of the plan without all other work."""
        draft, wanted = self.draft.copy(), {work.job_id for work in works}
        for job_id in self.works.keys() - wanted:
            draft.drop(job_id)
        if draft.shares is not None:
            draft.shares = {job_id: share for job_id, share in draft.shares.items() if job_id in wanted}
        return draft


class Lookahead:
    """The newcomers to decide on next at one moment, the last plan that has some of them, and what way led to it."""

    def __init__(self) -> None:
        self.most = _MOST
        """How many newcomers to prove together next; 1: each alone."""
        self._order: dict[str, int] | None = None
        """Places of jobs in the order that has succeeded last; None: that of their limits."""
        self._shape = ShareShape.FLAT
        self._coming: dict[str, Expected] = {}
        self._proven: Proven | None = None
        self._in_vain = 0
        """How many newcomers no other way has helped, two less with each moment."""
        self._began_s = -INFINITY

    def begin(self, now: float) -> None:
        """Begin another moment: what was planned then does not count any more, and what was in vain less and less."""
        self.most = _MOST
        self._in_vain = 0 if now - self._began_s > _FORGOTTEN_S else max(0, self._in_vain - 2)
        self._began_s = now

    def end(self) -> None:
        """Forget the plan and the newcomers of this moment."""
        self._coming, self._proven = {}, None

    def expect(self, newcomers: Iterable[Expected]) -> None:
        """Register the newcomers that are decided on next, in order."""
        self._coming = {one.work.job_id: one for one in newcomers}

    @property
    def is_crowd(self) -> bool:
        """Whether several newcomers are still to be decided on at this moment."""
        return len(self._coming) > 1

    def settled(self, job_id: str) -> None:
        """A newcomer was decided on."""
        self._coming.pop(job_id, None)

    def plan(self, planner: Planner, newcomer: Work) -> Draft | None:
        """Return a plan of all promises with this newcomer, guarded as in :meth:`Planner.fresh`; None if none is found.

        If some of the next newcomers fit, too, the plan is kept for them.
        """
        if not self._expects(newcomer):
            return planner.fresh(newcomer, guarded=True)
        works = planner.works(newcomer, guarded=True)
        self._proven = self._with_others(planner, newcomer, works)
        if self._proven is not None:
            return self._proven.only(works)
        alone = planner.fresh(newcomer, guarded=True)
        if alone is not None:
            self.most = min(_MOST, 2 * self.most)
        return alone

    def found(self, planner: Planner, newcomer: Work) -> Draft | None:
        """Return the last plan for this newcomer, as :meth:`plan` would; None if it does not have everything."""
        if self._proven is None or not self._expects(newcomer):
            return None
        works = planner.works(newcomer, guarded=True)
        return self._proven.only(works) if self._has(self._proven, works) else None

    def keeps(self, planner: Planner, stand_ins: Sequence[Work]) -> bool:
        """Return whether the last plan has all promises, and these expected runs or the jobs that they have become."""
        if self._proven is None:
            return False
        return self._has(self._proven, [*planner.works(None, guarded=True), *stand_ins])

    def _expects(self, newcomer: Work) -> bool:
        one = self._coming.get(newcomer.job_id)
        return one is not None and one.work.limit_s == newcomer.limit_s

    def rescue(self, planner: Planner, newcomer: Work, count: int) -> Draft | None:
        """As :meth:`Planner.rescued`. What has helped one newcomer is tried for several next.

        Once nothing has helped a few of a crowd, it is tried for two of those that come together, and not for the rest.
        """
        together = newcomer.job_id in self._coming
        if together and self._in_vain >= _VAIN:
            return None
        found = planner.rescued(newcomer, count)
        if found is None:
            self.most = 1
            self._in_vain += together
            return None
        self._in_vain = 0
        draft, (order, self._shape) = found
        self._order = None if order == deadline_order(order) else {work.job_id: i for i, work in enumerate(order)}
        self.most = _MOST
        return draft

    def _has(self, proven: Proven, works: Sequence[Work]) -> bool:
        """Return whether a plan has all this work, or for expected runs the jobs that they have become."""
        return proven.has(works, {one.stand_in for job_id, one in self._coming.items() if job_id in proven.works})

    def _with_others(self, planner: Planner, newcomer: Work, works: Sequence[Work]) -> Proven | None:
        """Return a plan with as many of the next newcomers as fit together, perhaps none; None if none is found."""
        others = [one for job_id, one in self._coming.items() if job_id != newcomer.job_id]
        alone = self._order is None and self._shape is ShareShape.FLAT  # that is a fresh plan
        while True:
            others = others[: max(0, self.most - 1)]
            if not others and alone:
                break
            came = {one.stand_in for one in others}
            together = [*(work for work in works if work.job_id not in came), *(one.work for one in others)]
            draft = planner.attempt(Attempt(self._ordered(together), self._shape), _ROUNDS)
            if draft is not None:
                self.most = min(_MOST, 2 * self.most)
                return Proven(draft, {work.job_id: work for work in together})
            if not others:
                break
            self.most = (len(others) + 1) // 2
        self._order, self._shape = None, ShareShape.FLAT
        return None

    def _ordered(self, works: Sequence[Work]) -> list[Work]:
        """Return the order that has succeeded last; each newcomer comes after the job whose limit is just before."""
        ordered = deadline_order(works)
        if self._order is None:
            return ordered
        places: dict[str, tuple[int, int]] = {}
        last = -1
        for i, work in enumerate(ordered):
            last = self._order.get(work.job_id, last)
            places[work.job_id] = (last, i)
        return sorted(ordered, key=lambda work: places[work.job_id])
