"""What may be wrong with a protocol: one that is broken on purpose shows whether the checker would see it."""

from __future__ import annotations

from enum import Enum, auto


class Flaw(Enum):
    """One thing left out, or done in the wrong order."""

    NO_BARRIER = auto()
    """A new leader reads at once, without a write of its own before."""
    WRITE_WITHOUT_EPOCH = auto()
    """The leader's transactions do not look whose epoch the row has."""
    NODE_WITHOUT_EPOCH = auto()
    """Nodes execute what anybody tells them."""
    NODE_FORGETS_EPOCH = auto()
    """A node that was started again has seen no epoch yet."""
    NODE_WITHOUT_NUMBER = auto()
    """Nodes execute commands of one leader in any order."""
    VALID_FROM_ANSWER = auto()
    """The right to decide counts from the answer of the database, not from before the request."""
    NEVER_STOPS = auto()
    """Whoever holds a lease decides until the database says that it is lost."""
    RENEW_WITHOUT_EPOCH = auto()
    """A lease is renewed for its holder, whatever its epoch is."""
    RENEW_WITHOUT_CONDITION = auto()
    """A lease is renewed for anybody."""
    TAKE_BEFORE_END = auto()
    """A lease can be taken before it has ended."""
    ACT_BEFORE_COMMIT = auto()
    """Nodes are commanded, and results published, before the decision is stored."""
    ANSWER_BEFORE_COMMIT = auto()
    """A submission is acknowledged before it is stored."""
    RAISE_WITHOUT_CONDITION = auto()
    """The epoch is set to what somebody says, whoever holds the lease."""
    RAISE_WITHOUT_RENEWAL = auto()
    """Raising the epoch lengthens the right to decide, but not the lease."""
    STANDS_AGAIN_AT_ONCE = auto()
    """Who stands again decides though the lease was given up, as the answer to that has not come."""
    RENEWS_AFTER_GIVING_UP = auto()
    """Who stands again renews the epoch that a request which is still on its way gives up."""
    DECIDE_ON_STALE_ROWS = auto()
    """A decision is stored though what it relied on has changed."""


FENCES = frozenset(
    {Flaw.WRITE_WITHOUT_EPOCH, Flaw.NO_BARRIER, Flaw.NODE_WITHOUT_EPOCH},
)
"""All that keeps out a leader that was replaced and does not know it."""
