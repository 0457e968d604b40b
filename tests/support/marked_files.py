"""A run that wants marked tests alone, as ``make system`` does, neither imports nor collects a file without any.

What marks tests is found in a file's text; a run of everything that comes upon a marked test elsewhere ends at once.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

_MARKERS = "airflow|browser|gpu|postgres|ray|slow|soak"
_MARKING = re.compile(rf"\bmark\.({_MARKERS})\b|\b(IN_A_BROWSER|cases import slow|bench|database_url)\b")
"""A marker; or something else that marks: a list of marks, cases, fixtures with parameters that are marked."""


@functools.cache
def has_marked(path: Path) -> bool:
    """Whether there may be a marked test in a file."""
    return _MARKING.search(path.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    wanted: str = config.option.markexpr
    if not wanted or not collection_path.match("test_*.py"):
        return None
    without_any = Expression.compile(wanted).evaluate(lambda _name, /, **_: False)
    return None if without_any or has_marked(collection_path) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = _MARKERS.split("|")
    marked = {item.path for item in items if any(item.get_closest_marker(name) for name in names)}
    if unseen := sorted(str(path) for path in marked if not has_marked(path)):
        raise pytest.UsageError(f"{__name__} must know what marks tests in {', '.join(unseen)}")
