"""The architecture page leads to where things are: every station of its ways, and every class that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

STATION = re.compile(r"^\d\. `(?P<file>[\w/.]+)` \(`(?P<name>\w+)`\)", re.MULTILINE)
CLASS = re.compile(r"^\| `(?P<name>[A-Z]\w+)` \| `(?P<file>[\w/.]+\.py)` \|", re.MULTILINE)


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs/explanation/architecture.md").read_text()


def defined_in(file: Path) -> set[str]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, kinds)}


def test_three_paths_of_at_most_eight_stations(page: str) -> None:
    ways = page.split("## Three paths")[1].split("\n## ")[0].split("\n1. ")[1:]
    assert len(ways) == 3
    for way in ways:
        numbers = [int(number) for number in re.findall(r"^(\d)\. `", f"1. {way}", re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert 5 <= len(numbers) <= 8


def test_stations_and_classes_are_where_the_page_says(page: str) -> None:
    named = [(found["file"], found["name"]) for pattern in (STATION, CLASS) for found in pattern.finditer(page)]
    assert len(named) == 24 + 10
    wrong = [f"{name} is not in {file}" for file, name in named if name not in defined_in(ROOT / file)]
    assert wrong == []
