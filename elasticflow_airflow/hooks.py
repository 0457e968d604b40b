"""Resolves an Airflow connection to a service and creates clients for it, for workers (sync) and triggerers (async)."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from airflow.sdk import BaseHook, Connection
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException
from airflow.sdk.execution_time import task_runner

from elasticflow_airflow.bounds import NAME_CHARACTERS, text_problem
from elasticflow_airflow.client import (
    AsyncElasticFlowClient,
    ElasticFlowClient,
    ElasticFlowError,
    Endpoint,
    ensure_service,
)
from elasticflow_airflow.client.embedded import embedded_endpoint, for_looking
from elasticflow_airflow.client.pool import shared_transport
from elasticflow_airflow.exceptions import MissingConnection, UnusableConnection
from elasticflow_airflow.settings import AirflowSettings, embedded_state_dir

_DEFAULT_PORT = 8321
_ONE_MACHINE = frozenset({"LocalExecutor", "SequentialExecutor", "DebugExecutor"})


class ElasticFlowHook(BaseHook):
    """Connection to an elasticflow service (connection type ``elasticflow``).

    Host, port and scheme are the address of a service started with ``elasticflow serve``, the password is its token;
    ``unix:///path`` as host names a socket. The replicas of one service are several hosts, separated by commas, each
    with or without scheme and port; or ``urls`` in the extra, with the host empty: the same as a string or a list.
    Further extra: ``namespace``, ``verify`` (true, false or a CA bundle), ``timeout_s``, ``state_dir``. If the
    *default* connection is missing, or the host is empty, the embedded service of this machine is used, and started
    when needed. Any other missing connection is an error, and so is a missing default connection with an executor that
    runs tasks on several machines, each of which would start its own service. A missing or unusable connection fails a
    task without a retry (``MissingConnection``, ``UnusableConnection``).
    """

    conn_name_attr = "elasticflow_conn_id"
    default_conn_name = "elasticflow_default"
    conn_type = "elasticflow"
    hook_name = "ElasticFlow"

    def __init__(self, elasticflow_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.elasticflow_conn_id = elasticflow_conn_id
        self._connection: Connection | None = None
        self._resolved = False

    def get_conn(self) -> ElasticFlowClient:
        """Create a client; starts the embedded service if the connection resolves to it."""
        return self.client()

    def client(self, *, retry_for_s: float = 60.0, timeout_s: float | None = None) -> ElasticFlowClient:
        """Create a blocking client, which the caller closes. The arguments are those of ElasticFlowClient."""
        return ElasticFlowClient(self.endpoint(), retry_for_s=retry_for_s, timeout_s=timeout_s or self._timeout_s)

    async def async_client(self, *, retry_for_s: float = 60.0) -> AsyncElasticFlowClient:
        """Create an async client, which the caller closes, without blocking the event loop. It shares connections."""
        await self._aresolve()
        endpoint = self._locate()
        transport = shared_transport(endpoint)
        return AsyncElasticFlowClient(endpoint, retry_for_s=retry_for_s, timeout_s=self._timeout_s, transport=transport)

    async def triggerer_client(self, state_dir: str | None, *, retry_for_s: float = 60.0) -> AsyncElasticFlowClient:
        """Like ``async_client``; ``state_dir`` names the embedded service that the worker used, or is None."""
        if state_dir is not None:
            endpoint = embedded_endpoint(Path(state_dir))
            return AsyncElasticFlowClient(endpoint, retry_for_s=retry_for_s, transport=shared_transport(endpoint))
        return await self.async_client(retry_for_s=retry_for_s)

    def endpoint(self, *, start: bool = True) -> Endpoint:
        """Return the address of the service. ``start``: start the embedded service if it does not answer."""
        self._resolve()
        endpoint = self._locate()
        if start and endpoint.embedded_state_dir is not None:
            return ensure_service(endpoint.embedded_state_dir)
        return endpoint

    @property
    def namespace(self) -> str:
        """Namespace of this Airflow's jobs: the connection's, else the configuration's.

        Raises UnusableConnection for a namespace that no service would accept.
        """
        self._resolve()
        given, where = self._extra.get("namespace"), "[elasticflow] namespace"
        if given:
            where = f"namespace in the extra of elasticflow_conn_id={self.elasticflow_conn_id!r}"
        name = str(given or AirflowSettings.read().namespace)
        problem = text_problem(name, NAME_CHARACTERS)
        if problem is not None:
            raise UnusableConnection(f"{where} {problem}")
        return name

    def test_connection(self) -> tuple[bool, str]:
        """Return whether the service answers, for the button in Airflow's connection form. Starts no service."""
        try:
            endpoint = for_looking(self.endpoint(start=False))
            with ElasticFlowClient(endpoint, retry_for_s=0.0, timeout_s=self._timeout_s) as client:
                health = client.health()
        except (ElasticFlowError, AirflowException) as error:
            return False, str(error)
        free = sum(slot.job_id is None and slot.busy is None for slot in health.slots)
        problems = f"; problems: {'; '.join(health.problems)}" if health.problems else ""
        return True, (
            f"elasticflow {health.version} ({health.engine} engine), {free} of {len(health.slots)} slots free{problems}"
        )

    @property
    def _extra(self) -> dict[str, Any]:
        return {} if self._connection is None else dict(self._connection.extra_dejson)

    @property
    def _timeout_s(self) -> float:
        return float(self._extra.get("timeout_s") or 10.0)

    def _resolve(self) -> None:
        if self._resolved:
            return
        try:
            self._connection = self.get_connection(self.elasticflow_conn_id)
        except AirflowNotFoundException as error:
            self._refuse_missing(error)
        self._check()
        self._resolved = True

    async def _aresolve(self) -> None:
        if self._resolved:
            return
        try:
            self._connection = await self.aget_connection(self.elasticflow_conn_id)
        except AirflowNotFoundException as error:
            self._refuse_missing(error)
        self._check()
        self._resolved = True

    def _refuse_missing(self, error: Exception) -> None:
        if self.elasticflow_conn_id != self.default_conn_name:
            raise MissingConnection(
                f"elasticflow_conn_id={self.elasticflow_conn_id!r} is not defined: add a connection of type"
                f" 'elasticflow' with that id, or leave the argument out to use {self.default_conn_name!r}, or where"
                " that is missing too, the embedded service of this machine"
            ) from error
        if (executor := distributed_executor()) is not None:
            raise MissingConnection(
                f"elasticflow_conn_id={self.elasticflow_conn_id!r} is not defined, and [core] executor = {executor!r}"
                " runs tasks on several machines: each would start an embedded service of its own, and none would know"
                " what the others have promised. Run `elasticflow serve` where the GPUs are, and add the connection"
                f" {self.elasticflow_conn_id!r} of type 'elasticflow' with its host, port and token. (If all tasks run"
                " on this one machine after all, add the connection with an empty host.)"
            ) from error

    def _check(self) -> None:
        """Check the connection's type and extra. Raises UnusableConnection."""
        connection, named = self._connection, f"elasticflow_conn_id={self.elasticflow_conn_id!r}"
        if connection is None:
            return
        if connection.conn_type not in ("", None, self.conn_type):
            raise UnusableConnection(
                f"{named} is a connection of type {connection.conn_type!r}: give the id of one of type"
                f" {self.conn_type!r}, or change its type"
            )
        verify, timeout_s = _verify(self._extra.get("verify")), self._extra.get("timeout_s")
        if isinstance(verify, str) and not Path(verify).is_file():
            raise UnusableConnection(
                f"{named} has verify={verify!r} in its extra, and there is no such file on this machine: give true,"
                " false, or the path of a CA bundle"
            )
        if timeout_s not in (None, "") and not _is_positive(timeout_s):
            raise UnusableConnection(
                f"{named} has timeout_s={timeout_s!r} in its extra: give seconds, greater than 0, or leave it out"
            )

    def _locate(self) -> Endpoint:
        connection, extra = self._connection, self._extra
        named_by = f"elasticflow_conn_id={self.elasticflow_conn_id!r}"
        given = None if connection is None else connection.host or None
        if connection is not None and extra.get("urls"):
            if given:
                raise UnusableConnection(
                    f"{named_by} has the host {given!r} and urls in its extra: give all addresses in one of the two"
                )
            given = _joined(extra["urls"], named_by)
        if connection is None or not given:
            return embedded_endpoint(Path(extra["state_dir"]) if extra.get("state_dir") else embedded_state_dir())
        url, token = given, connection.password or None
        if not given.startswith("unix:"):
            entries = given.split(",")
            url = ",".join(_with_defaults(entry.strip(), connection.schema, connection.port) for entry in entries)
        try:
            found = Endpoint.from_url(url, token=token, verify=_verify(extra.get("verify")))
        except ElasticFlowError as error:
            raise UnusableConnection(f"{named_by}: {error}") from error
        return replace(found, named_by=named_by)


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a service, and the namespace of this Airflow's jobs there. Several connections may share one."""

    endpoint: Endpoint
    namespace: str

    @classmethod
    def of(cls, conn_id: str) -> Address:
        """Look up a connection; starts no service. Raises MissingConnection, UnusableConnection."""
        hook = ElasticFlowHook(conn_id)
        return cls(hook.endpoint(start=False), hook.namespace)


def distributed_executor() -> str | None:
    """Return the value of ``[core] executor`` if any of its executors runs tasks on other machines, else None.

    Returns None under ``dag.test()``, whatever the setting. In a pod of the KubernetesExecutor, Airflow's own pod
    templates set LocalExecutor; such a pod is recognised by an environment variable.
    """
    if type(getattr(task_runner, "SUPERVISOR_COMMS", None)).__name__ == "InProcessSupervisorComms":
        return None
    if os.environ.get("AIRFLOW_IS_K8S_EXECUTOR_POD"):
        return "KubernetesExecutor"
    configured = str(conf.get("core", "executor", fallback="LocalExecutor"))
    names = re.split(r"[,;]", configured)  # several, each perhaps as team=executor, alias:module.Class or a module path
    classes = {re.split(r"[=:.]", name.strip())[-1] for name in names if name.strip()}
    return None if classes <= _ONE_MACHINE else configured


def _joined(urls: Any, named_by: str) -> str:
    """Return the connection's ``urls`` as one string. Raises UnusableConnection."""
    if isinstance(urls, str):
        return urls
    if not isinstance(urls, list) or not all(isinstance(url, str) and "," not in url for url in urls):
        raise UnusableConnection(
            f"{named_by} has urls={urls!r} in its extra: give a list of addresses, or a string with commas between them"
        )
    return ",".join(urls)


def _with_defaults(address: str, scheme: str | None, port: int | None) -> str:
    """Return an address as a URL: without a scheme and a port of its own, it has those of the connection."""
    if "://" in address or not address:
        return address
    try:
        has_port = urlsplit(f"//{address}").port is not None
    except ValueError:  # no number, or too large: the endpoint refuses it and says so
        has_port = True
    return f"{scheme or 'http'}://{address}{'' if has_port else f':{port or _DEFAULT_PORT}'}"


def _is_positive(value: Any) -> bool:
    try:
        return 0 < float(value) < math.inf
    except (TypeError, ValueError):
        return False


def _verify(value: Any) -> bool | str:
    """Parse the connection's ``verify``: absent means True; a string is a boolean or the path of a CA bundle."""
    if value is None or value == "":
        return True
    if isinstance(value, bool):
        return value
    text = str(value)
    return {"true": True, "false": False}.get(text.lower(), text)
