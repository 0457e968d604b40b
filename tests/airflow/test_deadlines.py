"""What an author writes as a deadline, and the moment that comes of it; the arithmetic as the log shows it."""

from __future__ import annotations

from datetime import UTC, datetime, time, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pendulum
import pytest

from elasticflow_airflow.deadlines.parse import (
    DeadlineError,
    Reserve,
    TimeFromDag,
    check_deadline,
    declared_reserve,
    resolve,
    training_deadline,
    written,
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


@pytest.mark.parametrize("given", ["2026-03-29T02:30", "2026-03-29 02:30:00", datetime(2026, 3, 29, 2, 30)])
def test_a_skipped_moment_moves_on_like_a_skipped_time_of_day(given):
    assert resolve(given, run_due=at("2026-03-29T00:10"), timezone=BERLIN) == at("2026-03-29T03:30")
    assert resolve(given, run_due=at("2026-03-28T12:00"), timezone=ZoneInfo("Europe/Berlin")) == at("2026-03-29T03:30")


@pytest.mark.parametrize("given", ["2026-10-25T02:30", "2026-10-25 02:30:00", datetime(2026, 10, 25, 2, 30)])
def test_of_a_doubled_moment_the_first_after_the_run_is_due_counts(given):
    first, second = at("2026-10-25T00:30", "UTC"), at("2026-10-25T01:30", "UTC")
    for due, expected in ((at("2026-10-24T12:00"), first), (first, second), (at("2026-10-26T00:00"), second)):
        assert resolve(given, run_due=due, timezone=BERLIN).timestamp() == expected.timestamp()


def test_a_naive_moment_of_pendulum_says_nothing_of_which_it_means():
    given = pendulum.naive(2026, 10, 25, 2, 30)
    found = resolve(given, run_due=at("2026-10-24T12:00", "UTC"), timezone=pendulum.timezone("Europe/Berlin"))
    assert found.timestamp() == at("2026-10-25T00:30", "UTC").timestamp()


@pytest.mark.parametrize("fold", [0, 1])
def test_a_moment_that_says_which_it_means_is_that_one(fold):
    zoned = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    expected = at(f"2026-10-25T0{fold}:30", "UTC").timestamp()
    assert resolve(zoned, run_due=at("2026-10-26T00:00"), timezone=NEW_YORK).timestamp() == expected
    skipped = datetime(2026, 3, 29, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
    moved = at("2026-03-29T01:30", "UTC").timestamp()
    assert resolve(skipped, run_due=at("2026-03-29T00:10"), timezone=NEW_YORK).timestamp() == moved


def test_the_second_of_a_doubled_moment_can_be_asked_for():
    second = datetime(2026, 10, 25, 2, 30, fold=1)
    found = resolve(second, run_due=at("2026-10-24T12:00"), timezone=BERLIN)
    assert found.timestamp() == at("2026-10-25T01:30", "UTC").timestamp()


@pytest.mark.parametrize("zone", [UTC, ZoneInfo("UTC"), pendulum.UTC, timezone(timedelta(0))])
def test_a_time_of_day_with_a_zone_is_of_that_zone(zone):
    given = time(7, 30, tzinfo=zone)
    check_deadline(given, "deadline")
    found = resolve(given, run_due=at("2026-07-01T05:00"), timezone=BERLIN)
    assert (found.hour, found.minute, found.timezone_name) == (9, 30, "Europe/Berlin")
    assert resolve(given, run_due=at("2026-07-01T09:30"), timezone=BERLIN) == at("2026-07-02T09:30")


def test_a_time_of_day_of_another_zone_follows_the_clocks_there():
    given = time(2, 30, tzinfo=ZoneInfo("America/New_York"))
    due = at("2026-03-08T06:00", "UTC")
    skipped = resolve(given, run_due=due, timezone=BERLIN)
    assert skipped.timestamp() == at("2026-03-08T07:30", "UTC").timestamp()
    assert "America/New_York" in training_deadline(given, run_due=due, timezone=BERLIN, now=due).arithmetic


def test_times_of_day_in_two_zones_are_two_deadlines():
    zones = (None, UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Tokyo"))
    assert len({written(time(7, 30, tzinfo=zone)) for zone in zones}) == len(zones)
    assert written(time(7, 30)) == "07:30:00"


class Nowhere(tzinfo):
    """A zone that says nothing of itself."""

    def utcoffset(self, when):
        return None

    def __repr__(self):
        return "Nowhere()"


class Hour(Nowhere):
    """An offset that has no name and asks for a date."""

    def utcoffset(self, when):
        return None if when is None else timedelta(hours=1)

    def dst(self, when):
        return timedelta(0)


def test_a_datetime_may_be_in_a_zone_without_a_name():
    given = datetime(2026, 11, 22, 6, 0, tzinfo=Hour())
    assert resolve(given, run_due=at("2026-11-20T05:00"), timezone=BERLIN) == at("2026-11-22T06:00")


def test_a_time_of_day_in_a_zone_that_nobody_can_read_is_refused_at_parse():
    with pytest.raises(DeadlineError, match=r"deadline=.*Nowhere\(\).*give a ZoneInfo or UTC"):
        check_deadline(time(7, 30, tzinfo=Nowhere()), "deadline")


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


@pytest.mark.parametrize("given", ["9999-12-31T23:59:59", datetime.max])
def test_a_moment_beyond_all_calendars_is_refused(given):
    with pytest.raises(DeadlineError, match="is beyond all calendars"):
        resolve(given, run_due=at("2026-11-20T05:00"), timezone=pendulum.timezone("America/New_York"))


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
        reserve=declared_reserve(timedelta(minutes=5), "publish"),
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


def test_arithmetic_says_what_was_observed_and_what_the_margin_is():
    observed = Reserve(after_s=1200.0, said="p95 of the last 7 runs", margin_s=120.0, margin_said="10% of it")
    found = training_deadline(
        TimeFromDag(at=at("2026-11-20T06:00", "UTC"), said="the next run of the DAG is due then"),
        run_due=at("2026-11-19T07:00"),
        timezone=BERLIN,
        deadline_of="dag_run",
        reserve=observed,
        now=at("2026-11-19T07:00"),
    )
    assert found.arithmetic == (
        "Deadline:\n"
        "  the DAG run must end by   Fri 2026-11-20 07:00 CET  (the next run of the DAG is due then)\n"
        "  minus what comes after    20 min                    (p95 of the last 7 runs)\n"
        "  minus a margin            2 min                     (10% of it)\n"
        "  the training must end by  Fri 2026-11-20 06:38 CET\n"
        "  which is                  in 23 h 38 min"
    )
    assert found.at == at("2026-11-20T06:38")


NEW_YORK = pendulum.timezone("America/New_York")


@pytest.mark.parametrize(
    ("given", "due", "expected"),
    [
        # Spring: on 2026-03-08 New York's clocks go from 02:00 to 03:00. Noted in UTC, as wall clocks are ambiguous.
        ("02:30", "2026-03-08T06:00", "2026-03-08T07:30"),  # 03:30 EDT
        ("02:30", "2026-03-08T07:30", "2026-03-09T06:30"),  # the next day's 02:30 EDT
        ("03:30", "2026-03-08T06:00", "2026-03-08T07:30"),
        ("01:59:59", "2026-03-08T06:00", "2026-03-08T06:59:59"),
        # Autumn: on 2026-11-01 they go from 02:00 back to 01:00: 01:30 comes twice.
        ("01:30", "2026-11-01T04:00", "2026-11-01T05:30"),  # the first, EDT
        ("01:30", "2026-11-01T05:30", "2026-11-01T06:30"),  # the second, EST
        ("01:30", "2026-11-01T06:30", "2026-11-02T06:30"),
        ("02:30", "2026-11-01T04:00", "2026-11-01T07:30"),
    ],
)
def test_daylight_saving_in_another_zone(given, due, expected):
    found = resolve(given, run_due=at(due, "UTC"), timezone=NEW_YORK)
    assert found.timestamp() == at(expected, "UTC").timestamp()


def test_a_half_hour_change_of_clocks():
    """On 2026-10-04 the clocks of Lord Howe Island go from 02:00 to 02:30, on 2026-04-05 from 02:00 back to 01:30."""
    howe = pendulum.timezone("Australia/Lord_Howe")
    spring = resolve("02:15", run_due=at("2026-10-04T00:00", howe), timezone=howe)
    assert (spring.hour, spring.minute) == (2, 45)
    first = resolve("01:45", run_due=at("2026-04-05T00:00", howe), timezone=howe)
    second = resolve("01:45", run_due=first, timezone=howe)
    assert second.timestamp() - first.timestamp() == 1800


def test_own_deadline_needs_no_reserve():
    found = training_deadline(
        timedelta(hours=1),
        run_due=at("2026-11-20T05:00"),
        timezone=BERLIN,
        now=at("2026-11-20T07:00"),
    )
    assert found.at == found.target_at == at("2026-11-20T06:00")
    assert "1 h ago" in found.arithmetic


@pytest.mark.parametrize("zone", [BERLIN, pendulum.UTC, timezone(timedelta(hours=-3)), ZoneInfo("Asia/Tokyo")])
def test_zones_travel_as_text(zone):
    moment = datetime(2026, 7, 1, tzinfo=zone)
    assert moment.astimezone(zone_from(zone_name(zone))).utcoffset() == moment.utcoffset()
