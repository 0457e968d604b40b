"""Figures of a comparison: deadlines met, slots in use, completion times, a window of a schedule, smallest clusters.

The colours are the colour-blind-safe palette of Okabe and Ito, and no figure relies on colour alone. matplotlib is an
optional dependency, imported when something is drawn.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow_airflow.scheduler_core.simulator.compare import Comparison, file_name
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Played, Setting
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.outputs import series
from elasticflow_airflow.scheduler_core.simulator.smallest_cluster import Capacity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#555555")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_LEAST_NAME = 4
_DEADLINE = "#B3261E"
_INK, _FAINT, _RULE = "#222222", "#777777", "#DDDDDD"
_JOB_COLOURS = ("#7FB7DD", "#F3C969", "#7CC8AE", "#E3B5CE", "#B5DDF3", "#EBA06C", "#DAD36A", "#C9C4E8")
"""Paler, so that numbers on them are readable."""
_COLOURED = 5
"""So many policies have a colour where curves are compared; more of them would be a tangle."""
_BINS = 240
_HOUR_S = 3600.0
_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "elasticflow",
    "savefig.dpi": 150,
}


def require_library() -> None:
    """Check that plots can be drawn, before any long computation starts.

    Raises:
        InputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InputError(
            "plots need matplotlib, which is not installed; pip install 'elasticflow-airflow[simulate]', or go without"
            " them (--no-plots)"
        )


def file_names(contenders: Sequence[Contender], *, capacities: bool) -> list[str]:
    """Return the names of all files that :func:`draw` writes."""
    figures = ["deadlines", "slots", "completion", *map(_gantt_name, contenders)] + ["capacity"] * capacities
    return [f"{figure}.{kind}" for figure in figures for kind in FORMATS]


def _gantt_name(contender: Contender) -> str:
    return f"gantt-{file_name(contender)}"


def draw(
    comparison: Comparison,
    folder: Path,
    formats: Sequence[str] = FORMATS,
    window_h: tuple[float, float] | None = None,
    only: Sequence[str] = (),
) -> list[Path]:
    """Draw all figures of a comparison, or ``only`` those with the given names; return the file paths.

    ``window_h`` is the window of each policy's schedule: begin in hours after the first submission, and length in
    hours. The default is the six hours in which the first policy makes the most changes.
    """
    require_library()
    figures: dict[str, Callable[[], Figure]] = {
        "deadlines": partial(deadlines, comparison),
        "slots": partial(slots_over_time, comparison),
        "completion": partial(completion, comparison),
    }
    first = comparison.played[0]
    begin_s = first.result.begin_s
    if window_h is None:
        window = series.busiest_window(series.spans(first.changes), 6 * _HOUR_S)
    else:
        window = (begin_s + window_h[0] * _HOUR_S, begin_s + (window_h[0] + window_h[1]) * _HOUR_S)
    for played in comparison.played:
        figures[_gantt_name(played.contender)] = partial(gantt, comparison.setting, played, window)
    if comparison.capacities:
        figures["capacity"] = partial(capacity, comparison)
    written = []
    with _styled():
        for name in only or figures:
            figure = figures[name]()
            for kind in formats:
                path = folder / f"{name}.{kind}"
                # Without a date, the same comparison gives the same file.
                metadata = {"Date": None} if kind == "svg" else None
                figure.savefig(path, bbox_inches="tight", pad_inches=0.15, facecolor="white", metadata=metadata)
                written.append(path)
    return written


def deadlines(comparison: Comparison) -> Figure:
    """Draw the deadlines met by each policy, most first, with the bound and the number of all deadlines."""
    facts = comparison.setting.facts()
    pairs = sorted(zip(comparison.rows(), comparison.played, strict=True), key=lambda pair: -int(pair[0]["met"] or 0))
    figure, (axes,) = _canvas(1, 8.0, 1.3 + 0.36 * len(pairs))
    wanted = int(facts["deadlines"] or 0)
    for place, (row, played) in enumerate(pairs):
        met, late = int(row["met"] or 0), int(row["late_though_admitted"] or 0)
        axes.barh(place, wanted, color="#F1F1F1", height=0.68)
        axes.barh(place, met, color=_bar(played.contender), height=0.68)
        if late:
            axes.barh(place, late, left=met, color=_COLOURS[5], height=0.68, hatch="////", edgecolor="white")
        share = "" if row["of_bound"] is None else f"   {100 * float(row['of_bound']):.1f} % of the bound"
        broken = f"   {late} promised and late" if late else ""
        axes.text(wanted * 1.015, place, f"{met}{share}{broken}", va="center", fontsize=9)
    if comparison.bound:
        axes.axvline(comparison.bound.met, color=_INK, linewidth=1.2, linestyle=_DASHES[1])
        where = (comparison.bound.met, 1.0)
        text = f"bound {comparison.bound.met}"
        axes.annotate(text, where, (0, 3), axes.get_xaxis_transform(), "offset points", ha="center", fontsize=8.5)
    _named_rows(axes, [str(row["policy"]) for row, _ in pairs])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, wanted)
    axes.set_xlabel(f"deadlines met, of {wanted}")
    _title(axes, "Deadlines met", comparison.setting)
    return figure


def slots_over_time(comparison: Comparison) -> Figure:
    """Draw the slots in use over time, one panel per policy."""
    setting, played = comparison.setting, comparison.played
    begin = min(one.result.begin_s for one in played)
    end = max(one.result.end_s for one in played)
    # A long tail of few jobs would compress everything else.
    shown_to = begin + 1.05 * max(_time_of_most(one, 0.95) for one in played) - 0.05 * begin
    end = min(end, max(shown_to, begin + 1.0))
    unit_s, unit = _unit(end - begin)
    figure, panels = _canvas(len(played), 8.0, 0.7 + 0.85 * len(played))
    for place, (axes, one) in enumerate(zip(panels, played, strict=True)):
        use = series.mean_use(series.spans(one.changes), begin, end, _BINS)
        edges = [(end - begin) * i / _BINS / unit_s for i in range(_BINS + 1)]
        axes.stairs(use, edges, fill=True, color=_bar(one.contender), alpha=0.85, linewidth=0)
        axes.axhline(setting.slots, color=_FAINT, linewidth=0.8, linestyle=_DASHES[1])
        axes.set_ylim(0, setting.slots * 1.08)
        axes.set_xlim(0, edges[-1])
        axes.set_yticks([0, setting.slots])
        axes.text(1.01, 0.5, one.contender.label, transform=axes.transAxes, va="center", fontsize=9.5)
        axes.tick_params(axis="x", labelbottom=place == len(played) - 1)
    panels[-1].set_xlabel(f"{unit} since the first submission")
    figure.supylabel("slots in use (mean)", fontsize=10, x=0.04)
    _title(panels[0], "Slots in use over time", setting)
    return figure


def completion(comparison: Comparison) -> Figure:
    """Draw the percentage of all jobs done within a time of their submission.

    Our policies and those that meet most deadlines have a colour, five at most; all others are grey.
    """
    figure, (axes,) = _canvas(1, 8.0, 4.4)
    ranked = sorted(comparison.played, key=lambda one: (not one.contender.ours, -int(one.result.summary()["met"] or 0)))
    others = len(ranked) - _COLOURED
    for place, one in enumerate(ranked):
        times, parts = series.completion_cdf(one.result.records)
        if not times:
            continue
        hours = [max(t, 1.0) / _HOUR_S for t in times]
        coloured = place < _COLOURED
        label = one.contender.label if coloured else f"{others} others" if place == _COLOURED else None
        axes.step(
            [*hours, hours[-1]],
            [100 * part for part in [*parts, parts[-1]]],
            where="post",
            label=label,
            color=_COLOURS[place] if coloured else "#C4C4C4",
            linestyle=_DASHES[place % len(_DASHES)] if coloured else "-",
            linewidth=2.4 if one.contender.ours else 1.5 if coloured else 0.9,
            zorder=(3 if one.contender.ours else 2) if coloured else 1,
        )
    axes.set_xscale("log")
    _hours_axis(axes)
    axes.set_ylim(0, 100)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(color=_RULE, linewidth=0.7)
    axes.set_xlabel("time from submission to the end (logarithmic)")
    axes.set_ylabel("jobs done, % of all submitted")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    _title(axes, "Completion times", comparison.setting, "curves that end below 100 %: jobs were refused")
    return figure


def gantt(setting: Setting, played: Played, window: tuple[float, float]) -> Figure:
    """Draw a window of a schedule: which jobs hold which slots when, with their pauses and deadlines.

    A job has the same colour in the schedule of every policy.
    """
    from matplotlib.collections import PatchCollection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    begin, end = window
    rows = series.rows_of(setting.nodes)
    late = {record.job_id for record in played.result.records if record.late_though_admitted}
    starts = {record.job_id: record.started_s for record in played.result.records}
    unit_s, unit = _unit(end - begin)
    figure, (axes,) = _canvas(1, 10.0, min(10.0, 1.6 + 0.075 * max(len(rows), 24)))
    row_points = 72.0 * figure.get_figheight() * 0.77 / len(rows)
    bodies, faces, stops = [], [], []
    last_held: dict[str, list[tuple[int, int]]] = {}
    labels: dict[str, tuple[float, float, float]] = {}
    """By job: the longest of its blocks that is high enough for a text, and its middle."""
    for span in series.spans(played.changes):
        if span.end_s <= begin or span.begin_s >= end:
            continue
        colour, held = _colour_of(span.job_id), series.blocks(span.slots, rows)
        last_held[span.job_id] = held
        low, high = (max(span.begin_s, begin) - begin) / unit_s, (min(span.end_s, end) - begin) / unit_s
        costs = setting.conditions
        pause = costs.pause_s
        if span.begin_s == starts[span.job_id] and costs.startup_s is not None:
            pause = costs.startup_s
        ready = max(low, min(high, (span.begin_s + pause - begin) / unit_s))
        for first, number in held:
            bodies.append(Rectangle((low, first), high - low, number))
            faces.append(colour)
            if ready > low:
                stops.append(Rectangle((low, first), ready - low, number))
            long = high - low if number * row_points > 8.0 else 0.0
            if long > labels.get(span.job_id, (0.0, 0.0, 0.0))[0]:
                labels[span.job_id] = (long, (low + high) / 2, first + number / 2)
    axes.add_collection(PatchCollection(bodies, facecolors=faces, edgecolors="white", linewidths=0.5))
    axes.add_collection(PatchCollection(stops, facecolors=_INK, edgecolors="none", alpha=0.7))
    width = (end - begin) / unit_s
    for job in setting.trace.jobs:
        x = math.nan if job.deadline_s is None else (job.deadline_s - begin) / unit_s
        for first, number in last_held.get(job.job_id, ()) if 0.0 <= x <= width else ():
            axes.plot([x, x], [first, first + number], color=_DEADLINE, linewidth=1.6, solid_capstyle="butt")
    letter = width / (72.0 * figure.get_figwidth() * 0.77 / 4.4)
    for job_id, (long, x, y) in labels.items():
        text = _shortened(f"{job_id}{' late' if job_id in late else ''}", int(long / letter))
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=_INK)
    edges = [0]
    for node in setting.nodes:
        edges.append(edges[-1] + node.slots)
    for edge in edges:
        axes.axhline(edge, color=_FAINT, linewidth=0.5, zorder=0.5)
    step = max(1, math.ceil(len(setting.nodes) / 16))
    middles = [(edges[i] + edges[i + 1]) / 2 for i in range(0, len(setting.nodes), step)]
    axes.set_yticks(middles, [str(i) for i in range(0, len(setting.nodes), step)])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, width)
    axes.set_ylim(len(rows), 0)
    axes.set_ylabel(f"node (of {setting.nodes[0].slots} slots)")
    offset = (begin - played.result.begin_s) / _HOUR_S
    axes.set_xlabel(f"{unit}, from {offset:.1f} h after the first submission")
    handles = [
        Rectangle((0, 0), 1, 1, color=_INK, alpha=0.7),
        Rectangle((0, 0), 1, 1, color=_JOB_COLOURS[0]),
        Line2D([], [], color=_DEADLINE, linewidth=1.6),
    ]
    axes.legend(
        handles,
        ["pause: start, resize, migration", "a job", "its deadline"],
        loc="upper right",
        bbox_to_anchor=(1.0, -0.5 / figure.get_figheight()),
        ncols=3,
    )
    _title(axes, f"Who holds which slots: {played.contender.label}", setting)
    return figure


def capacity(comparison: Comparison) -> Figure:
    """Draw the smallest cluster on which each policy keeps all the promises."""
    found: Sequence[Capacity] = comparison.capacities
    figure, (axes,) = _canvas(1, 8.0, 1.3 + 0.36 * len(found))
    largest = max(max(one.tried) for one in found)
    for place, one in enumerate(found):
        if one.nodes is None:
            tried = max(one.tried)
            axes.barh(place, tried, color="#F1F1F1", height=0.68, hatch="////", edgecolor="#BBBBBB", linewidth=0)
            axes.text(tried + largest * 0.015, place, f"more than {tried} nodes", va="center", fontsize=9)
        else:
            axes.barh(place, one.nodes, color=_bar(one.contender), height=0.68)
            text = f"{one.nodes} nodes, {one.nodes * one.slots_per_node} slots"
            axes.text(one.nodes + largest * 0.015, place, text, va="center", fontsize=9)
    _named_rows(axes, [one.contender.label for one in found])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, largest)
    axes.set_xlabel(f"smallest number of nodes on which all {found[0].needed} deadlines that can be met are met")
    _title(axes, "Smallest cluster that keeps all the promises", comparison.setting, sized=False)
    return figure


# -- shared helpers ----------------------------------------------------------------------------------------------------


@contextmanager
def _styled() -> Iterator[None]:
    from matplotlib import rc_context

    with rc_context(_STYLE):
        yield


def _canvas(panels: int, width_in: float, height_in: float) -> tuple[Figure, list[Axes]]:
    """Create a figure without a window and without global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in))
    made = figure.subplots(panels, 1, sharex=True, squeeze=False, gridspec_kw={"hspace": 0.25})
    return figure, [row[0] for row in made]


def _title(axes: Axes, text: str, setting: Setting, note: str = "", *, sized: bool = True) -> None:
    """Add a title and, below it in small type, the facts of the simulation; both flush left above the axes."""
    conditions = setting.conditions
    facts = [setting.trace.name, f"{len(setting.trace.jobs)} jobs"]
    if sized:
        facts.append(f"{len(setting.nodes)} \u00d7 {setting.nodes[0].slots} slots")
    facts.append(f"pause {conditions.pause_s:g} s")
    if conditions.throughput_error:
        facts.append(f"speed error {conditions.throughput_error:g}")
    if conditions.speed_factor != 1.0:
        facts.append(f"speeds {conditions.speed_factor:g} of the curves")
    facts.append(setting.settings_name)
    facts += setting.troubles.sentences()
    if note:
        facts.append(note)
    axes.annotate(
        text, (0, 1), (0, 30), xycoords="axes fraction", textcoords="offset points", fontsize=13, fontweight="bold"
    )
    axes.annotate(
        " · ".join(facts),
        (0, 1),
        (0, 16),
        xycoords="axes fraction",
        textcoords="offset points",
        color=_FAINT,
        fontsize=9,
    )


def _named_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows from the top, in order."""
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)


def _colour_of(job_id: str) -> str:
    return _JOB_COLOURS[zlib.crc32(job_id.encode()) % len(_JOB_COLOURS)]


def _shortened(text: str, most: int) -> str:
    """Shorten a name in its middle to so many characters; to nothing if it would say nothing any more."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return "" if most < _LEAST_NAME else f"{text[: most - 1 - end]}\u2026{text[len(text) - end :]}"


def _bar(contender: Contender) -> str:
    """Return the bar colour; our own policies stand out."""
    return _COLOURS[0] if contender.ours else _COLOURS[4]


def _unit(length_s: float) -> tuple[float, str]:
    if length_s > 4 * 86400:
        return 86400.0, "days"
    return (_HOUR_S, "hours") if length_s > 2 * _HOUR_S else (60.0, "minutes")


def _time_of_most(played: Played, part: float) -> float:
    ends = sorted(r.finished_s for r in played.result.records if r.finished_s is not None)
    return ends[min(len(ends) - 1, int(part * len(ends)))] if ends else played.result.end_s


def _hours_axis(axes: Axes) -> None:
    """Set ticks at round times such as 1 h or 1 week."""
    named = {
        1 / 60: "1 min",
        0.25: "15 min",
        1: "1 h",
        4: "4 h",
        24: "1 d",
        168: "1 week",
        720: "30 d",
        5 / 60: "5 min",
    }
    low, high = axes.get_xlim()
    shown = {at: text for at, text in sorted(named.items()) if low <= at <= high}
    if len(shown) > 1:
        axes.set_xticks(list(shown), list(shown.values()))
        axes.set_xticks([], minor=True)
        axes.set_xlim(low, high)
