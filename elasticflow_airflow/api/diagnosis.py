"""The findings of a diagnosis: the values of ``GET /v1/doctor`` and of ``elasticflow doctor``.

May import nothing but pydantic, like the rest of this folder.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from elasticflow_airflow.api import Wire

Level = Literal["ok", "warning", "problem"]


class Finding(Wire):
    """The result of one check. ``remedy`` says how to fix a warning or problem."""

    name: str
    level: Level
    message: str
    remedy: str = ""


class Diagnosis(Wire):
    """The service's own findings, and the time by its clock when it answered (``at``, UTC seconds)."""

    at: float
    version: str
    api: str
    findings: list[Finding] = Field(default_factory=list)


def ok(name: str, message: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(name=name, level="ok", message=message)


def warning(name: str, message: str, remedy: str) -> Finding:
    """Return the finding of a check that found something that works, but not as it should."""
    return Finding(name=name, level="warning", message=message, remedy=remedy)


def problem(name: str, message: str, remedy: str) -> Finding:
    """Return the finding of a check that found something that will not work."""
    return Finding(name=name, level="problem", message=message, remedy=remedy)


def plural(number: int, word: str) -> str:
    """Return a number of things as words."""
    return f"{number} {word}{'' if number == 1 else 's'}"
