"""Keeps one replica in the race for the lease: a thread that takes it, renews it, and gives it up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from elasticflow_airflow.service.leadership.lease import Lease
from elasticflow_airflow.service.leadership.lease_table import LeaderView, LeaseTable
from elasticflow_airflow.service.store.store import DATABASE_AWAY

_LOOK_S = 0.5
"""How often a follower looks whether the leader has given up, where it is not told of it."""
_RETRY_S = 0.25

log = structlog.get_logger()


class Leadership:
    """One replica's part in the election. ``changed`` is called, in the thread, whenever its own epoch has changed."""

    def __init__(self, lease: Lease, table: LeaseTable, changed: Callable[[], None]) -> None:
        self.lease, self._table, self._changed = lease, table, changed
        self.view: LeaderView | None = None
        """What the row said last; None before it was ever read."""
        self.problem = ""
        """Why the row cannot be asked now."""
        self._stands = True
        self._wake, self._stop = threading.Event(), threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to stand for election."""
        self._thread.start()

    def wake(self) -> None:
        """Look at the row at once. Thread-safe."""
        self._wake.set()

    def resign(self, wait_s: float) -> None:
        """Decide no more, give the lease up, and do not stand again; waits for that up to ``wait_s``. Thread-safe."""
        self._stands = False
        self.lease.resign()
        self._wake.set()
        if self._thread.is_alive():
            self._given_up.wait(wait_s)

    def pause(self) -> None:
        """Give the lease up, since this replica cannot use it; it stands again after :meth:`stand_again`."""
        self.lease.resign()
        self._wake.set()

    def stand_again(self) -> None:
        """Stand for election again after a :meth:`pause`."""
        if self._stands:
            self.lease.stand_again()
            self._wake.set()

    def raise_epoch(self, epoch: int, higher: int) -> bool:
        """Have the own lease go on with a higher epoch; False if it is not held with ``epoch`` any more.

        Raises what the driver raises.
        """
        request = self.lease.request()
        if not self.lease.may_decide(epoch) or not self._table.raise_epoch(epoch, higher):
            return False
        self.lease.answered(request, higher)
        return True

    def close(self) -> None:
        """End the thread; a lease that was not given up ends by itself."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._table.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            wait_s = self._ask()
            self._wake.wait(wait_s)

    def _ask(self) -> float:
        """Make the next request; returns after how many seconds to make another one."""
        before, request = self.lease.epoch, self.lease.request()
        if before is None and not self.lease.stands:
            self._given_up.set()
            return self._look()
        try:
            self.view, granted = self._table.ask(request)
        except DATABASE_AWAY as error:
            self._complain(error)
            return _RETRY_S
        self._take_in()
        self.lease.answered(request, self.view.epoch if granted else None)
        epoch = self.lease.epoch
        if epoch != before:
            log.info("this replica leads" if epoch is not None else "this replica leads no more", epoch=epoch or before)
            self._changed()
        if epoch is None:
            return self._until_free() if self.lease.stands else 0.0
        return self.lease.terms.renew_s if self.lease.stands else 0.0

    def _look(self) -> float:
        try:
            self.view = self._table.look()
            self._take_in()
        except DATABASE_AWAY as error:
            self._complain(error)
        return _LOOK_S

    def _until_free(self) -> float:
        left_s = None if self.view is None else self.view.left_s
        return _LOOK_S if left_s is None else min(_LOOK_S, max(0.02, left_s + 0.01))

    def _take_in(self) -> None:
        if self.problem:
            log.info("the lease can be asked for again")
        self.problem = ""

    def _complain(self, error: Exception) -> None:
        said = str(getattr(error, "orig", None) or error).strip()
        if not self.problem:
            log.warning("the lease cannot be asked for; without it nothing is decided", said=said)
        self.problem = f"the lease cannot be asked for: {said}"
