"""In which epoch a joiner meets those who train. May import the standard library only."""

from __future__ import annotations

from collections.abc import Sequence


class EpochAim:
    """Chooses the epoch in which a joiner that has come too late rehearses, and waits, next.

    A joiner's loops follow only when it joins in the epoch in which it stands. Where an epoch takes longer than a
    rehearsal, that is simply the one that the others are in. Shorter ones it would chase for ever: then it goes to
    meet them, at an epoch that lies ahead by what went by since it missed them last, and further after each miss.
    All joiners aim at multiples of the same powers of two, so that they wait in the same one.
    """

    def __init__(self) -> None:
        self._missed_at: int | None = None
        self._reach = 0

    def choose(self, now: int, of_joiners: Sequence[int] = ()) -> int:
        """Return the epoch to rehearse in, after a miss.

        ``now`` is the epoch of those who train; ``of_joiners`` are those in which other joiners wait.
        """
        gone_by = 0 if self._missed_at is None else max(0, now - self._missed_at)
        self._missed_at = now
        if gone_by == 0:
            self._reach = 0
            return now
        self._reach = 1 << (gone_by - 1).bit_length()
        chosen = (now // self._reach + 2) * self._reach
        met = [epoch for epoch in of_joiners if now + gone_by < epoch <= chosen + self._reach]
        return max(met, default=chosen)

    def misses(self, epoch: int, now: int | None, of_joiners: Sequence[int] = ()) -> bool:
        """Whether waiting in ``epoch`` has become useless: the others, now in ``now``, will not meet this joiner there.

        That is so when they are past it, or have been set back; or another joiner waits a little further on.
        """
        if now is None:
            return False
        since = epoch if self._missed_at is None else self._missed_at
        if not since <= now <= epoch:
            return True
        return any(epoch < other <= epoch + self._reach for other in of_joiners)
