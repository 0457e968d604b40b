"""A client for the triggerer that keeps retrying for as long as a wait lasts. Knows nothing about jobs.

It must not raise on a temporary error: a trigger that raises fails its task, and uses up one of its retries.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from elasticflow_airflow.client import AsyncElasticFlowClient
from elasticflow_airflow.exceptions import after_waiting
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.waiting.outages import MAY_PASS, Outage
from elasticflow_airflow.waiting.progress_lines import Logger

T = TypeVar("T")

_RETRY_FOR_S = 30.0


@dataclass(slots=True)
class _LastAnswer:
    """Time of the last response. The triggerer polls every few seconds, so an outage counts from the last response."""

    away_since: float | None


class RetryingClient:
    """A client that tolerates temporary errors: a restart, a token change, a connection that cannot be read at present.

    ``state_dir`` is that of ``ElasticFlowHook.triggerer_client``; ``service_away_s`` is how long an outage may last, in
    seconds.
    """

    def __init__(self, elasticflow_conn_id: str, state_dir: str | None, service_away_s: float, log: Logger) -> None:
        self._conn_id, self._state_dir = elasticflow_conn_id, state_dir
        self._service_away_s = service_away_s
        self._client: AsyncElasticFlowClient | None = None
        self._last_answer = _LastAnswer(time.monotonic())
        self._outage = Outage(self._last_answer, service_away_s, log, clock=time.monotonic)

    async def __aenter__(self) -> RetryingClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the client; the next request opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def ask(self, question: Callable[[AsyncElasticFlowClient], Awaitable[T]]) -> T | None:
        """Run a request; return None while the service is unavailable.

        Raises ServiceAway or ServiceRefused once the outage lasts too long, and any other error that ``question``
        raises.
        """
        try:
            if self._client is None:
                hook = ElasticFlowHook(self._conn_id)
                retry_for_s = min(_RETRY_FOR_S, self._service_away_s)
                self._client = await hook.triggerer_client(self._state_dir, retry_for_s=retry_for_s)
            answer = await question(self._client)
        except MAY_PASS as error:
            await self.aclose()  # its address or its token may have changed
            if not self._outage.is_waited_out(error):
                raise after_waiting(error, self._outage.length_s) from error
            return None
        self._last_answer.away_since = time.monotonic()
        return answer
