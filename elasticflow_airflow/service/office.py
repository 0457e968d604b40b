"""How a service comes to decide: alone on its SQLite file, or elected among those on one PostgreSQL database."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import sqlalchemy as sa
import structlog

from elasticflow_airflow.api import ServiceCard
from elasticflow_airflow.service.assembly import Assembly
from elasticflow_airflow.service.engine_choice import open_engine
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.leadership.election import (
    FAILS_OVER,
    Election,
    Mandate,
    NodeFencing,
    replica_id_of,
    wait_while_another_decides,
)
from elasticflow_airflow.service.leadership.engine_records import DatabaseRecords
from elasticflow_airflow.service.leadership.tenure import Seat
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.open_store import refuse_jobs_from_elsewhere
from elasticflow_airflow.service.store.service_lock import own_file, without_older_services
from elasticflow_airflow.service.store.store import Store

if TYPE_CHECKING:
    from elasticflow_airflow.engines.cluster.cluster_nodes import Leadership

log = structlog.get_logger()


class Office(Protocol):
    """What a process does about deciding. ``parts``: what the routes of the HTTP API use.

    ``leave``, which the owner may replace, is called with a sentence when this process has to end.
    """

    parts: ServiceParts
    leave: Callable[[str], None]

    def step_down(self) -> None:
        """Let another process decide from now on, if one can. Does not block."""
        ...

    def close(self) -> None:
        """Stop deciding and release what was held; workers go on, and the store stays open."""
        ...


def _log(reason: str) -> None:
    log.error(reason)


def open_office(settings: ServiceSettings, card: ServiceCard, stopped: Callable[[], bool]) -> Office:
    """Open the store, and decide as soon as nobody else does.

    ``stopped``: whether to wait no longer for a service of an earlier release. Raises EngineError, and what opening a
    database may raise (CANNOT_OPEN).
    """
    return _SharedOffice(settings, card, stopped) if settings.is_shared else _SoleOffice(settings, card)


class _SoleOffice:
    """The only service on its database, as long as it holds the lock."""

    def __init__(self, settings: ServiceSettings, card: ServiceCard) -> None:
        self.leave: Callable[[str], None] = _log
        self._grace_s = settings.grace_s
        with ExitStack() as stack:
            stack.enter_context(own_file(settings.store_url(), card.owner))
            engine = open_engine(settings)
            stack.callback(engine.close)
            store = Store(settings.store_url())
            stack.callback(store.close)
            seat = Seat()
            assembly = Assembly.of(settings, store, Notifier(), seat)
            self._tenure = assembly.tenure(engine, store)
            seat.fill(self._tenure)
            self.parts = assembly.parts()
            lock = stack.pop_all()
        self._lock = lock
        self._tenure.begin()

    def step_down(self) -> None:
        """Do nothing: nobody else can decide."""

    def close(self) -> None:
        """Stop the loop, and release engine and lock."""
        self._tenure.end(self._grace_s)
        self._lock.close()


class _SharedOffice:
    """One of several services on a database."""

    def __init__(self, settings: ServiceSettings, card: ServiceCard, stopped: Callable[[], bool]) -> None:
        self.leave: Callable[[str], None] = _log
        url = settings.store_url()
        replica_id = replica_id_of(settings.state_dir)
        with without_older_services(url, lambda said: log.warning(f"{said}; this one goes on then"), stopped):
            if settings.engine != "fake":
                refuse_jobs_from_elsewhere(url, settings.state_dir)
            store = Store(url, replica_id=replica_id)
        with ExitStack() as stack:
            stack.callback(store.close)
            if settings.engine not in FAILS_OVER:
                wait_while_another_decides(store, replica_id, settings.leader_lease_s)
            seat = Seat(lambda: self._election.tell_of_runs())
            assembly = Assembly.of(settings, store, Notifier(), seat)
            self._election = Election(
                assembly,
                url,
                replica_id=replica_id,
                own_url=own_url(settings, card),
                card=_about(card),
                open_engine=lambda mandate: open_engine(settings, _leadership(settings, store, mandate)),
                leave=lambda said: self.leave(said),
            )
            stack.callback(self._election.close)
            self.parts = assembly.parts(self._election.replicas)
            self._election.start()
            stack.pop_all()

    def step_down(self) -> None:
        """Give up the lease, so that another replica takes over at once."""
        self._election.step_down()

    def close(self) -> None:
        """Give up the lease, and end the tenure."""
        self._election.close()


def _leadership(settings: ServiceSettings, store: Store, mandate: Mandate) -> Leadership | None:
    """Return what the engine of a leader needs of the others; None for one that cannot go on elsewhere."""
    if settings.engine not in FAILS_OVER:
        return None
    from elasticflow_airflow.engines.cluster.cluster_nodes import Leadership

    return Leadership(
        records=DatabaseRecords(store.engine_without_transactions, mandate.leading_epoch),
        fencing=NodeFencing(mandate),
        code_root=settings.state_dir,
    )


def _about(card: ServiceCard) -> Mapping[str, Any]:
    return {**card.owner, "version": card.version}


def own_url(settings: ServiceSettings, card: ServiceCard) -> str | None:
    """Return where other replicas reach this one; None: it listens on a Unix socket, where they cannot."""
    if settings.advertise_url is not None:
        return settings.advertise_url
    if not card.endpoint.startswith("http"):
        return None
    scheme, _, rest = card.endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  (it is compared, not bound to)
        host = _address_toward(sa.make_url(settings.store_url()).host)
    return f"{scheme}://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def _address_toward(host: str | None) -> str:
    """Return the address of this machine that packets to a host have; its name where that cannot be said."""
    if host and not host.startswith("/") and not os.path.exists(host):
        try:
            family, kind, *_, where = socket.getaddrinfo(host, 5432, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # Nothing is sent: this only selects the address.
                return str(probe.getsockname()[0])
        except OSError as error:
            log.warning("the address of this machine toward the database cannot be told", problem=str(error))
    return socket.gethostname()
