"""The state file of a modelled world: a journal with one line per change of a gang.

In a world of hundreds of gangs, a change of one gang costs one line instead of a rewrite of all gangs. The file is
compacted from time to time. It survives the process, but not a machine crash: the world is only a model. It holds no
secrets.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake.gang import FakeGang
from elasticflow_airflow.engines.port import GangOutcome, GangSpec
from elasticflow_airflow.runtime.protocol import Report, RescaleMode, SessionConfig
from elasticflow_airflow.scheduler_core.model.values import Slot

_LINES_A_GANG = 20
_LEAST_LINES = 1000

Key = tuple[str, int]
"""Job id and generation."""


@dataclass(slots=True)
class _Written:
    """What the file holds of a gang: its last mark, its number of reports, and its specification."""

    mark: object
    reports: int
    spec: GangSpec
    spec_json: dict[str, Any]


@dataclass(slots=True)
class Journal:
    """Reads and writes one state file."""

    path: Path
    _written: dict[Key, _Written] = field(default_factory=dict)
    _lines: int | None = None
    """Number of lines in the file; None: the next write rewrites the file."""

    def read(self) -> list[FakeGang]:
        """Return all gangs as last written; none when there is no file. A truncated line is ignored."""
        if not self.path.exists():
            return []
        text = self.path.read_text()
        if text.startswith("{\n"):  # the older format, without lines
            return [_gang_from_json(json.loads(item)) for item in json.loads(text)["gangs"]]
        found: dict[Key, dict[str, Any]] = {}
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            said = json.loads(line)
            key = (said["job_id"], said["generation"])
            if said["gang"] is None:
                found.pop(key, None)
            else:
                before = found.get(key, {"reports": [], "spec": None})
                spec = said["gang"].get("spec", before["spec"])
                found[key] = {**said["gang"], "spec": spec, "reports": [*before["reports"], *said["reports"]]}
        return [_gang_from_json(raw) for raw in found.values()]

    def write(self, gangs: Mapping[Key, FakeGang], only: Collection[Key] | None = None) -> None:
        """Append changes since the last write, and removed gangs; ``only`` limits the changes to these gangs."""
        if self._lines is None or self._lines > max(_LEAST_LINES, _LINES_A_GANG * len(gangs)):
            self._write_anew(gangs)
            return
        lines = [_line(key, None, ()) for key in self._written.keys() - gangs.keys()]
        asked = [key for key in (gangs if only is None else only) if key in gangs]
        lines += [self._line_of(key, gangs[key]) for key in asked if self._has_changed(key, gangs[key])]
        self._written = {key: written for key, written in self._written.items() if key in gangs}
        if lines:
            with self.path.open("a") as file:
                file.write("".join(lines))
            self._lines += len(lines)

    def _has_changed(self, key: Key, gang: FakeGang) -> bool:
        before = self._written.get(key)
        return before is None or before.mark != gang.mark()

    def _write_anew(self, gangs: Mapping[Key, FakeGang]) -> None:
        self._written.clear()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.new")
        temporary.write_text("".join(self._line_of(key, gang) for key, gang in gangs.items()))
        os.replace(temporary, self.path)
        self._lines = len(gangs)

    def _line_of(self, key: Key, gang: FakeGang) -> str:
        before, values = self._written.get(key), _fields_to_json(gang)
        if before is None or before.spec is not gang.spec:
            spec_json = {**asdict(gang.spec), "secret_env": {}}
            if before is None or spec_json != before.spec_json:
                values["spec"] = spec_json
        else:
            spec_json = before.spec_json
        told = 0 if before is None else before.reports
        self._written[key] = _Written(gang.mark(), len(gang.reports), gang.spec, spec_json)
        return _line(key, values, [report.to_line().decode() for report in gang.reports[told:]])


def _line(key: Key, gang: dict[str, Any] | None, reports: Iterable[str]) -> str:
    job_id, generation = key
    return json.dumps({"job_id": job_id, "generation": generation, "gang": gang, "reports": list(reports)}) + "\n"


def _fields_to_json(gang: FakeGang) -> dict[str, Any]:
    """Return all fields except the specification and the reports as JSON values (infinite times become null)."""
    raw = {f.name: getattr(gang, f.name) for f in fields(gang) if f.name not in ("spec", "reports", "behaviour")}
    raw["behaviour"] = asdict(gang.behaviour)
    return {k: None if isinstance(v, float) and math.isinf(v) else v for k, v in raw.items()}


def _gang_from_json(raw: Mapping[str, Any]) -> FakeGang:
    """Build a gang from its fields, which include its specification and the lines of its reports."""
    values = dict(raw)
    for name in ("phase_ends_s", "next_report_s", "next_checkpoint_s", "lease_ends_s"):
        values[name] = math.inf if values[name] is None else values[name]
    spec = dict(values["spec"])
    session = dict(spec["session"])
    session["args"] = tuple(session["args"])
    spec["session"] = SessionConfig(**session)
    spec["requirements"] = tuple(spec.get("requirements", ()))
    spec["placement"] = tuple(Slot(*slot) for slot in spec["placement"])
    spec["mode"] = RescaleMode(spec["mode"])
    spec["lost"] = tuple(spec.get("lost", ()))
    values["spec"] = GangSpec(**spec)
    values["behaviour"] = FakeBehaviour(**values["behaviour"])
    values["outcome"] = GangOutcome(values["outcome"]) if values["outcome"] else None
    values["reports"] = [Report.from_line(line.encode()) for line in values["reports"]]
    return FakeGang(**values)
