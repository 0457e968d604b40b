"""Modelled gangs as JSON and back: what the state file of a modelled world holds, without secrets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from elasticflow_airflow.engines.fake_behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake_gang import FakeGang
from elasticflow_airflow.engines.port import GangOutcome, GangSpec
from elasticflow_airflow.runtime.protocol import Report, RescaleMode, SessionConfig
from elasticflow_airflow.scheduler_core.values import Slot


def gang_to_json(gang: FakeGang) -> dict[str, Any]:
    """Everything but the secrets, as JSON values (infinite times become null)."""
    raw = asdict(replace(gang, reports=[]))
    raw["spec"]["secret_env"] = {}
    raw["reports"] = [report.to_line().decode() for report in gang.reports]
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in raw.items()}


def gang_from_json(raw: Mapping[str, Any]) -> FakeGang:
    """Inverse of :func:`gang_to_json`."""
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
