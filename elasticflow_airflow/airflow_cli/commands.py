"""The commands of ``airflow elasticflow``: those of ``elasticflow``, with the service of an Airflow connection.

Imported only when such a command runs. Airflow itself is imported inside the functions that need it, so that the
commands can be described without it.
"""

from __future__ import annotations

import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import EnumType
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import typer
from rich.console import Console
from typer.models import OptionInfo
from typer.utils import get_params_from_function

from elasticflow_airflow.airflow_cli.feed import feed
from elasticflow_airflow.airflow_cli.forecast import forecast
from elasticflow_airflow.airflow_cli.process_context import reading_the_database
from elasticflow_airflow.api.diagnosis import Finding, ok, warning
from elasticflow_airflow.cli.connection import BAD_INPUT, Choice, choose
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.cli.terminal.signatures import described_as
from elasticflow_airflow.client import ElasticFlowError, Endpoint

if TYPE_CHECKING:
    from elasticflow_airflow.hooks import ElasticFlowHook

SUMMARY = "Training jobs with deadlines: see what the scheduler does and why, and look for what is wrong"
_PROGRAM = "airflow elasticflow"
_ConnId = typer.Option(
    "elasticflow_default",
    "--conn-id",
    help="Airflow connection that names the service. Where the default one is not defined: the embedded service.",
)
_StateDir = typer.Option(
    None, "--state-dir", help="Where everything lives; default: state_dir of Airflow's section elasticflow."
)


def run_command(name: str, given: Namespace) -> None:
    """Run a command with the arguments from Airflow's parser; raises SystemExit unless it succeeds."""
    command = commands()[name]
    check_values(command, given)
    _end(lambda: command(**_arguments(command, given)))


def commands() -> dict[str, Callable[..., None]]:
    """Return every command by name: those of ``elasticflow`` that use a service, and those that use Airflow."""
    found: dict[str, Callable[..., None]] = {}
    for registered in app.registered_commands:
        command = registered.callback
        assert command is not None  # Typer registers functions
        parameters = inspect.signature(command).parameters
        if "url" in parameters:
            found[registered.name or command.__name__] = _with_connection(command)
        elif "state_dir" in parameters:
            found[registered.name or command.__name__] = _with_state_dir(command)
    return found | {"forecast": forecast, "feed": feed}


def _with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an Airflow connection as an option in place of the service's address."""

    def run(*, conn_id: str, **given: Any) -> None:
        with reading_the_database(), choose(_choice(conn_id)):
            command(url=None, state_dir=None, **given)

    return _with_options(command, run, url=None, state_dir=None, conn_id=_ConnId)


def _with_state_dir(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the state directory of Airflow's configuration as the default."""

    def run(*, state_dir: Path | None, **given: Any) -> None:
        from elasticflow_airflow.settings import embedded_state_dir

        command(state_dir=state_dir or embedded_state_dir(), **given)

    return _with_options(command, run, state_dir=_StateDir)


def _with_options(
    command: Callable[..., None], run: Callable[..., None], **options: OptionInfo | None
) -> Callable[..., None]:
    """Give ``run`` the command's signature with ``options`` replaced, and without those that are None."""
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    for name, option in options.items():
        before = parameters.pop(name, None)
        if option is not None:
            kind = str if before is None else before.annotation
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters[name] = inspect.Parameter(name, keyword, default=option, annotation=kind)
    return described_as(command, run, parameters.values())


def check_values(command: Callable[..., None], given: Namespace) -> None:
    """Refuse values that ``elasticflow`` would refuse, by its options' limits. Raises SystemExit with status 2."""
    for parameter in get_params_from_function(command).values():
        option, value = parameter.default, getattr(given, parameter.name, None)
        if not isinstance(option, OptionInfo) or value is None:
            continue
        called = f"{next(iter(option.param_decls or ()), f'--{parameter.name}')}={value}"
        for kind in get_args(parameter.annotation):
            if isinstance(kind, EnumType) and value not in (names := list(map(str, kind))):
                refuse(f"{called} is none of {', '.join(names)}")
        if not isinstance(value, int | float):
            continue
        least, most = -math.inf if option.min is None else option.min, math.inf if option.max is None else option.max
        if not (math.isfinite(value) and least <= value <= most):
            wanted = [] if math.isfinite(value) else ["a finite number"]
            limits = [f"{word} {limit:g}" for word, limit in (("from", least), ("to", most)) if math.isfinite(limit)]
            if limits:
                wanted.append(f"in the range {' '.join(limits)}")
            refuse(f"{called} is not {' '.join(wanted)}")


def refuse(message: str) -> NoReturn:
    """Print a message on invalid input, and exit with status 2."""
    Console(stderr=True).print(f"{_PROGRAM}: {message}", style="red", highlight=False, soft_wrap=True, markup=False)
    sys.exit(BAD_INPUT)


def _arguments(command: Callable[..., None], given: Namespace) -> dict[str, Any]:
    """Return the function's arguments from the parsed values; None or an empty list for those not given."""
    known: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        value = getattr(given, name, None)
        known[name] = [] if value is None and str(parameter.annotation).startswith("list[") else value
    return known


def _end(run: Callable[[], None]) -> None:
    """Run a command and map its Typer exceptions to exit statuses, as Typer does."""
    try:
        run()
    except typer.Exit as left:
        if left.exit_code:
            sys.exit(left.exit_code)
    except typer.BadParameter as wrong:
        refuse(wrong.message)
    except typer.Abort:
        sys.exit(1)


def _choice(conn_id: str) -> Choice:
    from airflow.sdk.exceptions import AirflowException

    from elasticflow_airflow.hooks import ElasticFlowHook

    hook = ElasticFlowHook(conn_id)

    def locate(start: bool) -> Endpoint:
        try:
            return hook.endpoint(start=start)
        except AirflowException as error:
            raise ElasticFlowError(str(error)) from error

    return Choice(locate=locate, program=_PROGRAM, look=lambda: _look_at_airflow(hook, conn_id))


def _look_at_airflow(hook: ElasticFlowHook, conn_id: str) -> Iterator[Finding]:
    """Yield the findings that only the Airflow side can make."""
    from airflow import __version__ as airflow_version

    from elasticflow_airflow.settings import deferrable_by_default

    embedded = hook.endpoint(start=False).embedded_state_dir
    if embedded is None:
        yield ok("Airflow", f"Airflow {airflow_version}, connection {conn_id!r}")
    else:
        yield ok("Airflow", f"Airflow {airflow_version}, no address in {conn_id!r}: the embedded service in {embedded}")
    if deferrable_by_default():
        yield _triggerer()


def _triggerer() -> Finding:
    """Check that a triggerer runs."""
    from airflow.jobs.job import most_recent_job
    from airflow.utils.session import create_session
    from sqlalchemy.exc import SQLAlchemyError

    remedy = "start one with `airflow triggerer`, or set [elasticflow] deferrable = False"
    try:
        with create_session() as session:
            job = most_recent_job("TriggererJob", session=session)
            alive = job is not None and job.is_alive()
    except SQLAlchemyError as error:
        return warning("triggerer", f"whether one runs cannot be told: {error}", "run this where the database is")
    if not alive:
        return warning("triggerer", "no triggerer runs: training tasks that wait there wait for ever", remedy)
    return ok("triggerer", "a triggerer runs")
