"""Who may import whom, read from the source: the folders' rules, and no circles between them."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "elasticflow_airflow"
FOLDERS = {
    "scheduler_core": ROOT / "scheduler_core",
    "operators": ROOT / "operators",
    **{
        folder.name: folder
        for folder in sorted((ROOT / PACKAGE).iterdir())
        if (folder / "__init__.py").exists() and not folder.is_symlink()
    },
}
"""All of them, by the names by which they are imported below the package."""

UP = {
    f"{PACKAGE}.{name}" for name in ("airflow_cli", "cli", "operators", "recurring", "task", "testing", "ui", "waiting")
}
"""What only Airflow, people and tests use: no arrow runs back up to it."""
FORBIDDEN = {
    "airflow_cli": {"torch", f"{PACKAGE}.service", f"{PACKAGE}.engines"},
    "api": {"airflow", "torch", "sqlalchemy", "numpy", f"{PACKAGE}.client", f"{PACKAGE}.service", *UP},
    "deadlines": {"torch", "sqlalchemy", f"{PACKAGE}.client", f"{PACKAGE}.service", f"{PACKAGE}.engines", *UP},
    "owners": {"torch", f"{PACKAGE}.service", f"{PACKAGE}.engines"},
    "recurring": {"torch", f"{PACKAGE}.service", f"{PACKAGE}.engines"},
    "task": {"torch", "fastapi", f"{PACKAGE}.service", f"{PACKAGE}.engines", f"{PACKAGE}.operators"},
    "ui": {"torch", f"{PACKAGE}.service", f"{PACKAGE}.engines", f"{PACKAGE}.operators"},
    "waiting": {"torch", "fastapi", f"{PACKAGE}.service", f"{PACKAGE}.engines", f"{PACKAGE}.operators"},
    "scheduler_core": {
        "airflow",
        "torch",
        "sqlalchemy",
        "httpx",
        "fastapi",
        "time",
        "threading",
        "asyncio",
    },
    "operators": {"torch", "sqlalchemy", "fastapi", f"{PACKAGE}.service", f"{PACKAGE}.engines"},
    "client": {"airflow", "torch", "sqlalchemy", f"{PACKAGE}.service", f"{PACKAGE}.engines", *UP},
    "cli": {"airflow", "torch", f"{PACKAGE}.airflow_cli", f"{PACKAGE}.operators", f"{PACKAGE}.ui"},
    "service": {"airflow", "torch", f"{PACKAGE}.client", *UP},
    "engines": {"airflow", "torch", "sqlalchemy", f"{PACKAGE}.service", f"{PACKAGE}.api", f"{PACKAGE}.client", *UP},
    "testing": {"torch"},
    "runtime": {"airflow", "sqlalchemy", "pydantic", "structlog", "httpx", f"{PACKAGE}.service", f"{PACKAGE}.client"},
}
STANDARD_AND = {"scheduler_core": {"numpy", PACKAGE}, "runtime": {"numpy", "torch", PACKAGE}}
OPTIONAL = {
    "remote": {"fsspec"},
    "transformers": {"transformers"},
    "trainer": {"transformers", "accelerate"},
    "plots": {"matplotlib"},
    **{name: {"scipy"} for name in ("clairvoyant", "fluid", "gavel", "leases")},
    "lightning": {"lightning", "pytorch_lightning"},
}
"""What modules of that name, or that begin with it, import besides: they are for those alone who use that."""

MEASURES = {ROOT / "scheduler_core/simulator/bound/clairvoyant.py", ROOT / "scheduler_core/simulator/run.py"}
"""They say how long they took, and decide nothing by it but when to give up: they may import ``time``."""

SIMULATOR = f"{PACKAGE}.scheduler_core.simulator"
COMPARED = (f"{SIMULATOR}.baselines", f"{SIMULATOR}.bound")
"""What our scheduler is compared with: the literature's policies, and the bound that no schedule can beat."""
SIMULATOR_FOLDER = ROOT / "scheduler_core" / "simulator"
COMPARING_COMMANDS = {ROOT / PACKAGE / "cli/simulator" / name for name in ("simulate.py", "display.py")}
"""The commands ``simulate`` and ``compare``."""


MOST_FILES = 14
ONCE_HERE = "Old location of "
"""So says a file that only leads on from where a module was in an earlier release."""


@cache
def imports_of(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files_of(folder: str) -> list[Path]:
    files = sorted(FOLDERS[folder].rglob("*.py"))
    assert files, f"{folder} has no modules"
    return files


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_a_folder_does_not_know_what_it_may_not_know(folder: str) -> None:
    for file in files_of(folder):
        for name in imports_of(file):
            for forbidden in FORBIDDEN[folder] - ({"time"} if file in MEASURES else set()):
                assert not (name + ".").startswith(forbidden + "."), f"{file} imports {name}"


@pytest.mark.parametrize("folder", sorted(STANDARD_AND))
def test_a_folder_needs_little(folder: str) -> None:
    for file in files_of(folder):
        outside = {name.split(".")[0] for name in imports_of(file)} - set(sys.stdlib_module_names)
        more = outside - STANDARD_AND[folder] - OPTIONAL.get(file.stem.split("_")[0], set())
        assert not more, f"{file} imports {more}"


def test_every_folder_has_its_rule() -> None:
    assert FORBIDDEN.keys() == FOLDERS.keys(), "say in FORBIDDEN what the new one may not know"


def test_what_our_scheduler_is_compared_with_is_known_to_the_simulator_alone() -> None:
    product = [*files_of("scheduler_core"), *files_of("operators"), *(ROOT / PACKAGE).rglob("*.py")]
    for file in {file.resolve() for file in [*product, *(ROOT / "dags").rglob("*.py")]}:
        if file.is_relative_to(SIMULATOR_FOLDER) or file in COMPARING_COMMANDS:
            continue
        for name in imports_of(file):
            assert not name.startswith(COMPARED), f"{file} imports {name}"


@pytest.mark.parametrize("folder", sorted({*FOLDERS} - {"scheduler_core", "cli"}))
def test_only_commands_play_the_simulator(folder: str) -> None:
    for file in files_of(folder):
        for name in imports_of(file):
            assert not (name + ".").startswith(SIMULATOR + "."), f"{file} imports {name}"


def test_the_scheduler_does_not_know_its_simulator() -> None:
    for file in files_of("scheduler_core"):
        if not file.is_relative_to(SIMULATOR_FOLDER):
            for name in imports_of(file):
                assert not (name + ".").startswith(SIMULATOR + "."), f"{file} imports {name}"


def test_the_service_loads_one_scheduler() -> None:
    """Whatever of it is imported: no policy of the literature, no bound, no simulator comes with it."""
    modules = [
        module_of(file) for file in files_of("service") if "migrations" not in file.parts and file.stem[0] != "_"
    ]
    assert f"{PACKAGE}.service.loop.reconcile" in modules
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
import {PACKAGE}.service.__main__
print([name for name in sys.modules if name.startswith({SIMULATOR!r})])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def module_of(file: Path) -> str:
    """The name by which a file is imported; a package's own is that of its folder."""
    below = file.relative_to(ROOT)
    parts = below.with_suffix("").parts if below.parts[0] == PACKAGE else (PACKAGE, *below.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def arrows_between_modules() -> dict[str, set[str]]:
    """Who imports whom, also where it is for types alone, or late."""
    files = {module_of(file): file for folder in FOLDERS for file in files_of(folder)}
    files |= {module_of(file): file for file in (ROOT / PACKAGE).glob("*.py")}
    arrows: dict[str, set[str]] = {module: set() for module in files}
    for module, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                arrows[module] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in files:
                named = {f"{node.module}.{alias.name}" for alias in node.names}
                arrows[module] |= (named & files.keys()) | ({node.module} if named - files.keys() else set())
        arrows[module].discard(module)  # As a program imports itself, to be there under its name, too.
    return arrows


def circle_in(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of the arrows when everything is taken away that leads to nothing any more."""
    left = {name: set(targets) for name, targets in arrows.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return {name: targets & left.keys() for name, targets in left.items()}


def test_modules_make_no_circle() -> None:
    arrows = arrows_between_modules()
    assert len(arrows) > 300
    # The package itself has the version, and imports the rest only when it is asked for more.
    assert circle_in({name: targets for name, targets in arrows.items() if name != PACKAGE}) == {}


def test_folders_that_stand_side_by_side_make_no_circle() -> None:
    arrows = arrows_between_modules()
    folders = {module_of(file.parent / "__init__.py") for folder in FOLDERS for file in files_of(folder)}
    for parent in {folder.rpartition(".")[0] for folder in folders}:
        inside = [folder for folder in folders if folder.rpartition(".")[0] == parent]
        between = {
            one: {
                other
                for module, targets in arrows.items()
                if f"{module}.".startswith(f"{one}.")
                for other in inside
                if other != one and any(f"{target}.".startswith(f"{other}.") for target in targets)
            }
            for one in inside
        }
        assert circle_in(between) == {}, f"below {parent}"


def test_no_folder_is_a_drawer() -> None:
    """About a dozen files stand in one: who opens it sees which to open next."""
    for folder in FOLDERS:
        for parent in {file.parent for file in files_of(folder)}:
            if "versions" not in parent.parts:
                files = [file for file in parent.glob("*.py") if file.name != "__init__.py"]
                names = [file.name for file in files if ONCE_HERE not in file.read_text()]
                assert len(names) <= MOST_FILES, f"{parent} has {len(names)} files"


def test_importing_the_package_is_free() -> None:
    program = (
        "import sys, elasticflow_airflow; "
        "print([m for m in ('torch', 'airflow', 'sqlalchemy', 'pydantic', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_service_runs_where_there_is_no_airflow_and_no_torch() -> None:
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("airflow", "torch", "ray"):
            raise ImportError(name + " is not there")
sys.meta_path.insert(0, Refuse())
import elasticflow_airflow.service.__main__, elasticflow_airflow.cli.main, elasticflow_airflow.engines.local
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_project_speaks_of_itself_alone() -> None:
    """No path of a machine and no registry's address in anything that is committed."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        file = ROOT / name
        if file.is_symlink() or file == Path(__file__):
            continue
        text = file.read_text(errors="replace")
        for word in ("--index-url", "--extra-index-url", "--find-links /", "file:///", "/root/", "/home/"):
            assert word not in text, f"{name} contains {word}"
