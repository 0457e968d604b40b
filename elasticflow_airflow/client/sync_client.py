"""The blocking client, for Airflow task processes and the command line."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx
from tenacity import RetryCallState, Retrying

from elasticflow_airflow.client.calls.call import BlockingCaller, Call
from elasticflow_airflow.client.calls.exchange import Attempt, read_answer
from elasticflow_airflow.client.calls.service_calls import ServiceClient
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")


class ElasticFlowClient(ServiceClient, BlockingCaller):
    """Calls the service, with retries while it is unavailable.

    ``retry_for_s``: how long to retry a call if the service does not answer, in seconds; 0 tries once. ``timeout_s``:
    limit of one request. ``on_away`` is called once per outage with the reason. With an embedded endpoint, a service
    that is gone is restarted. Raises the errors of ``client.errors``. Thread-safe.

    If the endpoint has several replicas, each try asks them in turn, each once and without a pause, until one can help:
    the next one after an error of the connection, a timeout, or an answer like 503; never after another answer. The
    replica that answered last is asked first. A request that was executed although its answer was lost may so be
    executed twice, at two replicas, which changes nothing: a repeated submit attaches to the job of the first one, and
    the claim that it returns is the newer, valid one.
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
        attempt, options = Attempt(self.endpoint), self._options_of(call)
        for replica in attempt:
            with attempt:
                response = self._http.request(call.method, replica.base_url + call.path, **options)
                return read_answer(call, response, replica)
        raise attempt.failure()

    def _while_away(self, state: RetryCallState) -> None:
        self._report_outage(state)
        if self.endpoint.embedded_state_dir is not None:
            self._start_again(self.endpoint.embedded_state_dir)
