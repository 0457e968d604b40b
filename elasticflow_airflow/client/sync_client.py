"""The blocking client, for Airflow task processes and the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
from tenacity import RetryCallState, Retrying

from elasticflow_airflow.client.calls.call import BlockingCaller, Call
from elasticflow_airflow.client.calls.exchange import read_answer, unreachable
from elasticflow_airflow.client.calls.service_calls import ServiceClient
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")


class ElasticFlowClient(ServiceClient, BlockingCaller):
    """Calls the service, with retries while it is unavailable.

    ``retry_for_s``: how long to retry a call if the service does not answer, in seconds; 0 tries once. ``timeout_s``:
    limit of one request. ``on_away`` is called once per outage with the reason. With an embedded endpoint, a service
    that is gone is restarted. Raises the errors of ``client.errors``. Not thread-safe.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        retry_for_s: float = 60.0,
        timeout_s: float = 10.0,
        on_away: Callable[[str], None] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(endpoint, retry_for_s=retry_for_s, timeout_s=timeout_s, on_away=on_away)
        self._http = endpoint.open_client(timeout_s, transport)

    def __enter__(self) -> ElasticFlowClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def upload_snapshot(self, snapshot: Snapshot) -> bool:
        """Upload the code unless the service already has it; return whether it was uploaded."""
        if self.has_snapshot(snapshot.sha256):
            return False
        self._send_snapshot(snapshot)
        return True

    @staticmethod
    def _method_of(build: Callable[Concatenate[Any, P], Call[T]]) -> Callable[Concatenate[ElasticFlowClient, P], T]:
        @functools.wraps(build)
        def method(self: ElasticFlowClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return self._run(build(self, *args, **kwargs))

        return method

    def _run(self, call: Call[T]) -> T:
        answer: T = Retrying(**self._retry_rules(), before_sleep=self._while_away)(self._exchange, call)
        return answer

    def _exchange(self, call: Call[T]) -> T:
        try:
            response = self._http.request(call.method, call.path, **self._options_of(call))
        except httpx.TransportError as error:
            raise unreachable(error, self.endpoint) from error
        return read_answer(call, response, self.endpoint)

    def _while_away(self, state: RetryCallState) -> None:
        self._report_outage(state)
        if self.endpoint.embedded_state_dir is not None:
            self._start_again(self.endpoint.embedded_state_dir)
