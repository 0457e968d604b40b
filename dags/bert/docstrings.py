"""Real text that is on every machine: the docstrings of a few well-known packages.

The training task: which package is a docstring from? The packages come with our own dependencies, so nothing is
downloaded. Packages' names and other tell-tales are taken out of the text. A module is either in the test split, the
same one on every day, or in the training slice of one day of the week's rotation; never in two of them.

Needs the standard library only, and never imports the packages it reads.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

PACKAGES = ("airflow", "networkx", "scipy", "sklearn", "sympy", "torch")
"""The classes; the label of a text is the index of its package here."""
ROTATION_DAYS = 3
"""A training module turns up every so many days."""
TEST_SHARE = 5
"""One module in so many belongs to the test split."""
ROWS_PER_MODULE = 12
"""At most so many docstrings of one module, so that no large file decides what a package sounds like."""
SHORTEST, LONGEST = 60, 400
"""Characters of a text: shorter ones say nothing, of longer ones the beginning is taken."""

_TELL_TALES = re.compile(
    r"\S*(?:airflow|apache|networkx|\bnx\b|sklearn|scikit|scipy|sympy|(?:py)?torch|aten\b|\bdags?\b|sql|"
    r"versionadded|versionchanged|deprecated|https?:|>>>)\S*",
    re.IGNORECASE,
)
_MARKUP = re.compile(r":[a-z:]+:(?=`)|^\s*\.\. .*$|[`*~|\\]+|[-=_^#]{3,}", re.MULTILINE)
_EXAMPLE = re.compile(r"^\s*(?:>>>|\.\.\. |In \[).*$", re.MULTILINE)
_SKIPPED_FOLDERS = frozenset({"tests", "test", "testing", "benchmarks", "example_dags", "_vendor", "migrations"})
_LARGEST_SOURCE_BYTES = 400_000


@dataclass(frozen=True, slots=True)
class Row:
    """One text, the package it is from (``PACKAGES[label]``), and the module that holds it."""

    text: str
    label: int
    module: str


@dataclass(frozen=True, slots=True)
class Extract:
    """What one day has to train on, and what every day is tested on."""

    train: tuple[Row, ...]
    test: tuple[Row, ...]


def extract(day: date, *, train_rows: int, test_rows: int) -> Extract:
    """Collect the day's texts: ``train_rows`` and ``test_rows`` in all, the same number from each package.

    The same day, packages and sizes always give the same rows in the same order.
    Raises ValueError when a package is missing, or has too little text.
    """
    test = _collect(test_rows, lambda fate: fate % TEST_SHARE == 0, seed="test")
    seen = frozenset(row.text for row in test)
    turn = day.toordinal() % ROTATION_DAYS
    train = _collect(
        train_rows,
        lambda fate: fate % TEST_SHARE != 0 and fate // TEST_SHARE % ROTATION_DAYS == turn,
        seed=day.isoformat(),
        seen=seen,
    )
    return Extract(train=train, test=test)


def clean(docstring: str) -> str:
    """Plain text of a docstring's beginning: no examples, no markup, no word that names one of the packages."""
    text = _EXAMPLE.sub(" ", docstring)
    text = _MARKUP.sub(" ", text)
    text = _TELL_TALES.sub(" ", text)
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0]


def write(rows: Iterable[Row], path: Path) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read(path: Path) -> list[Row]:
    """Read what :func:`write` wrote."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def _collect(
    rows: int, belongs: Callable[[int], bool], *, seed: str, seen: frozenset[str] = frozenset()
) -> tuple[Row, ...]:
    per_package = rows // len(PACKAGES)
    taken: list[Row] = []
    used = set(seen)
    for label, package in enumerate(PACKAGES):
        mine: list[Row] = []
        modules = [(name, path) for name, path in _modules(package) if belongs(_number(name))]
        modules.sort(key=lambda module: _number(seed + module[0]))
        for name, path in modules:
            if len(mine) >= per_package:
                break
            fresh = [text for text in _texts(path) if text not in used]
            fresh.sort(key=lambda text: _number(seed + text))
            mine += [Row(text, label, name) for text in fresh[:ROWS_PER_MODULE]]
            used.update(fresh)
        if len(mine) < per_package:
            raise ValueError(f"{package} has only {len(mine)} docstrings for this slice, {per_package} were asked for")
        taken += mine[:per_package]
    taken.sort(key=lambda row: _number(seed + row.text))
    return tuple(taken)


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Names and files of a package's modules, in no particular order; finding them imports nothing."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the package {package} is not installed here; install the extra [demo]")
    for location in spec.submodule_search_locations:
        for path in Path(location).rglob("*.py"):
            parts = path.relative_to(location).with_suffix("").parts
            if not _SKIPPED_FOLDERS.intersection(parts[:-1]) and path.stat().st_size <= _LARGEST_SOURCE_BYTES:
                yield ".".join((package, *parts)), path


def _texts(path: Path) -> list[str]:
    """The cleaned docstrings of one source file, each once."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # a template or a file for another Python
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    texts = (clean(docstring) for docstring in docstrings if docstring and "Licensed to the Apache" not in docstring)
    return list(dict.fromkeys(text for text in texts if len(text) >= SHORTEST))


def _number(text: str) -> int:
    """Draw a number that is the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
