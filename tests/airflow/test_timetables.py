"""When runs are due, of every kind of schedule, as DAG files hold it and as serialized DAGs do."""

from __future__ import annotations

from datetime import datetime, timedelta

import pendulum
import pytest
from airflow.sdk import (
    DAG,
    Asset,
    AssetOrTimeSchedule,
    CronDataIntervalTimetable,
    CronTriggerTimetable,
    DeltaTriggerTimetable,
)
from airflow.sdk import EventsTimetable as SdkEventsTimetable
from airflow.timetables.events import EventsTimetable

from elasticflow_airflow.deadlines.timetables import KnownRun, TimetableError, next_run, next_runs, recurs

BERLIN = "Europe/Berlin"
ASSET = Asset("rows")


def at(text: str, zone: str = "UTC") -> pendulum.DateTime:
    return pendulum.parse(text, tz=zone)


def timetable_of(schedule):
    start = pendulum.datetime(2026, 1, 1, tz=BERLIN)
    return DAG("any", schedule=schedule, start_date=start, max_active_runs=1).timetable


def core_of(schedule):
    from airflow.serialization.encoders import coerce_to_core_timetable

    return coerce_to_core_timetable(timetable_of(schedule))


def dues(runs) -> list[datetime]:
    return [run.run_after for run in runs]


@pytest.mark.parametrize("of", [timetable_of, core_of])
@pytest.mark.parametrize(
    ("schedule", "after", "expected"),
    [
        ("0 5 * * *", "2026-11-20T06:00", "2026-11-21T04:00"),
        ("@daily", "2026-11-20T06:00", "2026-11-20T23:00"),
        ("@weekly", "2026-11-20T06:00", "2026-11-21T23:00"),
        (CronTriggerTimetable("30 2 * * *", timezone="UTC"), "2026-11-20T02:30", "2026-11-21T02:30"),
        (timedelta(hours=3), "2026-11-20T06:00", "2026-11-20T09:00"),
        (DeltaTriggerTimetable(timedelta(hours=3)), "2026-11-20T06:00", "2026-11-20T09:00"),
        (EventsTimetable([at("2026-11-21T07:00"), at("2026-11-25T07:00")]), "2026-11-20T06:00", "2026-11-21T07:00"),
        (
            AssetOrTimeSchedule(timetable=CronTriggerTimetable("0 5 * * *", timezone="UTC"), assets=[ASSET]),
            "2026-11-20T06:00",
            "2026-11-21T05:00",
        ),
    ],
)
def test_the_next_run_of_every_schedule_by_the_clock(schedule, after, expected, of):
    assert recurs(of(schedule))
    assert next_run(of(schedule), after=at(after)).timestamp() == at(expected).timestamp()


@pytest.mark.parametrize("schedule", [None, "@once", "@continuous", [ASSET]])
def test_what_does_not_recur_has_no_next_run(schedule):
    timetable = timetable_of(schedule)
    assert not recurs(timetable)
    assert next_run(timetable, after=at("2026-11-20T06:00")) is None


def test_a_timedelta_counts_on_from_the_run_that_is_known():
    known = KnownRun(
        run_after=at("2026-11-20T05:10"), interval_start=at("2026-11-20T02:10"), interval_end=at("2026-11-20T05:10")
    )
    found = next_runs(timetable_of(timedelta(hours=3)), after=at("2026-11-20T06:00"), known=known, most=2)
    assert dues(found) == [at("2026-11-20T08:10"), at("2026-11-20T11:10")]


def test_a_run_of_long_ago_is_no_reason_to_ask_for_a_million_runs():
    known = KnownRun(run_after=at("2016-01-01"), interval_start=at("2015-12-31T23:59"), interval_end=at("2016-01-01"))
    found = next_runs(timetable_of("* * * * *"), after=at("2026-11-20T06:00"), known=known, most=3)
    assert dues(found) == [at("2026-11-20T06:01"), at("2026-11-20T06:02"), at("2026-11-20T06:03")]


def test_a_window_and_its_most_runs():
    minutely = timetable_of("* * * * *")
    after, until = at("2026-11-20T06:00"), at("2026-11-22T06:00")
    assert len(next_runs(minutely, after=after, until=until)) == 200
    daily = next_runs(timetable_of("0 5 * * *"), after=after, until=until)
    assert dues(daily) == [at("2026-11-21T04:00"), at("2026-11-22T04:00")]
    assert next_runs(timetable_of("@monthly"), after=after, until=until) == []


def test_a_run_that_is_due_brings_its_data_interval():
    timetable = CronDataIntervalTimetable("0 5 * * *", timezone=pendulum.UTC)
    (run,) = next_runs(timetable, after=at("2026-11-20T06:00"), most=1)
    assert (run.interval_start, run.interval_end) == (at("2026-11-20T05:00"), at("2026-11-21T05:00"))


def test_nothing_is_due_after_the_dags_end():
    daily = CronTriggerTimetable("0 5 * * *", timezone="UTC")
    assert next_run(daily, after=at("2026-11-20T06:00"), latest=at("2026-11-21T04:00")) is None
    assert next_run(daily, after=at("2026-11-20T06:00"), latest=at("2026-11-21T06:00")) is not None


def test_daylight_saving_is_the_timetables_affair():
    """05:00 in Berlin is 04:00 UTC in winter and 03:00 in summer."""
    found = next_runs(timetable_of("0 5 * * *"), after=at("2026-03-27T12:00"), most=2)
    assert [due.in_timezone("UTC").hour for due in dues(found)] == [4, 3]


def test_a_timetable_that_airflow_itself_cannot_read_is_named():
    """Airflow 3.3.2 writes the SDK's EventsTimetable without its summary, and then cannot read it: KeyError."""
    try:
        assert next_run(timetable_of(SdkEventsTimetable([at("2026-11-21")])), after=at("2026-11-20")) is not None
    except TimetableError as error:
        assert "timetable EventsTimetable cannot be read here" in str(error)  # noqa: PT017 - it may be mended


def test_a_timetable_that_cannot_answer_is_named():
    from airflow.timetables.base import Timetable

    class Broken(Timetable):
        def infer_manual_data_interval(self, *, run_after):
            raise RuntimeError("the holiday calendar is away")

    with pytest.raises(TimetableError, match=r"timetable Broken cannot say when runs are due.*holiday"):
        next_run(Broken(), after=datetime(2026, 1, 1, tzinfo=pendulum.UTC))
