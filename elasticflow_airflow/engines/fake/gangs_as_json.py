"""Conversion of modelled gangs to JSON and back, for the state file of a modelled world; without secrets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake.gang import FakeGang
from elasticflow_airflow.engines.port import GangOutcome, GangSpec
from elasticflow_airflow.runtime.protocol import Report, RescaleMode, SessionConfig
from elasticflow_airflow.scheduler_core.model.values import Slot


def fields_to_json(gang: FakeGang) -> dict[str, Any]:
    """Return all fields except the specification and the reports as JSON values (infinite times become null)."""
    raw = {f.name: getattr(gang, f.name) for f in fields(gang) if f.name not in ("spec", "reports", "behaviour")}
    raw["behaviour"] = asdict(gang.behaviour)
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in raw.items()}


def spec_to_json(spec: GangSpec) -> dict[str, Any]:
    """Return a specification as JSON values, without its secrets."""
    return {**asdict(spec), "secret_env": {}}


def report_lines(reports: Iterable[Report]) -> list[str]:
    """Return each report as a line."""
    return [report.to_line().decode() for report in reports]


def gang_from_json(raw: Mapping[str, Any]) -> FakeGang:
    """Build a gang from its fields, which include its specification and the lines of its reports."""
    values = dict(raw)
    for name in ("phase_ends_s", "next_report_s", "next_checkpoint_s", "lease_ends_s"):
        values[name] = math.inf if values[name] is None else values[name]
    spec = dict(values["spec"])
    session = dict(spec["session"])
    session["args"] = tuple(session["args"])
    spec["session"] = SessionConfig(**session)
    spec["placement"] = tuple(Slot(*slot) for slot in spec["placement"])
    spec["mode"] = RescaleMode(spec["mode"])
    spec["lost"] = tuple(spec.get("lost", ()))
    values["spec"] = GangSpec(**spec)
    values["behaviour"] = FakeBehaviour(**values["behaviour"])
    values["outcome"] = GangOutcome(values["outcome"]) if values["outcome"] else None
    values["reports"] = [Report.from_line(line.encode()) for line in values["reports"]]
    return FakeGang(**values)
