"""Times and durations have one way to be written."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest

from elasticflow_airflow.times import duration, local_moment, moment, zoned_moment


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.04, "0 s"),
        (0.3, "0.3 s"),
        (5, "5 s"),
        (9.96, "10 s"),
        (42.4, "42 s"),
        (368, "6 min 8 s"),
        (59.6, "1 min"),
        (3599.3, "59 min 59 s"),
        (3599.7, "1 h"),
        (85000, "23 h 37 min"),
        (86385, "1 d"),
        (1e6, "11 d 14 h"),
        (4500, "1 h 15 min"),
        (86400 + 59, "1 d"),
        (3 * 86400 + 4 * 3600 + 59, "3 d 4 h"),
        (-90, "-1 min 30 s"),
        (math.inf, "for ever"),
        (1e15, "11574074074 d 2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("at_s", "text"),
    [
        (0, "1970-01-01 00:00 UTC"),
        (1_780_000_205.2, "2026-05-28 20:30:05 UTC"),
        (1_780_000_200.0, "2026-05-28 20:30 UTC"),
        (1_780_000_199.7, "2026-05-28 20:30 UTC"),
        (1e13, "never"),
        (math.inf, "never"),
    ],
)
def test_moments(at_s: float, text: str) -> None:
    assert moment(at_s) == text


@pytest.mark.parametrize("part_s", [0.0, 0.4, 0.6])
def test_every_way_of_writing_a_moment_names_the_same_second(part_s: float) -> None:
    at_s = 1_780_000_205.0 + part_s
    clock = f"20:30:0{5 + round(part_s)}"
    assert clock in moment(at_s)
    assert clock in zoned_moment(datetime.fromtimestamp(at_s, UTC))
    assert local_moment(at_s)[-2:] == clock[-2:]


def test_a_table_has_a_dash_for_no_moment() -> None:
    assert local_moment(None) == "-"
    assert len(local_moment(1_780_000_200.0)) == len("2026-05-28 20:30:00")
    assert local_moment(1e18).startswith("9999-12-")
