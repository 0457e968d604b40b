"""An independent checker of exported schedules (``schedule.jsonl``): plain arithmetic, apart from the simulator.

Read are the export, the trace, the folder of curves and the shape of the cluster. Reported is everything that could not
have happened on real machines: a slot held twice or not there, a gang on slots that are no aligned block, steps that
nobody made, a job that is forgotten. Lateness is counted, not judged: the export does not say what was promised.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WORK_TOLERANCE = 1e-6
"""Relative: what of a job's steps may be missing at its end."""
TIME_TOLERANCE_S = 1e-3

Spot = tuple[int, int]
"""Number of a node, index of a slot on it."""


@dataclass(frozen=True)
class CheckedJob:
    """What the trace says of a job, and its steps/s by number of workers.

    ``typed``, if not empty, are its steps/s by type of node, and hold in place of ``speeds``.
    """

    submitted_s: float
    deadline_s: float | None
    steps: float
    speeds: Mapping[int, float]
    typed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Violation:
    """``kind`` is one word for a class of faults: see :func:`check`."""

    kind: str
    line: int
    text: str


@dataclass
class Report:
    """Counts over a whole schedule, and what is wrong with it."""

    jobs: int = 0
    deadlines: int = 0
    met: int = 0
    late: int = 0
    """Ended after the deadline that it came with (promised or not)."""
    rejected: int = 0
    finished: int = 0
    changes: int = 0
    """Times that a job's slots became another non-empty set, starts included."""
    migrations: int = 0
    """Changes of a gang to slots that neither contain those before nor are part of them."""
    slot_s: float = 0.0
    violations: list[Violation] = field(default_factory=list)

    def kinds(self) -> Counter[str]:
        return Counter(violation.kind for violation in self.violations)


@dataclass
class _Held:
    """One job so far: ``done`` counts at ``since_s``, and it makes steps from ``ready_s`` on."""

    spots: frozenset[Spot] = frozenset()
    since_s: float = 0.0
    ready_s: float = 0.0
    starting: bool = False
    done: float = 0.0
    end: str = ""
    dirty: bool = False
    """Its slots changed at the time that is being read."""


def read_jobs(trace: Path, curves: Path) -> dict[str, CheckedJob]:
    """The jobs of a trace by id."""
    tables: dict[tuple[str, int], dict[int, float]] = {}
    for path in curves.glob("*.csv"):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                batch = int(row.pop("global_batch_size"))
                speeds = {int(n): float(cell) for n, cell in row.items() if cell and cell.lower() != "nan"}
                tables[path.stem, batch] = {n: speed for n, speed in speeds.items() if speed > 0}

    def first(row: Mapping[str, str], *names: str) -> str:
        return next((row[name] for name in names if row.get(name)), "")

    jobs: dict[str, CheckedJob] = {}
    with trace.open(newline="") as file:
        for row in csv.DictReader(file):
            deadline = first(row, "deadline_s", "deadline", "ddl")
            best_effort = first(row, "best_effort") not in ("", "0")
            jobs[row["job_id"]] = CheckedJob(
                submitted_s=float(first(row, "submitted_s", "submission_time", "submit_time")),
                deadline_s=float(deadline) if deadline and not best_effort else None,
                steps=float(first(row, "steps", "num_iteration", "iteration")),
                speeds=tables[first(row, "model", "model_name"), int(row["batch_size"])],
            )
    return jobs


def check(
    lines: Iterable[str],
    jobs: Mapping[str, CheckedJob],
    node_sizes: Sequence[int],
    pause_s: float,
    *,
    startup_s: float | None = None,
    blocks: bool = True,
    node_types: Sequence[str] = (),
) -> Report:
    """Read a schedule line by line.

    ``startup_s`` is what a start costs if not ``pause_s``. ``blocks=False``: gangs may stand on any slots.
    ``node_types`` names the type of each node where there are several.

    Kinds of violation: ``form`` (a line that is not of the documented form), ``order`` (time runs backwards),
    ``unknown`` (no such job in the trace), ``early`` (before its submission), ``slots`` (not there, or twice in one
    gang), ``double`` (two jobs on a slot), ``size`` (a gang that is no power of two, or too small to run), ``span``
    (not an aligned block), ``type`` (on nodes of several types, or of one on which it does not run), ``work``
    (finished before all steps were made), ``ended`` (something happens to a job that is over, or it ends while it
    holds slots), ``forgotten`` (neither finished nor rejected).
    """
    types = node_types or [""] * len(node_sizes)
    return _Reading(jobs, node_sizes, types, pause_s, pause_s if startup_s is None else startup_s, blocks).read(lines)


class _Reading:
    def __init__(
        self,
        jobs: Mapping[str, CheckedJob],
        sizes: Sequence[int],
        types: Sequence[str],
        pause_s: float,
        startup_s: float,
        blocks: bool,
    ) -> None:
        self.jobs, self.sizes, self.pause_s, self.startup_s, self.blocks = jobs, sizes, pause_s, startup_s, blocks
        self.types = types
        self.place = _places_among_equals(sizes, types)
        self.report = Report(jobs=len(jobs), deadlines=sum(job.deadline_s is not None for job in jobs.values()))
        self.held: dict[str, _Held] = {}
        self.owner: dict[Spot, str] = {}
        self.now = -math.inf
        self.number = 0
        self.moved: list[str] = []

    def wrong(self, kind: str, text: str) -> None:
        self.report.violations.append(Violation(kind, self.number, text))

    def read(self, lines: Iterable[str]) -> Report:
        for self.number, raw in enumerate(lines, start=1):
            if raw.strip():
                self.line(raw)
        self.settle_owners()
        for job_id in self.jobs:
            held = self.held.get(job_id)
            if held is None or not held.end:
                self.wrong("forgotten", f"{job_id} is neither finished nor rejected")
        return self.report

    def line(self, raw: str) -> None:
        try:
            entry = json.loads(raw)
            at, job_id, event = float(entry["t"]), entry["job"], entry.get("event")
            spots = None if event is not None else [(int(node), int(index)) for node, index in entry["slots"]]
            if not isinstance(job_id, str) or not math.isfinite(at) or event not in (None, "rejected", "finished"):
                raise ValueError("job is no text, t no number, or event neither rejected nor finished")
            if spots is not None and entry["workers"] != len(spots):
                raise ValueError(f"workers is {entry['workers']} but there are {len(spots)} slots")
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            self.wrong("form", f"{problem!r} in {raw.strip()[:200]}")
            return
        if at < self.now:
            self.wrong("order", f"{at} comes after {self.now}")
        if at > self.now:
            self.settle_owners()
            self.now = at
        job = self.jobs.get(job_id)
        if job is None:
            self.wrong("unknown", f"{job_id} is not in the trace")
            return
        if at < job.submitted_s - TIME_TOLERANCE_S:
            self.wrong("early", f"{job_id} at {at}, submitted at {job.submitted_s}")
        held = self.held.setdefault(job_id, _Held())
        if held.end:
            self.wrong("ended", f"{job_id} is {held.end}, and then {event or 'gets slots'} at {at}")
            return
        if spots is None:
            self.end(job_id, job, held, at, str(event))
        else:
            self.hold(job_id, job, held, at, spots)

    def settle_owners(self) -> None:
        """All lines of one time are one change: nobody takes before everybody has let go."""
        taken = Counter(spot for job_id in set(self.moved) for spot in self.held[job_id].spots)
        for job_id in dict.fromkeys(self.moved):
            held = self.held[job_id]
            held.dirty = False
            for spot in held.spots:
                other = self.owner.get(spot)
                if other is not None or taken[spot] > 1:
                    self.wrong("double", f"slot {spot} is given to {job_id} at {self.now} while {other} holds it")
                self.owner[spot] = job_id
        self.moved.clear()

    def hold(self, job_id: str, job: CheckedJob, held: _Held, at: float, listed: list[Spot]) -> None:
        before, after = held.spots, frozenset(listed)
        if len(after) != len(listed):
            self.wrong("slots", f"{job_id} holds a slot twice at {at}: {listed}")
        for node, index in after:
            if not (0 <= node < len(self.sizes) and 0 <= index < self.sizes[node]):
                self.wrong("slots", f"{job_id} holds slot {node, index} at {at}, which is not there")
        if before == after:
            return
        self.progress(job, held, at)
        if not held.dirty:
            for spot in before:
                if self.owner.get(spot) == job_id:
                    del self.owner[spot]
            held.dirty = True
            self.moved.append(job_id)
        interrupted = held.starting and held.ready_s > at + 1e-5
        held.spots = after
        held.starting = bool(after) and (not before or interrupted)
        if not after:
            return
        held.ready_s = at + (self.startup_s if held.starting else self.pause_s)
        self.report.changes += 1
        self.report.migrations += bool(before) and not (before <= after or after <= before)
        self.shape(job_id, job, after, at)

    def progress(self, job: CheckedJob, held: _Held, at: float) -> None:
        if held.spots:
            speeds = self.speeds(job, held.spots)
            run = [n for n in speeds if n <= len(held.spots)]
            speed = speeds[max(run)] if run else 0.0
            held.done += speed * max(0.0, at - max(held.ready_s, held.since_s))
            self.report.slot_s += len(held.spots) * (at - held.since_s)
        held.since_s = at

    def speeds(self, job: CheckedJob, spots: frozenset[Spot]) -> Mapping[int, float]:
        """Steps/s by number of workers on the type of node that a gang stands on; on several types it makes none."""
        if not job.typed:
            return job.speeds
        types = self.types_of(spots)
        return job.typed.get(types[0], {}) if len(types) == 1 else {}

    def types_of(self, spots: frozenset[Spot]) -> list[str]:
        return sorted({self.types[node] for node, _ in spots if 0 <= node < len(self.types)})

    def shape(self, job_id: str, job: CheckedJob, spots: frozenset[Spot], at: float) -> None:
        size, speeds, types = len(spots), self.speeds(job, spots), self.types_of(spots)
        if size & (size - 1):
            self.wrong("size", f"{job_id} holds {size} slots at {at}, no power of two")
        elif len(types) > 1:
            self.wrong("type", f"{job_id} holds slots of several types at {at}: {types}")
        elif not speeds:
            self.wrong("type", f"{job_id} holds slots of {types} at {at}; it runs on {sorted(job.typed)}")
        elif size < min(speeds):
            self.wrong("size", f"{job_id} holds {size} slots at {at}; it runs on {min(speeds)} and more")
        elif self.blocks and not self.is_block(spots):
            self.wrong("span", f"{job_id} holds no aligned block at {at}: {sorted(spots)}")

    def is_block(self, spots: frozenset[Spot]) -> bool:
        """Aligned inside one node; or on nodes of equal size that are neighbours and aligned among their equals.

        On several nodes it has the whole of each, or the largest power of two of its slots, if that is four at least.
        """
        size = len(spots)
        nodes = sorted({node for node, _ in spots})
        if any(node < 0 or node >= len(self.sizes) for node in nodes):
            return False
        if len(nodes) == 1:
            first = min(index for _, index in spots)
            return first % size == 0 and spots == {(nodes[0], first + i) for i in range(size)}
        whole = self.sizes[nodes[0]]
        part = 1 << whole.bit_length() - 1
        if any(self.sizes[node] != whole for node in nodes) or (part < whole and part < 4):
            return False
        if spots != {(node, index) for node in nodes for index in range(part)}:
            return False
        places = sorted(self.place[node] for node in nodes)
        return places[0] % len(nodes) == 0 and places == list(range(places[0], places[0] + len(nodes)))

    def end(self, job_id: str, job: CheckedJob, held: _Held, at: float, event: str) -> None:
        held.end = event
        if held.spots:
            self.wrong("ended", f"{job_id} is {event} at {at} while it holds {sorted(held.spots)}")
            self.hold(job_id, job, held, at, [])
        if event == "rejected":
            self.report.rejected += 1
            return
        self.report.finished += 1
        if held.done < job.steps * (1.0 - WORK_TOLERANCE):
            self.wrong("work", f"{job_id} is finished at {at} after {held.done} of {job.steps} steps")
        if job.deadline_s is not None:
            late = at > job.deadline_s + TIME_TOLERANCE_S
            self.report.late += late
            self.report.met += not late


def _places_among_equals(sizes: Sequence[int], types: Sequence[str]) -> list[int]:
    seen: Counter[tuple[int, str]] = Counter()
    places = []
    for kind in zip(sizes, types, strict=True):
        places.append(seen[kind])
        seen[kind] += 1
    return places
