"""The reference says what the code says: arguments, settings, variables, commands with their options, routes."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
CONFIGURATION = (REFERENCE / "configuration.md").read_text()

INTERNAL = {
    *("SESSION", "WORKER", "GENERATION", "TRAINER_FILE", "CORES", "PARENT_PID", "WORLD", "ADDRESS"),
    *("CRASH_AT", "CRASH_LOG"),
}
"""By these the parts of a job find each other, and tests let the service break: nobody sets them by hand."""


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generate: ModuleType) -> None:
    assert generate.outdated() == [], "write them anew with `make reference`"


def test_every_argument_has_its_row(generate: ModuleType) -> None:
    for page, classes in generate.CLASSES.items():
        text = (REFERENCE / page).read_text()
        rows = re.findall(r"^\| `(\w+)`( \*\*T\*\*)? \| (`[^|]+`) \|([^|]*)\| (.+) \|$", text, re.MULTILINE)
        described = {name: bool(mark) for name, mark, *_ in rows}
        for file, name in classes:
            arguments, templates = generate.arguments_of(file, name)
            assert arguments
            missing = [argument for argument in arguments if argument not in described]
            assert missing == [], f"docs/reference/{page} lacks: {missing}; write | `name` | | default | meaning |"
            assert [argument for argument in arguments if described[argument] != (argument in templates)] == []


def test_every_setting_of_the_service_has_its_default() -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    table: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`ELASTICFLOW_[^|]+) \| ([^|]*) \| ", CONFIGURATION, re.MULTILINE):
        named = re.findall(r"`ELASTICFLOW_([A-Z_]+)`", names)
        parts = [part.strip().strip("`") for part in default.split(", ")]
        table |= dict(zip(named, parts if len(parts) == len(named) else [default] * len(named), strict=True))
    wrong = {}
    for name, field in ServiceSettings.model_fields.items():
        said = table.get(name.upper())
        if field.default is None or field.default_factory is not None:
            continue
        if said != shown(field.default):
            wrong[f"ELASTICFLOW_{name.upper()}"] = f"the page says {said!r}, the code {shown(field.default)!r}"
    assert wrong == {}


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value // 2**20} MiB"
    if isinstance(value, float):
        return f"{value:.2f}" if 0 < value < 1 and len(f"{value:g}") < 4 else f"{value:g}"
    return str(value)


def test_every_extra_is_described() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs/how-to/install.md").read_text()
    rows = "".join(re.findall(r"^\| (`\[.*?) \|", page, re.MULTILINE))
    assert set(re.findall(r"`\[(\w+)\]`", rows)) == set(extras)


def test_every_variable_that_the_code_names_is_described() -> None:
    sources = [
        file for folder in ("elasticflow_airflow", "scheduler_core", "operators") for file in python_files(folder)
    ]
    named = {name for file in sources for name in re.findall(r"[\"'`]ELASTICFLOW_([A-Z_]+)[\"'`=]", file.read_text())}
    assert "STATE_DIR" in named
    described = set(re.findall(r"`ELASTICFLOW_([A-Z_]+)`", CONFIGURATION))
    assert named - described - INTERNAL == set()


def python_files(folder: str) -> list[Path]:
    return [file for file in (ROOT / folder).rglob("*.py") if "__pycache__" not in file.parts]


def test_every_option_of_help_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from elasticflow_airflow.cli.main import app

    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")
    page = (REFERENCE / "cli.md").read_text()
    sections = dict(
        re.findall(r"^### `elasticflow ([\w-]+)[^\n]*\n(.*?)(?=^### |^<!-- end)", page, re.DOTALL | re.MULTILINE)
    )
    runner = CliRunner()
    commands = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    for command in commands:
        helped = runner.invoke(app, [command, "--help"])
        assert helped.exit_code == 0, helped.output
        options = set(re.findall(r"(?<![\w`-])--[a-z][a-z-]+", helped.output)) - {"--help"}
        assert {option for option in options if option not in sections[command]} == set(), command


def test_every_route_is_described_and_asks_for_the_token() -> None:
    from elasticflow_airflow.service.http.openapi import document

    made = document()
    operations = {
        f"{method} {path}": operation for path, found in made["paths"].items() for method, operation in found.items()
    }
    assert [name for name, operation in operations.items() if not operation.get("description")] == []
    is_open = [name for name, operation in operations.items() if operation.get("security") == []]
    assert is_open == ["get /healthz", "get /readyz"]
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(ids) == len(set(ids))
    problem = {"$ref": "#/components/schemas/Problem"}
    for name, operation in operations.items():
        refusals = {status: answer for status, answer in operation["responses"].items() if status >= "400"}
        assert name in is_open or {"401", "500", "503"} <= refusals.keys()
        assert {"400", "408", "431"} <= refusals.keys(), "what a connection may cost holds for all"
        for refusal in refusals.values():
            said = made["components"]["responses"][refusal["$ref"].rpartition("/")[2]]
            assert said["content"]["application/json"]["schema"] == problem
    references = set(re.findall(r"'#/components/schemas/(\w+)'", str(made)))
    assert references <= set(made["components"]["schemas"])
    nothing_else = [c for c in ("HTTPValidationError", "ValidationError") if c in references]
    assert nothing_else == [], "errors are Problems"
