"""Tables of results: as text on the terminal, in benchmarks/results/, and on the pages in docs/ that show them."""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"
DOCS = Path(__file__).resolve().parents[1] / "docs"


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


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that so many of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser for a benchmark that this describes, with the option ``--write``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--write", action="store_true", help="also write the tables into benchmarks/results/ and where docs/ shows them"
    )
    return parser


def show(name: str, lines: Sequence[str], args: argparse.Namespace) -> None:
    """Print these results, and write them if ``--write`` was given."""
    print(*lines, "", sep="\n", flush=True)
    write(name, lines, args)


def write(name: str, lines: Sequence[str], args: argparse.Namespace) -> None:
    """If ``--write`` was given, put these results into the benchmark's file and onto each page that shows them.

    In the file a section is headed by how the results were made. What stands by hand between the heading of a section
    and the marker of its results is kept; what the script is for is taken from its docstring anew.
    """
    if not args.write:
        return
    RESULTS.mkdir(exist_ok=True)
    file = file_of_command()
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = re.search(r"^## ", text, re.MULTILINE)
    text = about_command() + (text[found.start() :] if found else "")
    if marker_of(name) not in text:
        text += f"## {name}\n\n{marker_of(name)}\n"
    file.write_text(replaced(text, name, [*how_made(args), "", *lines]), encoding="utf-8")
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        if marker_of(name) in text:
            page.write_text(replaced(text, name, lines), encoding="utf-8")


def file_of_command() -> Path:
    """The file for the results of the script that runs."""
    return RESULTS / f"{Path(sys.argv[0]).stem.removeprefix('bench_')}.md"


def about_command() -> str:
    """The head of that file: what the script's docstring says, without the indented lines of its usage."""
    paragraphs = (sys.modules["__main__"].__doc__ or "").strip().split("\n\n")
    kept = [part for part in paragraphs if not part.startswith("    ")]
    return "\n\n".join([f"# {Path(sys.argv[0]).name}", *kept]) + "\n\n"


def how_made(args: argparse.Namespace) -> list[str]:
    """Say with which command, settings and machine results are made, and when."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]).replace(" --write", "")
    given = {name: value for name, value in vars(args).items() if name != "write" and value not in (None, False, "")}
    settings = [f"{name} {' and '.join(v) if isinstance(v, list) else v}" for name, v in given.items()]
    return [
        f"- Command: `{command}`",
        f"- Settings: {', '.join(settings) or 'none'}",
        f"- Made on {date.today().isoformat()}, on {os.cpu_count()} cores",
    ]


def marker_of(name: str) -> str:
    """The line below which these results stand."""
    return f"<!-- results: {name} -->"


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """Return the text with these lines between the marker of the results and the next heading."""
    before, after = text.split(marker_of(name), 1)
    rest = re.search(r"^#", after, re.MULTILINE)
    tail = "\n" + after[rest.start() :] if rest else ""
    return f"{before}{marker_of(name)}\n\n" + "\n".join(lines) + f"\n{tail}"
