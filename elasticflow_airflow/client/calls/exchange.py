"""Shared by the sync and the async client: how a response is evaluated, and how long a request is retried.

Does no I/O except reading a response that has already arrived.
"""

from __future__ import annotations

import os
from typing import TypeVar

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
    IncompatibleService,
    ServiceUnavailable,
    Unauthorized,
    raise_for_answer,
)

T = TypeVar("T")

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
