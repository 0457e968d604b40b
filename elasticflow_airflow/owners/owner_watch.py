"""Periodically reports to the services which owners of jobs are gone, from Airflow's api-server.

The api-server is where tasks are marked and runs deleted; it may read the metadata database, and needs neither
scheduler nor triggerer. The lifespan of the plugin's application starts the watch in each worker of the api-server, so
reports may be duplicated. It never starts a service, and retries an unavailable one the next time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime

from airflow.models.connection import Connection
from airflow.models.serialized_dag import SerializedDagModel
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException
from airflow.utils.session import create_session
from fastapi import FastAPI
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError
from elasticflow_airflow.hooks import Address, ElasticFlowHook
from elasticflow_airflow.owners.owner_report import TaskKey, find_states, name_of_airflow, report_owners
from elasticflow_airflow.recurring.calendar_feed import read_elastic_tasks

log = logging.getLogger(__name__)

_DEFAULT_EVERY_S = 10.0
_LOOK_UP_S = 60.0
_TIMEOUT_S = 10.0


@asynccontextmanager
async def watching(_app: FastAPI) -> AsyncIterator[None]:
    """Run the watch for the lifespan of the plugin's application; Airflow runs this context."""
    every_s = _interval_s()
    if every_s <= 0:
        yield
        return
    watch = OwnerWatch(every_s)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class OwnerWatch:
    """The reporting thread. It is a daemon, so it may be interrupted at any point when the process ends."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._connections = Connections()
        self._airflow = ""
        self._places: dict[str, Address] = {}
        """The services by connection id."""
        self._looked_up_s = -math.inf
        self._said: dict[str, str] = {}
        """The last error by subject, so that each is logged only once."""
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread, which runs until :meth:`stop`."""
        threading.Thread(target=self._run, name="elasticflow-owners", daemon=True).start()

    def stop(self) -> None:
        """Stop after the report in progress."""
        self._stop.set()

    def look(self) -> None:
        """Report to every service. If a service or the database is unavailable, its jobs are not reported."""
        with self._troubles("Airflow's database", SQLAlchemyError):
            self._look_up()
        for place in sorted(set(self._places.values()), key=str):
            with self._troubles(str(place.endpoint), ElasticFlowError, SQLAlchemyError):
                self._report(place)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self.look()
            except Exception:
                log.exception("the owners of jobs could not be reported; it is tried again")

    def _look_up(self) -> None:
        """Find the services. The list of connections is read each time, so that a new one is used at once.

        The connections themselves are read again only after a while, since they may be in a secrets backend.
        """
        now = time.monotonic()
        again = now - self._looked_up_s >= _LOOK_UP_S
        with create_session() as session:
            self._airflow = name_of_airflow(session.get_bind().engine.url)
            conn_ids = self._connections.read(session)
        places = {} if again else {one: place for one, place in self._places.items() if one in conn_ids}
        for conn_id in sorted(conn_ids - places.keys()):
            with self._troubles(f"connection {conn_id!r}", AirflowException, ElasticFlowError):
                places[conn_id] = Address.of(conn_id)
        self._places = places
        if again:
            self._looked_up_s = now

    def _report(self, place: Address) -> None:
        endpoint = place.endpoint
        if endpoint.embedded_state_dir is not None and not (endpoint.socket_path and endpoint.socket_path.exists()):
            return  # the service does not run, so it has no running jobs
        with ElasticFlowClient(endpoint, retry_for_s=0.0, timeout_s=_TIMEOUT_S) as client:
            cancelled = report_owners(client, place.namespace, self._airflow, _find)
        if cancelled:
            log.warning("cancelled at %s, as their tasks are gone: jobs %s", endpoint, ", ".join(cancelled))

    @contextmanager
    def _troubles(self, about: str, *kinds: type[Exception]) -> Iterator[None]:
        """Log an error, once until it changes, and suppress it."""
        try:
            yield
        except kinds as error:
            if self._said.get(about) != str(error):
                self._said[about] = str(error)
                log.warning("the owners of jobs cannot be reported now: %s; it is tried again", error)
        else:
            self._said.pop(about, None)


class Connections:
    """The connections to services: that of the page, those of this type, and those that elastic tasks refer to.

    The last are kept when their DAG is deleted, because its jobs may still be running there.
    """

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._read: dict[str, datetime] = {}

    def read(self, session: Session) -> set[str]:
        """Return the connection ids; DAGs that have not changed are not read again."""
        dag_id, last_updated = SerializedDagModel.dag_id, func.max(SerializedDagModel.last_updated)
        found = session.execute(select(dag_id, last_updated).group_by(dag_id))
        changed = {name: at for name, at in found if self._read.get(name) != at}
        for _, tasks in read_elastic_tasks(session, sorted(changed)):
            self._named |= {task.conn_id for task in tasks if task.names_service}
        self._read |= changed
        stored = session.scalars(select(Connection.conn_id).where(Connection.conn_type == ElasticFlowHook.conn_type))
        page = conf.get("elasticflow", "page_conn_id", fallback=ElasticFlowHook.default_conn_name)
        return {page, *(str(conn_id) for conn_id in stored), *self._named}


def _interval_s() -> float:
    """Return the configured interval; an invalid value must not keep the api-server from starting."""
    given = conf.get("elasticflow", "owners_interval_s", fallback=str(_DEFAULT_EVERY_S))
    try:
        every_s = float(given)
    except ValueError:
        every_s = math.nan
    if not math.isfinite(every_s):
        log.error("[elasticflow] owners_interval_s = %s: give seconds; taking %g", given, _DEFAULT_EVERY_S)
        return _DEFAULT_EVERY_S
    return every_s


def _find(keys: Sequence[TaskKey]) -> dict[TaskKey, str | None]:
    with create_session() as session:
        return find_states(session, keys)
