"""One replica's life in the election: it follows, takes the lease when nobody has it, decides, and steps down.

Who has the lease is decided by one row of the database (``lease_table.py``). The thread of the lease
(``leadership.py``) never waits for what happens here: opening an engine takes a while.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import structlog

from elasticflow_airflow.engines.port import Engine, EngineError, SupersededError
from elasticflow_airflow.service.assembly import Assembly
from elasticflow_airflow.service.engine_choice import FIRST_FENCE
from elasticflow_airflow.service.leadership.leadership import Leadership
from elasticflow_airflow.service.leadership.lease import Lease, LeaseTerms
from elasticflow_airflow.service.leadership.lease_table import GIVEN_UP, LeaseTable
from elasticflow_airflow.service.leadership.news import News, tell
from elasticflow_airflow.service.leadership.replicas import SAY_EVERY_S, Replicas
from elasticflow_airflow.service.leadership.shared_key import agree_on_key
from elasticflow_airflow.service.store.service_lock import OwnedError, refused
from elasticflow_airflow.service.store.store import DATABASE_AWAY, LostOwnershipError, Store
from elasticflow_airflow.service.store.tables import LeaderRow

_RUNS = "runs"
_LOOK_S = 0.2
_RETRY_S = 1.0
_ENGINE_REST_S = (2.0, 30.0)
"""How long a replica whose engine could not be opened leaves the lease to others: at first, and at most."""
_END_S = 2.0
_IN_ROW = sa.text("SELECT epoch FROM leader WHERE id = 1")
FAILS_OVER = ("cluster", "ray")
"""Engines whose gangs another replica can go on with: they are on machines of their own."""
_STARTED = "the service has started"
_HOW = {
    "hand-over": "another replica has taken over by a hand-over",
    "fail-over": "another replica has taken over from one that was silent",
}

log = structlog.get_logger()


class Mandate:
    """The right to decide as the leader of one epoch; everything that a leader does asks it. Thread-safe."""

    def __init__(self, leadership: Leadership, epoch: int) -> None:
        self._leadership, self.epoch = leadership, epoch
        self._raising = threading.Lock()

    def holds(self) -> bool:
        """Return whether this process may decide now, as far as it can know by itself."""
        return self._leadership.lease.may_decide(self.epoch)

    def check(self, connection: sa.Connection) -> None:
        """Check it within a write transaction of the loop. Raises LostOwnershipError.

        Whoever takes the lease writes once before it reads: it waits for this transaction, and later ones fail here.
        """
        if not self.holds():
            raise LostOwnershipError("this replica may not decide now: its lease could not be renewed in time")
        if connection.execute(_IN_ROW).scalar() != self.epoch:
            raise LostOwnershipError("another replica decides")

    def is_held(self) -> bool:
        """Return whether this process still has the lease, though it may have to wait for a renewal."""
        with self._raising:
            return self._leadership.lease.epoch == self.epoch and self._leadership.lease.stands

    def leading_epoch(self) -> int:
        """Return the epoch. Raises SupersededError if this process may not decide now."""
        if not self.holds():
            raise SupersededError("this replica may not decide now: its lease was not renewed in time, or has gone")
        return self.epoch

    def above(self, seen: int) -> int:
        """Go on with an epoch above one that a node has seen, from a database that was lost, and return it.

        Raises SupersededError if another replica decides, or the database cannot be asked.
        """
        with self._raising:
            if self.epoch <= seen:
                try:
                    is_ours = self._leadership.raise_epoch(self.epoch, seen + 1)
                except DATABASE_AWAY as error:
                    raise SupersededError("the database cannot be asked who decides") from error
                if not is_ours:
                    raise SupersededError("another replica decides")
                self.epoch = seen + 1
            return self.epoch


class NodeFencing:
    """The numbers under which a leader commands nodes (see the port of the engine)."""

    def __init__(self, mandate: Mandate) -> None:
        self._mandate = mandate

    def epoch(self) -> int:
        """Return the number for a request that is sent now. Raises SupersededError."""
        return FIRST_FENCE + self._mandate.leading_epoch()

    def above(self, seen: int) -> int:
        """Return a number above one that a node has seen, and go on with it. Raises SupersededError."""
        return FIRST_FENCE + self._mandate.above(seen - FIRST_FENCE)


OpenEngine = Callable[[Mandate], Engine]


class Election:
    """Runs the election for this process. Must be started, and closed.

    ``open_engine`` opens the engine of a leader; ``leave`` is called with a sentence when this process has to end.
    """

    def __init__(
        self,
        assembly: Assembly,
        url: str,
        *,
        replica_id: str,
        own_url: str | None,
        card: Mapping[str, Any],
        open_engine: OpenEngine,
        leave: Callable[[str], None],
    ) -> None:
        settings, store = assembly.settings, assembly.store
        self._assembly, self._open_engine, self._leave = assembly, open_engine, leave
        self._me, self._replaces_others = replica_id, settings.engine in FAILS_OVER
        self._terms = LeaseTerms(settings.leader_lease_s, settings.leader_renew_s)
        self._table = LeaseTable(url, replica_id, self._terms, own_url=own_url, card=card, channel=store.channel)
        self._changed, self._stop = threading.Event(), threading.Event()
        self.leadership = Leadership(Lease(self._terms), self._table, self._changed.set)
        self.replicas = Replicas(
            self.leadership, replica_id, own_url, card, store.engine_without_transactions, assembly.clock
        )
        self.news = News(url, store.channel, replica_id, self._hear, self._look)
        self._mandate: Mandate | None = None
        """Of the tenure that the seat has now."""
        self._has_led, self._rest_s, self._said_s = False, _ENGINE_REST_S[0], 0.0
        self._keeper = threading.Thread(target=self._keep, name="election", daemon=True)

    def start(self) -> None:
        """Stand for election. Raises OwnedError where nobody can take over from whoever decides, and driver errors.

        The first tenure of a process that is elected at once is there when this returns; EngineError if it cannot be.
        """
        self.replicas.say()
        agree_on_key(self._assembly.store, self._assembly.secrets)  # Another one may have started at the same moment.
        lease = self.leadership.lease
        request = lease.request()
        self.leadership.view, granted = self._table.ask(request)
        lease.answered(request, self.leadership.view.epoch if granted else None)
        if not granted and not self._replaces_others:
            raise _refused(self.leadership.view.card)
        self.leadership.start()
        if lease.epoch is not None:
            self._begin(lease.epoch, _STARTED)
        self.news.start()
        self._keeper.start()

    def step_down(self) -> None:
        """Let another replica take over at once, if this one decides; this one does not stand again. Thread-safe."""
        threading.Thread(target=self._step_down, name="step down", daemon=True).start()

    def _step_down(self) -> None:
        if self._mandate is not None:
            log.info("this replica steps down")
        self.leadership.resign(_END_S)

    def close(self) -> None:
        """Give the lease up, and end the threads and the tenure; workers go on."""
        self.leadership.resign(_END_S)
        self._stop.set()
        self._changed.set()
        if self._keeper.is_alive():
            self._keeper.join()
        self._end(self._assembly.settings.grace_s)
        self.news.close()
        self.leadership.close()
        try:
            self.replicas.leave()
        except DATABASE_AWAY:
            log.info("that this replica has ended could not be written down; the others see it")

    def tell_of_runs(self) -> None:
        """Let the leader know that due runs were stored."""
        store = self._assembly.store
        tell(store.engine_without_transactions, store.channel, self._me, _RUNS)

    # -- news ---------------------------------------------------------------------------------------------------

    def _hear(self, what: str) -> None:
        if what == _RUNS and self._assembly.seat.is_filled:
            self._assembly.seat.hear_of_runs()
        self._assembly.notifier.wake()
        self._assembly.notifier.changed()
        if what == GIVEN_UP:
            self.leadership.wake()

    def _look(self) -> None:
        """Look for what no notification told of."""
        if self._assembly.seat.is_filled:
            with self._assembly.store.read() as reader:
                waits = reader.wants_attention()
            if waits:
                self._assembly.notifier.wake()
        if not self.news.hears:
            self._assembly.notifier.changed()
        now_s = self._assembly.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self.replicas.say()
            self._said_s = now_s

    # -- tenures ------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Begin and end tenures as the lease comes and goes."""
        while not self._stop.is_set():
            self._changed.wait(_RETRY_S)
            self._changed.clear()
            if self._mandate is not None and not self._mandate.is_held():
                self._end(_END_S)
                if not self._replaces_others and self.leadership.lease.stands and not self._stop.is_set():
                    view = self.leadership.view
                    self._leave(str(_refused(None if view is None else view.card)))
            epoch = self.leadership.lease.epoch
            if self._mandate is None and epoch is not None and self.leadership.lease.stands and not self._stop.is_set():
                try:
                    self._begin(epoch, self._how())
                except DATABASE_AWAY as error:
                    log.warning("the tenure cannot begin yet", said=str(getattr(error, "orig", None) or error))
                except EngineError as error:
                    self._rest(error)
                except Exception:
                    log.exception("the tenure cannot begin; it is tried again")

    def _how(self) -> str:
        view = self.leadership.view
        return _HOW.get(view.change or "", _STARTED) if view is not None else _STARTED

    def _begin(self, epoch: int, how: str) -> None:
        """Begin to decide. Raises EngineError, LostOwnershipError and other errors of the driver."""
        mandate = Mandate(self.leadership, epoch)
        store = self._assembly.store.for_decisions(mandate.check)
        with store.write():
            pass  # The last write of the leader before is over: from here on, its writes fail, and what is read holds.
        engine = self._open_engine(mandate)
        try:
            tenure = self._assembly.tenure(engine, store, how)
        except BaseException:
            engine.close()
            raise
        self._mandate, self._has_led, self._rest_s = mandate, True, _ENGINE_REST_S[0]
        self._assembly.seat.fill(tenure)
        tenure.begin()
        log.info("this replica decides", epoch=epoch, how=how)

    def _end(self, wait_s: float) -> None:
        tenure, self._mandate = self._assembly.seat.leave(), None
        if tenure is not None:
            tenure.end(wait_s)
            self._assembly.notifier.changed()

    def _rest(self, error: EngineError) -> None:
        """Leave the lease to others for a while."""
        if not self._has_led and not self._replaces_others:
            self._leave(str(error))
            return
        log.error("this replica cannot decide: its engine cannot be opened", reason=str(error))
        self._assembly.seat.vacancy = [f"this replica cannot decide: {error}"]
        self.leadership.pause()
        self._stop.wait(self._rest_s)
        self._rest_s = min(2 * self._rest_s, _ENGINE_REST_S[1])
        self.leadership.stand_again()


def wait_while_another_decides(store: Store, replica_id: str, lease_s: float) -> None:
    """Wait for the end of a lease whose holder may have been killed just now. Raises OwnedError while it is renewed."""
    end_s, card = time.monotonic() + lease_s + 1.0, None
    query = sa.select(LeaderRow.card).where(
        LeaderRow.holder != replica_id, LeaderRow.until_at > sa.text("extract(epoch FROM clock_timestamp())")
    )
    while time.monotonic() < end_s:
        with store.engine_without_transactions.connect() as connection:
            found = connection.execute(query).first()
        if found is None:
            return
        card = found[0]
        time.sleep(_LOOK_S)
    raise _refused(card)


def _refused(card: Mapping[str, Any] | None) -> OwnedError:
    hint = ". Several can share one where another can take over: with ELASTICFLOW_ENGINE=ray or cluster"
    return refused(dict(card or {}), hint)


def replica_id_of(state_dir: Path) -> str:
    """Return the id of the replica with this state directory, made at its first start. Raises OSError.

    The caller holds the lock of the directory, so no other process has the same.
    """
    path = state_dir / "replica-id"
    try:
        found = path.read_text().strip()
    except FileNotFoundError:
        found = ""
    if not found.isalnum():
        found = uuid.uuid4().hex
        path.write_text(found + "\n")
    return found
