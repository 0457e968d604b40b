"""Progress of plain scripts, which send no reports: read from rank 0's output or from a file that it writes.

Standard library only: supervisors use it.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from elasticflow_airflow import bounds
from elasticflow_airflow.runtime.protocol import Report, ReportKind, append_report, open_ordinary
from elasticflow_airflow.runtime.reporting import progress_interval_s

_LONGEST_LINE = 64 * 1024
_LARGEST_FILE = 64 * 1024
_QUOTED = 100


@dataclass(slots=True, kw_only=True)
class PlainProgress:
    """Turns the output of a plain script into ``progress`` reports of its rank 0, at most as many as of a session.

    ``regex`` is searched in each line; group ``step`` (or the first) is the number of steps done, group ``loss`` is
    optional. ``file`` holds the step, or JSON with ``step`` and ``loss``.
    """

    report_file: Path
    generation: int
    worker_id: str
    regex: str | None = None
    file: Path | None = None
    warned: bool = False
    _pattern: re.Pattern[str] | None = None
    _rest: bytes = b""
    _step: int | None = None
    _loss: float | None = None
    _reported_step: int | None = None
    _reported_s: float = 0.0
    _began_s: float = 0.0
    """When it reported for the first time."""
    _file_time: int = field(default=0)

    def __post_init__(self) -> None:
        if self.regex is not None:
            self._pattern = re.compile(self.regex)
            if not self._pattern.groups:
                raise ValueError(f"progress_regex={self.regex!r} needs a group for the step: (?P<step>\\d+)")

    def feed(self, data: bytes) -> None:
        """Search output of rank 0 for progress."""
        if self._pattern is None:
            return
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        for line in lines:
            match = self._pattern.search(line.decode(errors="replace"))
            if match:
                groups = match.groupdict()
                self._take(groups.get("step", match.group(1)), groups.get("loss"))

    def poll(self, *, last: bool = False) -> None:
        """Read the file and report new progress; ``last``: without waiting for the interval."""
        if self.file is not None:
            self._read_file(self.file)
        if last and self._rest:
            self.feed(b"\n")
        now_s = time.monotonic()
        if (
            self._step is None
            or self._step == self._reported_step
            or (not last and now_s - self._reported_s < progress_interval_s(now_s - self._began_s))
        ):
            return
        data: dict[str, float | int] = {}
        if self._loss is not None:
            data["loss"] = self._loss
        if self._reported_step is not None and self._step > self._reported_step:
            data["window_steps"] = self._step - self._reported_step
            data["window_s"] = now_s - self._reported_s
        self._say(ReportKind.PROGRESS, data)
        if self._reported_step is None:
            self._began_s = now_s
        self._reported_step, self._reported_s = self._step, now_s

    def _take(self, step: str | float | None, loss: str | float | None) -> None:
        try:
            done = None if step is None else int(float(step))
            lost = None if loss is None else float(loss)
        except (TypeError, ValueError, OverflowError):
            self._warn(f"progress: step={_quoted(step)} loss={_quoted(loss)} are no numbers")
            return
        problem = None if done is None else bounds.count_problem(done)
        if problem is not None:
            self._warn(f"progress is not taken: step {problem}", "step")
        elif done is not None:
            self._step = done
        problem = None if lost is None else bounds.loss_problem(lost)
        if problem is not None:
            self._warn(f"progress: this loss is not taken: {problem}", "loss")
        elif lost is not None:
            self._loss = lost

    def _read_file(self, file: Path) -> None:
        try:
            written = file.stat().st_mtime_ns
            if written == self._file_time:
                return
            with open_ordinary(file) as opened:
                text = opened.read(_LARGEST_FILE).decode(errors="replace").strip()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._warn(f"progress_file {file} cannot be read: {error}")
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return  # Read in the middle of a write: the next poll finds it complete.
        self._file_time = written
        if isinstance(value, dict):
            self._take(value.get("step"), value.get("loss"))
        else:
            self._take(value, None)

    def _warn(self, message: str, field: str = "") -> None:
        if not self.warned:
            self.warned = True
            self._say(ReportKind.WARNING, {"message": message} | ({"field": field} if field else {}))

    def _say(self, kind: ReportKind, data: dict[str, float | int] | dict[str, str]) -> None:
        report = Report(
            kind=kind,
            generation=self.generation,
            worker_id=self.worker_id,
            rank=0,
            step=self._step or 0,
            data=data,
        )
        append_report(self.report_file, report)


def _quoted(value: object) -> str:
    return repr(value)[:_QUOTED]
