"""Asks the service from the triggerer for as long as a wait lasts, whatever comes in between. Knows no job.

A trigger that raises fails its task, and spends one of its retries.
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
from elasticflow_airflow.waiting.task_log import Logger

T = TypeVar("T")

_RETRY_FOR_S = 30.0


@dataclass(slots=True)
class _LastAnswer:
    """The triggerer asks every few seconds: an outage counts from the last answer."""

    away_since: float | None


class RetryingClient:
    """A client that outlasts what may pass: a restart, a token that changes, a connection that cannot be read now.

    ``state_dir`` as of ``ElasticFlowHook.triggerer_client``; ``service_away_s``: for how long, in seconds.
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
        except MAY_PASS as error:
            await self._drop()  # its address or its token may have changed
            if not self._outage.is_waited_out(error):
                raise after_waiting(error, self._outage.length_s) from error
            return None
        self._last_answer.away_since = time.monotonic()
        return answer

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
