"""Tables of results: as text on the terminal, and as they stand on the pages in docs/."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table that reads well as text and is Markdown."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [line(heads), rule, *(line(row) for row in rows)]


def side_by_side(head: str, columns: Mapping[str, Sequence[tuple[str, str]]]) -> list[str]:
    """A table of (name, value) rows that all columns share, a column for each of their names."""
    first = next(iter(columns.values()))
    rows = [(name, *(column[number][1] for column in columns.values())) for number, (name, _) in enumerate(first)]
    return table([head, *columns], rows)


def show(name: str, lines: Sequence[str], page: Path | None) -> None:
    """Print these results, and put them into the page, if there is one."""
    print(*lines, "", sep="\n", flush=True)
    if page is not None:
        put_into(page, name, lines)


def put_into(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between the marker of these results and the next heading."""
    text = page.read_text(encoding="utf-8")
    marker = f"<!-- results: {name} -->"
    if marker not in text:
        sys.exit(f"{page} has no line {marker}")
    before, after = text.split(marker, 1)
    rest = re.search(r"^#", after, re.MULTILINE)
    tail = after[rest.start() :] if rest else ""
    page.write_text(f"{before}{marker}\n\n" + "\n".join(lines) + f"\n\n{tail}", encoding="utf-8")
