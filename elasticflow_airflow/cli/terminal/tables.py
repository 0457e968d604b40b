"""Tables that never truncate a name. If the output is not a terminal (a pipe, a file, CI), each row is one line.

On a terminal, cells wrap between words. If even that does not fit, the other cells of a row are printed below its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_GAP = 2
_NOTHING = ("", "-")
Row = Sequence[str | Text]
"""A cell for each column: a plain string, which is not parsed as markup, or styled text."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. ``key``: identifies the row and is never wrapped. ``number``: right-aligned."""

    name: str
    key: bool = False
    number: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Print a table on standard output."""
    console = Console(highlight=False, soft_wrap=True)
    # Ask stdout: rich may take a pipe for a terminal, because CI sets FORCE_COLOR.
    _print(console, columns, rows, console.width if sys.stdout.isatty() else None)


def table_lines(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[str]:
    """Return the lines of a table that is at most ``width`` characters wide; None: unlimited."""
    out = StringIO()
    _print(Console(file=out, highlight=False, soft_wrap=True, width=width), columns, rows, width)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _print(console: Console, columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> None:
    cells = [[_on_one_line(cell) for cell in row] for row in rows]
    widths = _widths(columns, cells, width)
    if widths is None:
        _print_below_names(console, columns, cells)
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for column, wide in zip(columns, widths, strict=True):
        table.add_column(column.name, width=wide, justify="right" if column.number else "left", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.width = max(console.width, sum(widths) + _GAP * len(widths))
    console.print(table)


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[Text]], width: int | None) -> list[int] | None:
    """Return the width of each column; None if they do not all fit without breaking a word."""
    names = [Text(column.name) for column in columns]
    down = list(zip(names, *cells, strict=True))
    whole = [max(cell.cell_len for cell in column) for column in down]
    if width is None:
        return whole
    words = [max(Text(word).cell_len for cell in column for word in cell.plain.split() or [""]) for column in down]
    found = [w if column.key else least for column, w, least in zip(columns, whole, words, strict=True)]
    left = width - sum(found) - _GAP * (len(columns) - 1)
    if left < 0:
        return None
    for _ in range(left):
        neediest = max(range(len(found)), key=lambda index: whole[index] - found[index])
        if found[neediest] == whole[neediest]:
            break
        found[neediest] += 1
    return found


def _print_below_names(console: Console, columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> None:
    for row in cells:
        facts = [
            Text.assemble(f"{column.name} ", cell)
            for column, cell in zip(columns, row, strict=True)
            if not column.key and cell.plain not in _NOTHING
        ]
        console.print(*(cell for column, cell in zip(columns, row, strict=True) if column.key), style="bold")
        console.print(Padding(Text("; ").join(facts), (0, 0, 0, _GAP)), soft_wrap=False)


def _on_one_line(cell: str | Text) -> Text:
    text = Text(cell) if isinstance(cell, str) else cell
    return Text(" ".join(text.plain.splitlines()), style=text.style)
