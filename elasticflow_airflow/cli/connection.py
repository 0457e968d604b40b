"""Selects the service that the command line talks to: ``--url``, else the embedded service of the state directory.

``airflow elasticflow`` runs the same commands with the service of an Airflow connection, which it sets by ``choose``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from elasticflow_airflow.api.diagnosis import Finding
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint, default_state_dir, ensure_service
from elasticflow_airflow.client.embedded import embedded_endpoint, for_looking

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WHOLE_ID = re.compile(r"-[0-9a-f]{16}$")
REFUSED, BAD_INPUT = 1, 2
"""Exit statuses: the service refused or was unavailable; the input is invalid."""
URL_ENV = "ELASTICFLOW_URL"
TOKEN_ENV = "ELASTICFLOW_TOKEN"  # noqa: S105 - the name of a variable, not a token

Url = typer.Option(
    None,
    "--url",
    envvar=URL_ENV,
    help="Address of the service: http://host:port, https://host:port or unix:///path; several of its replicas with "
    f"commas between them. The token: {TOKEN_ENV} or {TOKEN_ENV}_FILE. Without it: the embedded service of the state "
    "directory.",
)
StateDir = typer.Option(
    None, "--state-dir", envvar="ELASTICFLOW_STATE_DIR", help="State directory of the embedded service."
)
JobId = typer.Argument(..., help="Id of the job, as `jobs` lists it, or a part that only one job has.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A service that was not selected by command line options.

    ``locate`` returns its address, after starting an embedded service if the argument is true. ``program`` is the
    command as the user calls it. ``look`` returns the selecting side's own findings for the doctor.
    """

    locate: Callable[[bool], Endpoint]
    program: str
    look: Callable[[], Iterable[Finding]] = tuple


_chosen: ContextVar[Choice | None] = ContextVar("elasticflow_chosen_service", default=None)


@contextmanager
def choose(choice: Choice) -> Iterator[None]:
    """Make every command inside the context use this service."""
    before = _chosen.set(choice)
    try:
        yield
    finally:
        _chosen.reset(before)


def chosen() -> Choice | None:
    """Return the current choice, or None."""
    return _chosen.get()


def program() -> str:
    """Return the command as the user calls it."""
    choice = chosen()
    return "elasticflow" if choice is None else choice.program


def locate(url: str | None, state_dir: Path | None, *, start: bool = False) -> Endpoint:
    """Return the service's address. ``start``: start an embedded service if none runs. Raises ElasticFlowError."""
    choice = chosen()
    if choice is not None:
        return choice.locate(start)
    if url:
        return Endpoint.from_url(url, token=_token())
    state_dir = state_dir or default_state_dir()
    return ensure_service(state_dir) if start else embedded_endpoint(state_dir)


def _token() -> str | None:
    """Return the token from the environment, or from the file that it names, just as the service reads it."""
    file = os.environ.get(f"{TOKEN_ENV}_FILE")
    if os.environ.get(TOKEN_ENV) or not file:
        return os.environ.get(TOKEN_ENV)
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        remedy = f"make it readable for you, or set {TOKEN_ENV}"
        raise ElasticFlowError(f"the token file {file} cannot be read: {error.strerror}", remedy) from error


@contextmanager
def client(
    url: str | None,
    state_dir: Path | None,
    *,
    start: bool = False,
    retry_for_s: float = 0.0,
    refused: int = REFUSED,
) -> Iterator[ElasticFlowClient]:
    """Open a client; any error of the service ends the command with its message and status ``refused``.

    Invalid values end it with status 2.

    ``retry_for_s``: how long, in seconds, an outage of the service is tolerated, for long-running commands.
    """
    try:
        endpoint = locate(url, state_dir, start=start)
        with ElasticFlowClient(endpoint if start else for_looking(endpoint), retry_for_s=retry_for_s) as opened:
            yield opened
    except ElasticFlowError as error:
        fail(str(error), refused)
    except ValidationError as error:
        fail(what_is_wrong(error), BAD_INPUT)


_OPTIONS = {
    "deadline_at": "deadline",
    "global_batch_size": "batch",
    "latest_deadline_at": "latest-deadline",
    "until_at": "in",
}
"""Option names that differ from the field names in the API's messages."""


def what_is_wrong(error: ValidationError) -> str:
    """Describe the values that the API's message rejects, by the names and values of the options."""
    return "; ".join(_wrong(found) for found in error.errors(include_url=False))


def _wrong(found: ErrorDetails) -> str:
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])  # The message class's own sentence, which includes the values.
    names = [part for part in found["loc"] if isinstance(part, str)]
    option = _OPTIONS.get(names[-1], names[-1].replace("_", "-")) if names else "arguments"
    value = found["input"]
    given = f"={value!r}" if isinstance(value, str | int | float) else ""
    return f"--{option}{given}: {found['msg']}"


def whole_id(service: ElasticFlowClient, given: str) -> str:
    """Return the id of the one job whose id contains ``given``. Ends the command if there are several.

    Returns ``given`` itself if it is a whole id, or if no job is found: then the service says so.
    """
    if _WHOLE_ID.search(given):
        return given
    found = [job.job_id for job in service.list_jobs(text=given, limit=100) if given in job.job_id]
    if len(found) > 1:
        some = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        fail(f"{given!r} is in the ids of {len(found)} jobs: {some}. Give more of it", BAD_INPUT)
    return found[0] if found else given


def check_name(name: str, what: str = "id of the job") -> None:
    """Reject an empty name. Raises typer.BadParameter."""
    if not name.strip():
        raise typer.BadParameter(f"the {what} is empty: `{program()} jobs` and `{program()} health` list all")


def fail(message: str, status: int = REFUSED) -> NoReturn:
    """End the command with a message on standard error."""
    Console(stderr=True).print(f"{program()}: {message}", style="red", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(status)
