"""Pages with results name the script that makes each of their tables, and `make bench` runs it just so."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`python (benchmarks/bench_\w+\.py[^`]*)`|<!-- results: (\w+) -->")
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "<!-- results: " in page.read_text())


def results() -> list[tuple[Path, str, str]]:
    """Every marker of a table: its page, its name, and the command that is named last before it."""
    found = []
    for page in PAGES:
        command = ""
        for named, table in NAMED.findall(page.read_text()):
            command = named or command
            if table:
                found.append((page, table, command))
    return found


def run_by_make() -> list[str]:
    """The commands of `make bench`."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    done = subprocess.run([make, "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    listed = re.search(r"for command in (.*?); do", done.stdout)
    assert listed, done.stdout
    return shlex.split(listed[1])


def test_there_are_pages_with_results() -> None:
    assert {"benchmark.md", "calendar.md", "what-a-change-costs.md"} <= {page.name for page in PAGES}


def test_scripts_that_are_named_exist() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"benchmarks/(bench_\w+\.py)", page.read_text()):
            assert (ROOT / "benchmarks" / name).is_file(), f"{page}: {name}"


def test_every_table_is_made_by_the_script_that_is_named_last() -> None:
    for page, table, command in results():
        assert command, f"{page}: {table} comes before any command"
        text = (ROOT / command.split()[0]).read_text()
        assert f'"{table}"' in text, f"{command} does not know {table} of {page}"
        assert '"--page"' in text or "parser_of(" in text, f"{command} cannot put {table} into {page}"


def test_make_bench_runs_the_command_of_every_table() -> None:
    listed = run_by_make()
    for page, table, command in results():
        assert command in listed, f"{page}: {table} is made by {command!r}, which `make bench` does not run"
    for script in (ROOT / "benchmarks").glob("bench_*.py"):
        assert f"benchmarks/{script.name}" in listed


def test_every_table_of_results_has_a_marker() -> None:
    for name in ("benchmark.md", "calendar.md", "what-a-change-costs.md"):
        text = (ROOT / "docs/explanation" / name).read_text()
        for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
            title = section.splitlines()[0]
            if "\n|" in section and title != "Method":
                before = section.split("\n|", 1)[0]
                assert "<!-- results: " in before, f"{name}: the table of {title!r} is written by hand"
