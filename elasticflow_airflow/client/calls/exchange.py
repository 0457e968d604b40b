"""Shared by all clients: which replica is asked, how a response is evaluated, and how long a request is retried.

Does no I/O except reading a response that has already arrived.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Final, TypeVar

import httpx
from pydantic import ValidationError
from tenacity import retry_if_exception_type, wait_exception, wait_exponential, wait_random
from tenacity.retry import retry_base
from tenacity.wait import wait_base

from elasticflow_airflow import __version__
from elasticflow_airflow.api import API_HEADER, API_VERSION, VERSION_HEADER
from elasticflow_airflow.client.calls.call import Call
from elasticflow_airflow.client.endpoint import Endpoint
from elasticflow_airflow.client.errors import (
    ElasticFlowError,
    IncompatibleService,
    ServiceUnavailable,
    Unauthorized,
    raise_for_answer,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

_answered_last: Final[dict[tuple[Endpoint, ...], int]] = {}
"""Which of several replicas answered last, by their addresses, for all clients of this process.

Clients are opened and closed all the time, and each would otherwise find out anew which replica is dead. Entries are
only replaced, which needs no lock.
"""

RETRIED: retry_base = retry_if_exception_type(ServiceUnavailable)
"""Retry only while the service is unavailable: any other response would be the same the next time."""


def pause_between() -> wait_base:
    """Return the pauses between retries: short at first, so that a restart of the service is hardly noticed.

    They have jitter, so that tasks do not retry in lockstep, and are no shorter than the Retry-After of a busy service.
    """
    asked = wait_exception(lambda error: getattr(error, "retry_after_s", 0.0))
    return asked + wait_exponential(multiplier=0.1, max=3.0) + wait_random(0.0, 0.2)


def read_answer(call: Call[T], response: httpx.Response, endpoint: Endpoint) -> T:
    """Read a response, or raise the error that it represents."""
    _check_version(response, endpoint)
    if response.status_code == 404 and call.missing is not None:
        return call.missing(response)
    raise_for_answer(response, str(endpoint))
    try:
        return call.read(response)
    except (ValidationError, ValueError) as error:
        raise IncompatibleService(
            f"{endpoint} answered {call.method} {call.path} in a way this client does not understand: {error}",
            "install the same version of elasticflow-airflow for Airflow and for the service",
        ) from error


def _check_version(response: httpx.Response, endpoint: Endpoint) -> None:
    """Refuse a service of another API version. Without a version header, the response itself decides."""
    api = response.headers.get(API_HEADER)
    if api is None or api == API_VERSION:
        return
    version = response.headers.get(VERSION_HEADER, "unknown")
    raise IncompatibleService(
        f"{endpoint} is elasticflow {version}, which speaks API {api}; this client is {__version__} and speaks"
        f" {API_VERSION}",
        "install the same version of elasticflow-airflow for Airflow and for the service",
        "version",
    )


def unreachable(error: httpx.TransportError, endpoint: Endpoint) -> ServiceUnavailable | Unauthorized:
    """Convert a transport error into the error to raise."""
    socket = endpoint.socket_path
    if socket is not None and socket.exists() and not os.access(socket, os.W_OK):
        return Unauthorized(
            f"{endpoint} belongs to another user", "give every Airflow component the same user or its own connection"
        )
    what = str(error) or type(error).__name__
    if socket is not None:
        hint = f"look at the end of {socket.parent / 'service.log'}"
    else:
        hint = "is `elasticflow serve` running there, and can this machine reach it?"
    return ServiceUnavailable(f"{endpoint} does not answer: {what}", hint, "away")


class Attempt:
    """One attempt at a request: asks the replica that answered last, then each other one once, until one can help.

    For a loop, in which the ``with`` block asks one replica::

        attempt = Attempt(endpoint)
        for replica in attempt:
            with attempt:
                return read_answer(call, send(replica), replica)
        raise attempt.failure()

    The next replica is asked after a transport error (also one that left open whether the request was executed, because
    any may be repeated), and after a ServiceUnavailable, such as a 503. Any other error is an answer, and is raised.
    The replica that answers stays the first to be asked, until it cannot help; none is returned to because of its
    place in the list. ``convert`` makes the error to raise out of a transport error. Not thread-safe: one for each
    attempt; what they share is.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        convert: Callable[[httpx.TransportError, Endpoint], ElasticFlowError] = unreachable,
    ) -> None:
        self._endpoint, self._convert = endpoint, convert
        self._replicas = endpoint.replicas
        self._index = 0
        self._failed: list[tuple[Endpoint, ServiceUnavailable]] = []

    def __iter__(self) -> Iterator[Endpoint]:
        """Yield each replica once, as long as none has answered."""
        first = _answered_last.get(self._replicas, 0)
        for offset in range(len(self._replicas)):
            self._index = (first + offset) % len(self._replicas)
            yield self._replicas[self._index]

    def __enter__(self) -> None:
        """Begin to ask the replica that was yielded last."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Note how it went; suppress the errors after which the next replica is to be asked."""
        replica = self._replicas[self._index]
        if isinstance(error, httpx.TransportError):
            converted = self._convert(error, replica)
            if not isinstance(converted, ServiceUnavailable):
                raise converted from error
            converted.__cause__ = error
            error = converted
        if isinstance(error, ServiceUnavailable):
            self._failed.append((replica, error))
            return True
        if self._failed and (error is None or isinstance(error, ElasticFlowError)):
            log.info("%s; going on with %s", _reasons(self._failed), replica.base_url)
            _answered_last[self._replicas] = self._index
        return False

    def failure(self) -> ServiceUnavailable:
        """Return the error to raise after no replica could help: for a single address, its own."""
        if len(self._failed) == 1:
            return self._failed[0][1]
        named = f" ({self._endpoint.named_by})" if self._endpoint.named_by else ""
        errors = [error for _, error in self._failed]
        return ServiceUnavailable(
            f"none of the {len(self._failed)} addresses of the elasticflow service{named} answers as it should:"
            f" {_reasons(self._failed)}",
            "; ".join(dict.fromkeys(error.hint for error in errors if error.hint)),
            "away",
            # The first that can help is enough.
            min((error.retry_after_s for error in errors if error.retry_after_s), default=0.0),
        )


def _reasons(failed: Sequence[tuple[Endpoint, ServiceUnavailable]]) -> str:
    """Return what each of these replicas said, or why it could not be asked, with its address."""
    return "; ".join(f"{one.base_url} ({error.message.removeprefix(f'{one} ')})" for one, error in failed)
