"""Compare several policies on one setting: their metrics as rows, and the rows as files.

:data:`FIGURES` lists the columns of a row. :mod:`plots` draws the plots, :mod:`smallest_cluster` finds the smallest
clusters.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.experiment import OURS, Contender, Played, Setting, play
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.outcome import SimulatedOutcome
from elasticflow_airflow.scheduler_core.simulator.outputs.export import write_schedule
from elasticflow_airflow.scheduler_core.simulator.smallest_cluster import Capacity

if TYPE_CHECKING:
    from elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant import Bound

Row = dict[str, float | int | str | None]

FIGURES: dict[str, str] = {
    "met": "Deadlines met, those that jobs came with.",
    "of_bound": "``met`` as a part of the clairvoyant bound: no schedule can meet more.",
    "late_though_admitted": "Promises broken: promised a deadline, and ended after it.",
    "rejected": "Jobs that were refused.",
    "unfinished": "Jobs neither refused nor finished.",
    "completion_mean_s": "Mean time from submission to the end, over the jobs that ended.",
    "completion_p95_s": "The same, 95 % of them within.",
    "slot_hours": "Slots held times hours, pauses included.",
    "utilisation": "Slot-hours as a part of those that the cluster had from the first submission to the last end.",
    "changes": "Rescales: times that a job's slots became another non-empty set, its start included.",
    "migrations": "Of these, moves to slots that neither contain nor are part of those before.",
    "suspensions": "Times that a job was stopped before its end.",
    "decision_p50_ms": "Wall-clock time of the decision on a submitted job, median.",
    "decision_p99_ms": "The same, 99 % within.",
    "run_s": "Wall-clock time of the whole simulation.",
}
"""The columns after the policy, in order, with their meaning."""

_PER_JOB = (
    "job_id",
    "submitted_s",
    "deadline_s",
    "value",
    "admitted_s",
    "rejected_s",
    "started_s",
    "finished_s",
    "at_risk_s",
    "met",
    "late_though_admitted",
    "changes",
    "migrations",
    "slot_s",
    "reject_reason",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The results of a comparison. ``bound`` is None if it was not requested."""

    setting: Setting
    played: tuple[Played, ...]
    bound: Bound | None = None
    capacities: tuple[Capacity, ...] = ()

    def rows(self) -> list[Row]:
        """Return one row per contender."""
        return [self._row(played) for played in self.played]

    def _row(self, played: Played) -> Row:
        summary = played.result.summary()
        row: Row = {"policy": played.contender.label}
        limit = self.bound.met if self.bound is not None else 0
        for name in FIGURES:
            if name == "of_bound":
                row[name] = None if not limit else int(summary["met"]) / limit
            else:
                row[name] = summary[name]
        return row

    def as_json(self) -> dict[str, object]:
        """Return the contents of ``summary.json``: everything except the individual jobs."""
        return {
            "setting": self.setting.facts(),
            "bound": None if self.bound is None else self.bound.met,
            "bound_of_fixed_sizes": None if self.bound is None else self.bound.alone_at_fixed_size,
            "bound_exact": None if self.bound is None else self.bound.exact,
            "policies": self.rows(),
            "capacity": [capacity.as_row() for capacity in self.capacities],
            "columns": FIGURES,
        }


def compare(
    setting: Setting,
    contenders: Sequence[Contender],
    *,
    bound: Bound | None = None,
    on_start: Callable[[Contender], Callable[[int, float], None] | None] | None = None,
) -> Comparison:
    """Simulate each contender in turn.

    ``on_start`` is called with each contender before it runs and may return a progress callback.

    Raises:
        InputError: the setting cannot be simulated.
        SimulationError: a policy made an impossible decision.
    """
    played = []
    for contender in contenders:
        progress = on_start(contender) if on_start is not None else None
        played.append(play(setting, contender, on_progress=progress))
    return Comparison(setting=setting, played=tuple(played), bound=bound)


def require_solver() -> None:
    """Check that the bound can be computed, before any long computation starts.

    Raises:
        InputError: scipy is not installed.
    """
    if find_spec("scipy") is None:
        raise InputError(
            "the bound needs scipy, which is not installed; pip install 'elasticflow-airflow[simulate]', or go without"
            " it (--no-bound)"
        )


def bound_of(setting: Setting, time_limit_s: float = 120.0) -> Bound:
    """Return the clairvoyant bound, which no schedule can beat: all arrivals and real speeds are known in advance.

    Node failures are ignored; they can only lower the number of deadlines met.

    Raises:
        InputError: scipy is not installed, or the setting cannot be simulated.
    """
    require_solver()
    from elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant import clairvoyant_bound

    jobs = setting.jobs(Contender(policy=OURS))
    real = [replace(simulated.job, curve=ScalingCurve(simulated.truth)) for simulated in jobs]
    return clairvoyant_bound(real, setting.slots, time_limit_s=time_limit_s)


def file_names(contenders: Sequence[Contender], *, capacities: bool, schedules: bool) -> list[str]:
    """Return the names of all files that :func:`write_comparison` writes."""
    names = ["summary.csv", "summary.json", "jobs.csv"] + ["capacity.csv"] * capacities
    return names + [schedule_name(contender) for contender in contenders if schedules]


def write_comparison(comparison: Comparison, folder: Path, *, schedules: bool = False) -> list[Path]:
    """Write ``summary.csv``, ``summary.json``, ``jobs.csv`` and, if requested, the schedules; return the file paths.

    Raises:
        InputError: the folder cannot be written to.
    """
    bound = comparison.bound
    limit = None if bound is None else bound.met
    rows = [{**comparison.setting.facts(), "bound": limit, **row} for row in comparison.rows()]
    texts = {
        "summary.csv": _csv(rows),
        "summary.json": json.dumps(comparison.as_json(), indent=2) + "\n",
        "jobs.csv": _csv([_job_row(one, record, bound) for one in comparison.played for record in one.result.records]),
    }
    if comparison.capacities:
        texts["capacity.csv"] = _csv([capacity.as_row() for capacity in comparison.capacities])
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    names = list(texts)
    if schedules:
        for played in comparison.played:
            name = schedule_name(played.contender)
            write_schedule(folder / name, comparison.setting.nodes, played.changes)
            names.append(name)
    return [folder / name for name in names]


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; at the end move all its files to ``folder``, or none if an exception is raised.

    Raises:
        InputError: ``folder`` cannot be created or written to, or contains a folder with the name of a file.
    """
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder))
    except OSError as problem:
        raise InputError(f"cannot be written to: {problem}", folder) from problem
    try:
        yield draft
        files = sorted(draft.iterdir())
        for file in files:
            if (folder / file.name).is_dir():
                raise InputError("is no regular file; nothing was written", folder / file.name)
        for file in files:
            file.replace(folder / file.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if new and not any(folder.iterdir()):
            folder.rmdir()


def schedule_name(contender: Contender) -> str:
    """Return the file name of a contender's schedule."""
    return f"schedule-{file_name(contender)}.jsonl"


def file_name(contender: Contender) -> str:
    """Return a contender's label in a form that can be part of a file name."""
    return contender.label.replace(":", "-")


def _job_row(played: Played, record: SimulatedOutcome, bound: Bound | None) -> Row:
    row: Row = {"policy": played.contender.label}
    for name in _PER_JOB:
        value = getattr(record, name)
        row[name] = int(value) if isinstance(value, bool) else value
    row["met_by_bound"] = None if bound is None else int(record.job_id in bound.chosen)
    return row


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
