"""Read CSV files row by row, each with its first line number; errors name the line."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError


def rows_of(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield all rows with their line numbers; an empty line is a row without cells.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    try:
        text = _text_of(path)
    except OSError as problem:
        raise InputError(f"cannot be read as a CSV file: {problem}", path) from problem
    reader = csv.reader(io.StringIO(text, newline=""))
    line = 1
    try:
        for row in reader:
            yield line, row
            line = reader.line_num + 1
    except csv.Error as problem:
        raise InputError(f"cannot be read as a CSV file: {problem}", path, line) from problem


def _text_of(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise InputError(
            f"cannot be read as a CSV file: byte 0x{data[problem.start]:02x} is no UTF-8; save it as UTF-8", path, line
        ) from problem


def require_width(row: Sequence[str], width: int, path: Path, line: int) -> None:
    """Check that a row has as many cells as the header.

    Raises:
        InputError: it has not; if a cell spans several lines, the message suggests an unclosed quote.
    """
    if len(row) != width:
        unclosed = "; is a quote not closed?" if any("\n" in cell or "\r" in cell for cell in row) else ""
        raise InputError(f"{len(row)} cells where the header has {width}{unclosed}", path, line)


def records_of(path: Path, needed: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield rows as dicts by column name, each with its line number; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, a column of ``needed`` is missing, or a row has too few or too many cells.
    """
    rows = rows_of(path)
    _, header = next(rows, (1, []))
    missing = [name for name in needed if name not in header]
    if missing:
        raise InputError(f"the header lacks {', '.join(missing)}", path, 1)
    for line, row in rows:
        if row:
            require_width(row, len(header), path, line)
            yield line, dict(zip(header, row, strict=True))
