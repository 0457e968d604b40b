"""The names that users, Airflow's database and running processes know go on working, wherever the code moves.

``public_names.json`` has them as they once were published: import paths of the documentation, the runtime's names,
class paths that Airflow stores, entry points, and what is run by ``python -m``. Names are added to it; taking one away
breaks somebody's DAGs, deferred tasks, or workers: these find the package through a link that an upgrade turns to the
new one, so what they import late in their lives comes from there.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

NAMES: dict[str, Any] = json.loads(Path(__file__).with_name("public_names.json").read_text())
TARGETS = {target for group in NAMES["entry_points"].values() for target in group.values()}
GROUPS = ("documented", "runtime", "stored_by_airflow", "imported_late_by_running_workers")
IMPORTED = sorted(TARGETS.union(*(NAMES[group] for group in GROUPS)))
OPTIONAL = {"lightning": "runtime.lightning", "transformers": "runtime.transformers", "torch": "runtime"}
"""Libraries without which some names cannot be imported, by what is in their modules' names."""
ASKED_FOR_HELP = ("elasticflow_airflow.runtime.consistency_check", "elasticflow_airflow.service")

LOOK_UP = """
import importlib, json, sys
from functools import reduce

def found(name):
    module, _, path = name.partition(":")
    return reduce(getattr, filter(None, path.split(".")), importlib.import_module(module))

def problem(name):
    '''Why a name does not do; None: it does, and where it is defined it is the same object.'''
    try:
        one = found(name)
        if hasattr(one, "__qualname__") and getattr(one, "__module__", "").startswith("elasticflow_airflow"):
            if found(f"{one.__module__}:{one.__qualname__}") is not one:
                return f"{one.__module__} has another one"
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
"""
EACH = f"{LOOK_UP}\nprint(json.dumps({{name: problem(name) for name in json.load(sys.stdin)}}))"
STORED = f"""{LOOK_UP}
given, told = json.load(sys.stdin), {{}}
for name, arguments in given["trigger_arguments"].items():
    made = found(name)(**arguments)
    path, again = made.serialize()
    module, _, attribute = path.rpartition(".")
    assert found(f"{{module}}:{{attribute}}") is type(made), path
    told[name] = again
policy = found("elasticflow_airflow.retry_policies:ElasticFlowRetryPolicy")
link = found("elasticflow_airflow.links:ElasticFlowJobLink")()
told["link"] = {{"name": link.name, "xcom_key": link.xcom_key}}
told["retry_policy"] = policy.deserialize(given["retry_policy"]).serialize()
print(json.dumps(told))
"""


def run(program: str, given: object, home: Path) -> Any:
    """Run a program in a process of its own: Airflow makes a home where it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(given),
        env={**environment, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory, root: Path) -> dict[str, str | None]:
    """Of all names, looked up in one process: most of the time goes into importing Airflow and torch."""
    found: dict[str, str | None] = run(EACH, sorted({*IMPORTED, *of_the_pages(root)}), tmp_path_factory.mktemp("home"))
    return found


def of_the_pages(root: Path) -> set[str]:
    """What the README, the pages and their examples import today."""
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    code = [b for page in pages for b in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.M)]
    code += [
        file.read_text() for folder in ("docs/examples", "dags", "examples") for file in (root / folder).rglob("*.py")
    ]
    imports = [node for text in code for node in ast.walk(ast.parse(textwrap.dedent(text)))]
    return {
        f"{node.module}:{alias.name}"
        for node in imports
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "elasticflow_airflow"
        for alias in node.names
    }


def skip_without(library: str) -> None:
    """Without importing it here, which takes seconds."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}: pip install elasticflow-airflow[{library}]")


@pytest.mark.parametrize("name", IMPORTED)
def test_a_published_name_is_there(name: str, problems: dict[str, str | None]) -> None:
    for library, where in OPTIONAL.items():
        if f".{where}" in name:
            skip_without(library)
    assert problems[name] is None


def test_whatever_the_pages_import_is_published(root: Path, problems: dict[str, str | None]) -> None:
    pages = of_the_pages(root)
    assert len(pages) > 20
    assert {name: problems[name] for name in pages if problems[name] is not None} == {}
    assert pages <= set(IMPORTED), "add to public_names.json what users are told to import"


MOVES = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
from elasticflow_airflow.moved import MOVED
skipped = json.load(sys.stdin)
def same(old, now):
    if any(now.endswith(name) for name in skipped):
        return True
    there = importlib.import_module(f"elasticflow_airflow.{now}")
    return importlib.import_module(f"elasticflow_airflow.{old}") is there
print(json.dumps([old for old, now in MOVED.items() if not same(old, now)]))
"""


def test_a_module_that_has_moved_is_the_same_by_both_paths(tmp_path: Path) -> None:
    optional = {"lightning": ["lightning_notes", "lightning_limits"], "transformers": ["trainer_progress"]}
    missing = [name for library, names in optional.items() if find_spec(library) is None for name in names]
    assert run(MOVES, missing, tmp_path) == []


def test_what_airflow_has_stored_is_read(tmp_path: Path) -> None:
    stored = {name: NAMES[name] for name in ("trigger_arguments", "retry_policy", "link")}
    told = run(STORED, stored, tmp_path)
    assert told.pop("retry_policy") == stored["retry_policy"]
    assert told.pop("link") == stored["link"]
    for name, arguments in stored["trigger_arguments"].items():
        assert told[name].items() >= arguments.items()


def test_providers_classes_are_published(root: Path) -> None:
    """The paths that Airflow takes from the provider's description and its registry file."""
    from elasticflow_airflow import get_provider_info

    described = json.dumps(get_provider_info()) + (root / ".airflow-registry.yaml").read_text()
    paths = set(re.findall(r"elasticflow_airflow(?:\.\w+)+\.\w*[A-Z]\w+", described))
    assert len(paths) > 5
    assert {":".join(path.rsplit(".", 1)) for path in paths} <= set(NAMES["stored_by_airflow"])


def test_entry_points(root: Path) -> None:
    """What they lead to may move; where it was before is among the names above, and goes on working."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    now = {**project["entry-points"], "console_scripts": project["scripts"]}
    for group, names in NAMES["entry_points"].items():
        assert now[group].keys() >= names.keys()


@pytest.mark.parametrize("module", NAMES["run_by_python_m"])
def test_a_module_that_is_run_does_something(module: str, tmp_path: Path) -> None:
    """Without what it needs it complains; one that nobody runs any more would end without a word."""
    arguments = ["--help"] if module in ASKED_FOR_HELP else []
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "No module named" not in done.stderr
    assert "cannot be directly executed" not in done.stderr
    assert done.stdout or done.returncode, "it ends without having done anything"
