"""What a doctor finds: the values of ``GET /v1/doctor`` and of ``elasticflow doctor``.

May import nothing but pydantic, like the rest of this folder.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from elasticflow_airflow.api import Wire

Level = Literal["ok", "warning", "problem"]


class Finding(Wire):
    """One thing that was looked at. ``remedy`` says what to do where it is not well."""

    name: str
    level: Level
    message: str
    remedy: str = ""


class Diagnosis(Wire):
    """The service's own findings, and the time of its clock when it answered (UTC seconds)."""

    at: float
    version: str
    api: str
    findings: list[Finding] = Field(default_factory=list)


def ok(name: str, message: str) -> Finding:
    """All is well."""
    return Finding(name=name, level="ok", message=message)


def warning(name: str, message: str, remedy: str) -> Finding:
    """It works, but not as it should."""
    return Finding(name=name, level="warning", message=message, remedy=remedy)


def problem(name: str, message: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(name=name, level="problem", message=message, remedy=remedy)
