"""Runs the commands of ``airflow elasticflow``: those of ``elasticflow``, with the service of an Airflow connection.

Imported only when such a command runs.
"""

from __future__ import annotations

import inspect
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from enum import EnumType
from pathlib import Path
from typing import Any, NoReturn, get_args

import typer
from airflow import __version__ as airflow_version
from airflow.sdk.exceptions import AirflowException
from rich.console import Console
from typer.models import OptionInfo

from elasticflow_airflow.cli.connection import BAD_INPUT, Choice, choose
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.client import ElasticFlowError, Endpoint
from elasticflow_airflow.diagnosis import Finding, ok, warning
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.process_context import reading_the_database
from elasticflow_airflow.settings import deferrable_by_default, embedded_state_dir

_PROGRAM = "airflow elasticflow"


def run_command(name: str, given: Namespace) -> None:
    """Run a command with what Airflow's parser made of its arguments; leaves by SystemExit unless all went well."""
    command = commands()[name]
    check_values(name, given)
    if name == "serve":
        given.state_dir = Path(given.state_dir or embedded_state_dir())
        _end(lambda: command(**_arguments(command, given)))
        return
    with reading_the_database(), choose(_choice(given.conn_id)):
        _end(lambda: command(**_arguments(command, given)))


def check_values(name: str, given: Namespace) -> None:
    """Refuse what ``elasticflow`` would: its options say what they take. Leaves by SystemExit with status 2."""
    for argument, parameter in inspect.signature(commands()[name], eval_str=True).parameters.items():
        option, value = parameter.default, getattr(given, argument, None)
        if not isinstance(option, OptionInfo) or value is None:
            continue
        called = f"{next(iter(option.param_decls or ()), f'--{argument}')}={value}"
        for kind in get_args(parameter.annotation):
            if isinstance(kind, EnumType) and value not in (names := list(map(str, kind))):
                refuse(f"{called} is none of {', '.join(names)}")
        if not isinstance(value, int | float):
            continue
        least, most = -math.inf if option.min is None else option.min, math.inf if option.max is None else option.max
        if not math.isfinite(value):
            refuse(f"{called}: it must be a finite number")
        if not least <= value <= most:
            limits = [f"{word} {limit:g}" for word, limit in (("from", least), ("to", most)) if math.isfinite(limit)]
            refuse(f"{called} is not in the range {' '.join(limits)}")


def refuse(message: str) -> NoReturn:
    """Say what cannot be right, and leave with status 2."""
    Console(stderr=True).print(f"{_PROGRAM}: {message}", style="red", highlight=False, soft_wrap=True, markup=False)
    sys.exit(BAD_INPUT)


def commands() -> dict[str, Callable[..., None]]:
    """Every command of ``elasticflow``, by name."""
    found = {}
    for command in app.registered_commands:
        assert command.callback is not None  # Typer registers functions
        found[command.name or command.callback.__name__] = command.callback
    return found


def _arguments(command: Callable[..., None], given: Namespace) -> dict[str, Any]:
    """What the function takes; where the parser has nothing, nothing was given."""
    known: dict[str, Any] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        value = getattr(given, name, None)
        if value is None and str(parameter.annotation).startswith("list["):
            value = []
        elif value is not None and name == "script":
            value = Path(value)
        known[name] = value
    return known


def _end(run: Callable[[], None]) -> None:
    """Say by the exit status how it went, as Typer does."""
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
    hook = ElasticFlowHook(conn_id)

    def locate(start: bool) -> Endpoint:
        try:
            return hook.endpoint(start=start)
        except AirflowException as error:
            raise ElasticFlowError(str(error)) from error

    return Choice(locate=locate, program=_PROGRAM, look=lambda: _look_at_airflow(hook, conn_id))


def _look_at_airflow(hook: ElasticFlowHook, conn_id: str) -> Iterator[Finding]:
    """What only Airflow's side knows."""
    embedded = hook.endpoint(start=False).embedded_state_dir
    if embedded is None:
        yield ok("Airflow", f"Airflow {airflow_version}, connection {conn_id!r}")
    else:
        yield ok("Airflow", f"Airflow {airflow_version}, no address in {conn_id!r}: the embedded service in {embedded}")
    if deferrable_by_default():
        yield _triggerer()


def _triggerer() -> Finding:
    """Whether somebody waits for deferred tasks."""
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
