"""What an author writes as a deadline, and the moment that comes of it; the arithmetic as the log shows it."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, timezone
from zoneinfo import ZoneInfo

import pendulum
import pytest

from elasticflow_airflow.deadlines import (
    DeadlineError,
    check_deadline,
    resolve,
    show_duration,
    training_deadline,
    zone_from,
    zone_name,
)

BERLIN = pendulum.timezone("Europe/Berlin")


def at(text: str, zone=BERLIN) -> pendulum.DateTime:
    return pendulum.parse(text, tz=zone)


@pytest.mark.parametrize(
    ("given", "due", "expected"),
    [
        ("07:30", "2026-11-20T05:00", "2026-11-20T07:30"),
        ("07:30", "2026-11-20T07:30", "2026-11-21T07:30"),  # the first after, not at
        ("07:30", "2026-11-20T23:00", "2026-11-21T07:30"),
        ("7:30:15", "2026-12-31T08:00", "2027-01-01T07:30:15"),
        (time(7, 30), "2026-11-20T05:00", "2026-11-20T07:30"),
        (timedelta(hours=2), "2026-11-20T05:00", "2026-11-20T07:00"),
        (datetime(2026, 11, 22, 6, 0), "2026-11-20T05:00", "2026-11-22T06:00"),
        ("2026-11-22T06:00", "2026-11-20T05:00", "2026-11-22T06:00"),
        ("2026-11-22T06:00+00:00", "2026-11-20T05:00", "2026-11-22T07:00"),
        ("2026-11-22 06:00", "2026-11-20T05:00", "2026-11-22T06:00"),
        (datetime(2026, 11, 22, 6, 0, tzinfo=UTC), "2026-11-20T05:00", "2026-11-22T07:00"),
    ],
)
def test_every_form(given, due, expected):
    assert resolve(given, run_due=at(due), timezone=BERLIN) == at(expected)


def test_the_time_of_day_is_the_dags_whatever_zone_the_run_is_given_in():
    due = at("2026-11-20T23:30", pendulum.UTC)  # 00:30 in Berlin, the next day
    assert resolve("07:30", run_due=due, timezone=BERLIN) == at("2026-11-21T07:30")
    assert resolve("07:30", run_due=due, timezone=ZoneInfo("Asia/Tokyo")) == at("2026-11-22T07:30", "Asia/Tokyo")
    assert resolve("23:45", run_due=due, timezone=UTC) == at("2026-11-20T23:45", pendulum.UTC)


def test_a_skipped_time_moves_on_by_what_the_clocks_skip():
    """On 2026-03-29 Berlin's clocks go from 02:00 to 03:00."""
    assert resolve("02:30", run_due=at("2026-03-29T00:10"), timezone=BERLIN) == at("2026-03-29T03:30")


def test_of_a_doubled_time_the_first_after_the_run_is_due_counts():
    """On 2026-10-25 Berlin's clocks go from 03:00 back to 02:00."""
    first, second = at("2026-10-25T00:30", "UTC"), at("2026-10-25T01:30", "UTC")
    for due, expected in (
        (at("2026-10-25T00:10"), first),
        (first, second),
        (second, at("2026-10-26T02:30")),
    ):
        # By timestamp: Python never finds a doubled wall-clock time equal to one of another zone.
        assert resolve("02:30", run_due=due, timezone=BERLIN).timestamp() == expected.timestamp()


def test_a_duration_is_real_time_across_a_change_of_clocks():
    due = at("2026-03-29T01:00")
    assert resolve(timedelta(hours=2), run_due=due, timezone=BERLIN).timestamp() == due.timestamp() + 7200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("soon", "deadline='soon' is not a time of day"),
        ("24:00", "the last of a day is 23:59:59"),
        ("2026-11-22", "write 2026-11-22T07:30"),
        (7.5, "deadline=7.5 is a float"),
        (True, "is a bool"),
        (timedelta(0), "give a positive duration"),
    ],
)
def test_nonsense_is_refused_at_parse(given, words):
    with pytest.raises(DeadlineError, match=words):
        check_deadline(given, "deadline")


def test_templates_are_left_for_later():
    check_deadline("{{ params.by }}", "deadline")
    with pytest.raises(DeadlineError, match="deadline=''"):
        resolve("", run_due=at("2026-11-20T05:00"), timezone=BERLIN)


def test_arithmetic_of_a_downstream_deadline_is_one_readable_block():
    found = training_deadline(
        "07:30",
        run_due=at("2026-11-20T05:00"),
        timezone=BERLIN,
        deadline_of="publish",
        downstream_reserve=timedelta(minutes=5),
        now=at("2026-11-20T05:01"),
    )
    assert found.at == at("2026-11-20T07:25")
    assert found.target_at == at("2026-11-20T07:30")
    text = found.arithmetic.splitlines()
    assert text[0] == "Deadline:"
    assert "task 'publish' must end by" in text[1]
    assert "Fri 2026-11-20 07:30 CET" in text[1]
    assert "deadline='07:30', its first after the run was due at Fri 2026-11-20 05:00 CET" in text[1]
    assert "5 min" in text[2]
    assert "the training must end by" in text[3]
    assert "Fri 2026-11-20 07:25 CET" in text[3]
    assert "in 2 h 24 min" in text[4]


def test_own_deadline_needs_no_reserve():
    found = training_deadline(
        timedelta(hours=1),
        run_due=at("2026-11-20T05:00"),
        timezone=BERLIN,
        downstream_reserve=timedelta(minutes=5),
        now=at("2026-11-20T07:00"),
    )
    assert found.at == found.target_at == at("2026-11-20T06:00")
    assert "1 h ago" in found.arithmetic


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (90061, "1 d 1 h"), (-90, "-1 min 30 s")],
)
def test_durations_show_two_units(seconds, text):
    assert show_duration(seconds) == text


@pytest.mark.parametrize("zone", [BERLIN, pendulum.UTC, timezone(timedelta(hours=-3)), ZoneInfo("Asia/Tokyo")])
def test_zones_travel_as_text(zone):
    moment = datetime(2026, 7, 1, tzinfo=zone)
    assert moment.astimezone(zone_from(zone_name(zone))).utcoffset() == moment.utcoffset()
