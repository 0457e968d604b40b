"""The commands of ``airflow elasticflow``, for Airflow's parser.

Airflow imports this module at every ``airflow`` command, so it imports nothing else, and reads names and options from
``commands.json``. ``make reference`` generates that file from the commands themselves (``argparse_bridge.py``), and a
test checks that it is current. The code of a command is imported when it runs (``commands.py``).
"""

from __future__ import annotations

import json
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow.cli.cli_config import ActionCommand, Arg, GroupCommand

DESCRIPTION = Path(__file__).with_name("commands.json")
_OBJECTS: dict[str, Any] = {"int": int, "float": float, "path": Path, "on_or_off": BooleanOptionalAction}
"""Types and actions that the description refers to by name; argparse itself knows ``store_true`` and ``append``."""


def get_commands() -> list[GroupCommand]:
    """Return the group of commands, for Airflow's command line."""
    group = json.loads(DESCRIPTION.read_text(encoding="utf-8"))
    return [GroupCommand(name=group["name"], help=group["help"], subcommands=tuple(map(_command, group["commands"])))]


def _command(described: dict[str, Any]) -> ActionCommand:
    name = described["name"]
    arguments = tuple(map(_argument, described["args"]))
    return ActionCommand(name, described["help"], _runner(name), arguments, description=described["description"])


def _runner(name: str) -> Callable[[Namespace], None]:
    def run(given: Namespace) -> None:
        from elasticflow_airflow.airflow_cli.commands import run_command

        run_command(name, given)

    run.__name__ = name
    return run


def _argument(described: dict[str, Any]) -> Arg:
    named = {key: _OBJECTS.get(described[key], described[key]) for key in ("type", "action") if key in described}
    return Arg(**(described | named))  # type: ignore[no-untyped-call]  # Airflow has no types here
