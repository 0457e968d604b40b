"""Reports of a worker to its supervisor: start, progress, checkpoints, end. May import the standard library only.

Alone or under a bare torchrun there is no supervisor, and progress is printed to standard output.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.protocol import Report, ReportKind, append_report, report_path

PROGRESS_INTERVAL_S = 0.5
STEADY_INTERVAL_S = 5.0
"""Seconds between two progress reports of a training that has gone on for a while in one size."""
_PART_OF_AGE = 1 / 60
ALONE_INTERVAL_S = 5.0
WORKER_INTERVAL_S = 5.0
"""Least seconds between two reports of a worker's own measurements."""

REPORT_LIMIT_S = 60.0
"""Seconds for which writing an essential report is retried (one without which the service would decide wrongly)."""
UNREPORTED_STATUS = 74
"""Exit status of a worker whose report could not be written to disk (EX_IOERR)."""

_FOR_MACHINES = frozenset({"loss_curve"})
_MUST_ARRIVE = frozenset({ReportKind.STARTED, ReportKind.FINISHED})
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


def progress_interval_s(age_s: float) -> float:
    """Return the minimum seconds between two progress reports of a generation of this age, in seconds.

    What is new is measured soon, and thousands of old ones cost less.
    """
    return min(max(PROGRESS_INTERVAL_S, age_s * _PART_OF_AGE), STEADY_INTERVAL_S)


class FileReporter:
    """Appends reports to this worker's report file."""

    def __init__(self, incarnation_dir: Path, generation: int, worker_id: str) -> None:
        self._incarnation_dir, self._worker_id = incarnation_dir, worker_id
        self.adopt(generation)

    @property
    def interval_s(self) -> float:
        """Minimum seconds between two progress reports at present."""
        return progress_interval_s(time.monotonic() - self._began_s)

    def adopt(self, generation: int) -> None:
        """Switch to the report file of another generation."""
        self._path = report_path(self._incarnation_dir, generation, self._worker_id)
        self._generation, self._began_s = generation, time.monotonic()

    def say(self, kind: ReportKind, rank: int, step: int, /, **data: Any) -> None:
        """Append one line. If it cannot be written, print that to standard error and drop the report.

        STARTED and FINISHED are essential for the training and are retried for ``REPORT_LIMIT_S`` seconds. Raises
        SystemExit with ``UNREPORTED_STATUS`` if that fails.
        """
        if kind is ReportKind.STARTED:
            self._began_s = time.monotonic()
        report = Report(
            kind=kind,
            generation=self._generation,
            worker_id=self._worker_id,
            rank=rank,
            step=step,
            data=plain(data),
        )
        end_s, pause_s = time.monotonic() + REPORT_LIMIT_S, _FIRST_PAUSE_S
        while True:
            try:
                append_report(self._path, report)
                return
            except OSError as error:
                what = f"elasticflow: report {kind} of step {step} could not be written: {error}"
            if kind not in _MUST_ARRIVE:
                sys.stderr.write(f"{what}\n")
                return
            if time.monotonic() >= end_s:
                sys.stderr.write(
                    f"{what}: leaving with status {UNREPORTED_STATUS} after {REPORT_LIMIT_S:.0f} s; free space there\n"
                )
                raise SystemExit(UNREPORTED_STATUS)
            if pause_s == _FIRST_PAUSE_S:
                sys.stderr.write(f"{what}: tries again\n")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class ConsoleReporter:
    """Prints reports for a user who runs the script alone."""

    interval_s = ALONE_INTERVAL_S

    def adopt(self, generation: int) -> None:
        """Do nothing: generations do not matter to the user."""

    def say(self, kind: ReportKind, rank: int, step: int, /, **data: Any) -> None:
        """Print one line; ranks other than 0 print failures only."""
        if (rank != 0 and kind is not ReportKind.FAILED) or kind is ReportKind.WORKER:
            return
        told = {key: value for key, value in plain(data).items() if value is not None and key not in _FOR_MACHINES}
        details = " ".join(f"{key}={_short(value)}" for key, value in told.items())
        stream = sys.stderr if kind in (ReportKind.FAILED, ReportKind.WARNING) else sys.stdout
        stream.write(f"elasticflow: {kind} step={step} {details}".rstrip() + "\n")
        stream.flush()


class Speedometer:
    """Counts steps and seconds since the last progress report, without the time spent on saving.

    ``interval_s`` returns the minimum seconds between two of them.
    """

    def __init__(self, interval_s: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._steps = 0
        self._seconds = 0.0
        self._since = self._reported = time.perf_counter()

    def step_done(self) -> None:
        """Count one step, with all time since the previous one."""
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now
        self._steps += 1

    def leave_out(self) -> None:
        """Exclude the time since the last step (saving)."""
        self._since = time.perf_counter()

    @property
    def due(self) -> bool:
        """Whether a progress report is due."""
        return time.perf_counter() - self._reported >= self._interval_s()

    def take(self) -> tuple[int, float]:
        """Return (steps, seconds) since the last call, and reset both."""
        window = self._steps, self._seconds
        self._steps, self._seconds = 0, 0.0
        self._reported = time.perf_counter()
        return window


def plain(value: Any) -> Any:
    """Convert a value to JSON types: tensors and numpy numbers to numbers, unknown types to strings.

    A non-finite float becomes its name ("nan", "inf").
    """
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
