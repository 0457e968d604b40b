"""The lease of the leader, as one replica sees it: pure rules, without a database, a thread or a clock of its own.

One row of the database names the leader, its *epoch*, and until when its lease lasts by the database's clock. A
replica asks to take the lease when it has none, and to renew it when it has. It counts its own right to decide from
*before* it sent a request that succeeded, for less time than the lease lasts: so it stops before anybody else can
begin, however long the answer took, whatever the clocks show, and also after the process has stood still.

Whatever a former leader does all the same is refused: its writes by the epoch in the row, its commands by the epoch
that nodes have seen (Kleppmann's fencing token; the lease follows Gray and Cheriton, SOSP 1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long a lease lasts, how often it is renewed, and for how long its holder decides, all in seconds.

    Raises ValueError, with what to do, for terms that cannot hold.
    """

    lease_s: float = 5.0
    renew_s: float = 1.0

    def __post_init__(self) -> None:
        """Check that two renewals may fail before the leader stops."""
        if not 0 < 2 * self.renew_s <= self.stop_s:
            raise ValueError(
                f"a lease of {self.lease_s:g} s cannot be held with a renewal every {self.renew_s:g} s: one that is"
                f" late would end it. Let it last {3 * self.renew_s:g} s or longer"
            )

    @property
    def stop_s(self) -> float:
        """For how long after its last renewal a leader decides: the rest is for clocks that run at different rates."""
        return 0.7 * self.lease_s


class Ask(Enum):
    """What a replica asks of the row."""

    TAKE = auto()
    """The lease, with the next epoch: if nobody holds it, or it has ended, or it is this replica's from before."""
    RENEW = auto()
    """Its lease: while the row has its epoch, though the lease may have ended meanwhile."""
    GIVE_UP = auto()
    """Its lease: another one can take it at once."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """One request. ``epoch``: that of the lease to renew or give up; 0 for one to take."""

    ask: Ask
    epoch: int
    sent_s: float
    """By the replica's clock that counts suspension."""


def clock_with_suspension() -> float:
    """Return seconds that go on while the machine is suspended, and never jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """What one replica knows of its lease. Thread-safe: one thread requests, any thread asks whether it may decide."""

    def __init__(self, terms: LeaseTerms, clock: Callable[[], float] = clock_with_suspension) -> None:
        self.terms, self._clock = terms, clock
        self._held: tuple[int, float] | None = None
        """(epoch, until when it may decide); replaced as a whole."""
        self._resigned = False

    @property
    def epoch(self) -> int | None:
        """The epoch of the lease that was taken and not lost since; it may have ended meanwhile. None without one."""
        held = self._held
        return None if held is None else held[0]

    @property
    def stands(self) -> bool:
        """Whether it asks for the lease: it has not resigned."""
        return not self._resigned

    def may_decide(self, epoch: int | None = None) -> bool:
        """Return whether this replica may decide now (as the leader of this epoch)."""
        held = self._held
        if held is None or self._resigned or self._clock() >= held[1]:
            return False
        return epoch is None or epoch == held[0]

    def request(self) -> LeaseRequest:
        """Return what to ask for next, as if sent now."""
        held, now_s = self._held, self._clock()
        if held is None:
            return LeaseRequest(Ask.TAKE, 0, now_s)
        return LeaseRequest(Ask.GIVE_UP if self._resigned else Ask.RENEW, held[0], now_s)

    def answered(self, request: LeaseRequest, epoch: int | None) -> None:
        """Take in an answer: the epoch with which this replica now holds the lease, or None if it does not hold it.

        A request without an answer changes nothing.
        """
        held = self._held
        is_about_held = held is not None and held[0] == request.epoch
        if epoch is None or request.ask is Ask.GIVE_UP:
            if is_about_held:
                self._held = None
        elif request.ask is Ask.TAKE or is_about_held:
            until_s = request.sent_s + self.terms.stop_s
            self._held = (epoch, until_s if held is None or request.ask is Ask.TAKE else max(until_s, held[1]))

    def resign(self) -> None:
        """Decide no more; the next request gives the lease up."""
        self._resigned = True

    def stand_again(self) -> None:
        """Ask for the lease again, after it was given up, as if it had never been held: with a new epoch.

        A request that gave it up may still be on its way, though nobody waits for it any more: it may end the old epoch
        after it was renewed.
        """
        self._held = None
        self._resigned = False
