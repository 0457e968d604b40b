"""Draws the default beside plain admission, ``edf+elastic`` and the bound, from what the benchmarks have written.

    python benchmarks/chart.py

Reads ``results/policies.md``, ``contended.md`` and ``promises.md``; writes one SVG for the front page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
CHART = Path(__file__).parents[1] / "docs/explanation/benchmark/default-beside-others.svg"
_SERIES = {
    "plain admission (ElasticFlow's Algorithm 1)": "#8a8f98",
    "edf+elastic (refuses nobody)": "#d08700",
    "the default": "#1f6feb",
}
_LEAST = 60
"""Where the axis begins, in % of the bound."""
_LEFT, _WIDTH, _ROW, _TOP, _RADIUS = 150, 520, 26, 64, 5
_LEGEND = (16, 300, 500)
_APART = (-4, 0, 4)
"""How far the dots of a line stand above and below it, so that equal ones are seen."""


def counts_of(name: str, table: str) -> dict[str, dict[str, int]]:
    """Return the deadlines met, by policy and trace with its cluster, of the table of all traces of a results' file."""
    text = (RESULTS / f"{name}.md").read_text(encoding="utf-8").split(f"<!-- results: {table} -->", 1)[1]
    lines = re.search(r"^\| policy .*(?:\n\|.*)+", text, re.MULTILINE)
    assert lines is not None, f"{name}.md has no table of all traces"
    heads, _, *rows = [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return {row[0]: {trace: int(cell) for trace, cell in zip(heads[1:], row[1:], strict=True) if cell} for row in rows}


def plain_counts() -> dict[str, int]:
    """Return what plain admission meets."""
    text = (RESULTS / "promises.md").read_text(encoding="utf-8")
    return {
        trace: int(met) for trace, met in re.findall(r"^\| (\S+ \d+x\d+) +\| +plain \| +(\d+) \|", text, re.MULTILINE)
    }


def shares() -> dict[str, list[float]]:
    """Return by trace and cluster what each of the series meets, in % of the bound; the fullest cluster last."""
    found: dict[str, list[float]] = {}
    plain = plain_counts()
    for counts in (counts_of("policies", "policies"), counts_of("contended", "contended")):
        for trace, bound in counts["bound"].items():
            if trace in plain:
                met = (plain[trace], counts["edf+elastic"][trace], counts["elasticflow"][trace])
                found[trace] = [100.0 * one / bound for one in met]
    return found


def draw(rows: Mapping[str, list[float]]) -> str:
    """Return the chart: a line for each cluster, a dot for each series."""

    def x(share: float) -> float:
        return _LEFT + _WIDTH * (share - _LEAST) / (100 - _LEAST)

    height = _TOP + _ROW * len(rows) + 34
    size = f'viewBox="0 0 {_LEFT + _WIDTH + 30} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" font-size="12">',
        "<title>Deadlines met, in % of what no schedule can beat</title>",
        f'<rect width="100%" height="{height}" fill="#ffffff"/>',
    ]
    for at, (name, colour) in zip(_LEGEND, _SERIES.items(), strict=True):
        parts.append(f'<circle cx="{at}" cy="20" r="{_RADIUS}" fill="{colour}"/>')
        parts.append(f'<text x="{at + 10}" y="24" fill="#24292f">{name}</text>')
    for tick in range(_LEAST, 101, 10):
        parts.append(
            f'<line x1="{x(tick):.0f}" x2="{x(tick):.0f}" y1="{_TOP - 18}" y2="{height - 30}" stroke="#d0d7de"/>'
        )
        parts.append(f'<text x="{x(tick):.0f}" y="{height - 14}" text-anchor="middle" fill="#57606a">{tick} %</text>')
    for line, (trace, found) in enumerate(rows.items()):
        y = _TOP + _ROW * line
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end" fill="#24292f">{trace}</text>')
        parts.append(f'<line x1="{x(min(found)):.1f}" x2="{x(max(found)):.1f}" y1="{y}" y2="{y}" stroke="#afb8c1"/>')
        for share, colour, apart in zip(found, _SERIES.values(), _APART, strict=True):
            parts.append(f'<circle cx="{x(share):.1f}" cy="{y + apart}" r="{_RADIUS}" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    CHART.write_text(draw(shares()), encoding="utf-8")
    print(f"written: {CHART}")
