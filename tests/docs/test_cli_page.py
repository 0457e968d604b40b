"""The command line's page names every command."""

from __future__ import annotations

import re
from pathlib import Path

from elasticflow_airflow.cli.main import app

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/cli.md"


def test_every_command_is_described() -> None:
    described = set(re.findall(r"^\| `elasticflow (\w+)", PAGE.read_text(), re.MULTILINE))
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert described == commands
