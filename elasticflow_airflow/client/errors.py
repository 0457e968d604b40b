"""The errors of the client, each with a hint on how to fix it.

Depends on HTTP responses and the API's ``Problem``; may not depend on Airflow.
"""

# ruff: noqa: N818 - the names state the condition (StaleClaim), as users see them in a log.

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from typing import Final

import httpx
from pydantic import ValidationError

from elasticflow_airflow.api import Problem


class ElasticFlowError(Exception):
    """Base class of all errors of this client. ``error`` is the service's short code, ``hint`` says how to fix it."""

    def __init__(self, message: str, hint: str = "", error: str = "") -> None:
        super().__init__(message if not hint else f"{message} ({hint})")
        self.message = message
        self.hint = hint
        self.error = error


class ServiceUnavailable(ElasticFlowError):
    """The service did not answer, or cannot serve now (502, 503, 504, a proxy's page). Worth retrying.

    ``retry_after_s``: seconds to wait before a retry, as the response requested.
    """

    def __init__(self, message: str, hint: str = "", error: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, hint, error)
        self.retry_after_s = retry_after_s


class EmbeddedStartError(ServiceUnavailable):
    """The embedded service could not be started on this machine."""


class NotRunning(ServiceUnavailable):
    """No service runs on this machine, and the caller only reads, so none is started."""


class Unauthorized(ElasticFlowError):
    """The token is missing or wrong, or the socket belongs to another user."""


class JobNotFound(ElasticFlowError):
    """The service does not know the job."""


class StaleClaim(ElasticFlowError):
    """A newer attempt has attached to the job: this caller may no longer change it."""


class InvalidSubmission(ElasticFlowError):
    """The service refused the request's content (400, 413, 422); the message names the argument."""


class RequestRefused(ElasticFlowError):
    """Any other refusal (4xx)."""


class ServiceFault(ElasticFlowError):
    """The service failed to handle the request (500): a bug, or a full disk; see its log."""


class IncompatibleService(ElasticFlowError):
    """This client does not understand the response: another version, or another program on that port."""


class SnapshotError(ElasticFlowError):
    """The code cannot be snapshotted: it is missing or too large, or a link leaves its folder."""


_LONGEST_PAUSE_S = 60.0

PASSING: Final = (ServiceUnavailable, ServiceFault, IncompatibleService, Unauthorized)
"""Errors that may be temporary, so that tasks wait: a restart, a full disk, an upgrade, a token change."""


def raise_for_answer(response: httpx.Response, where: str) -> None:
    """Raise the error that a response represents; return if it is a success. ``where`` names the service."""
    status = response.status_code
    if _is_page(response) and (status < 400 or status >= 500):
        # A proxy shows such a page while it cannot reach the service, sometimes with status 200.
        raise ServiceUnavailable(
            f"{where} answered {response.request.method} {response.request.url.path} with a web page (status {status}),"
            f" not with an answer: {_title_of(response)!r}",
            "does the address name an elasticflow service, and can a proxy that stands between reach it?",
            "away",
        )
    if status < 400:
        return
    problem = _problem_of(response)
    if status in (502, 503, 504):
        raise ServiceUnavailable(
            problem.message or f"{where} answered {status}",
            problem.hint or "is the service being restarted?",
            "away",
            _retry_after_s(response),
        )
    if problem.error == "stale_claim":
        raise StaleClaim(problem.message, problem.hint, problem.error)
    if status in (401, 403):
        # The service's own hint addresses callers that write HTTP by hand.
        hint = "set it as the password of the Airflow connection, or for the command line as ELASTICFLOW_TOKEN"
        what = problem.message or f"it refused the token (status {status})"
        raise Unauthorized(f"{where}: {what}", hint, problem.error)
    if status == 404 and problem.error:
        raise JobNotFound(problem.message, problem.hint, problem.error)
    if status in (400, 413, 422):
        raise InvalidSubmission(problem.message or f"{where} answered {status}", problem.hint, problem.error)
    if status >= 500:
        hint = problem.hint or "look at the end of the service's log"
        raise ServiceFault(problem.message or f"{where} failed with {status}", hint, problem.error)
    if not problem.error:
        raise IncompatibleService(
            f"{where} answered {status} to {response.request.method} {response.request.url.path} in a way that an"
            f" elasticflow service does not: {response.text[:200]!r}",
            "does the address name an elasticflow service of this version?",
        )
    raise RequestRefused(problem.message, problem.hint, problem.error)


def _retry_after_s(response: httpx.Response) -> float:
    """Return the response's Retry-After (RFC 9110, section 10.2.3) in seconds, capped; 0 without one."""
    said = response.headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit():
        return min(_LONGEST_PAUSE_S, float(said[:9]))
    try:
        at = parsedate_to_datetime(said)
    except ValueError:
        return 0.0
    return min(_LONGEST_PAUSE_S, max(0.0, at.timestamp() - time.time()))


def _is_page(response: httpx.Response) -> bool:
    """Whether the response is a web page, which the service never sends to a client."""
    kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
    return kind in ("text/html", "application/xhtml+xml")


def _title_of(response: httpx.Response) -> str:
    title = re.search(r"<title[^>]*>(.*?)</title", response.text, re.IGNORECASE | re.DOTALL)
    return " ".join((title[1] if title else response.text).split())[:100]


def _problem_of(response: httpx.Response) -> Problem:
    """Parse the body of an error response; an empty Problem if it is not from the service (for example, a proxy)."""
    try:
        return Problem.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        return Problem(error="", message="")
