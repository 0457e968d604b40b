"""Cases of a test."""

from __future__ import annotations

import pytest


def slow(*values: object) -> list[object]:
    """Return cases that ``make system`` tests, nearly equal to one that is always tested."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
