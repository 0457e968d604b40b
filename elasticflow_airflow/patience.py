"""Asks the service from the triggerer for as long as a wait lasts, whatever comes in between. Knows no job.

A trigger that raises fails its task, and spends one of its retries.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from airflow.sdk.exceptions import AirflowException

from elasticflow_airflow.client import PASSING, AsyncElasticFlowClient
from elasticflow_airflow.exceptions import after_waiting
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.waiting import Logger

T = TypeVar("T")

_RETRY_FOR_S = 30.0


class PatientClient:
    """A client that outlasts what may pass: a restart, a token that changes, a connection that cannot be read now.

    ``state_dir`` as of ``ElasticFlowHook.triggerer_client``; ``service_away_s``: for how long, in seconds.
    """

    def __init__(self, elasticflow_conn_id: str, state_dir: str | None, service_away_s: float, log: Logger) -> None:
        self._conn_id, self._state_dir = elasticflow_conn_id, state_dir
        self._service_away_s, self._log = service_away_s, log
        self._client: AsyncElasticFlowClient | None = None
        self._last_answer = time.monotonic()

    async def __aenter__(self) -> PatientClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client; a question opens another."""
        await self._drop()

    async def ask(self, question: Callable[[AsyncElasticFlowClient], Awaitable[T]]) -> T | None:
        """Ask once; None while the service is away. Raises ServiceAway once it is for too long, or ServiceRefused.

        Raises what else the question raises.
        """
        try:
            if self._client is None:
                hook = ElasticFlowHook(self._conn_id)
                retry_for_s = min(_RETRY_FOR_S, self._service_away_s)
                self._client = await hook.triggerer_client(self._state_dir, retry_for_s=retry_for_s)
            answer = await question(self._client)
        except (*PASSING, AirflowException) as error:  # Airflow's own: the connection cannot be read now
            await self._drop()  # its address or its token may have changed
            away_s = time.monotonic() - self._last_answer
            if away_s > self._service_away_s:
                raise after_waiting(error, away_s) from error
            self._log.warning("%s; waiting for it to come back", error)
            return None
        self._last_answer = time.monotonic()
        return answer

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
