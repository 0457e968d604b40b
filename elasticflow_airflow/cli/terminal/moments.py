"""Parses times as people write them on a command line. Pure: the caller passes the current time."""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta

import typer

from elasticflow_airflow.api.training_options import MOMENT_FORMS
from elasticflow_airflow.bounds import time_problem

_DURATION = re.compile(r"\+?(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def moment_of(text: str, now: float, *, option: str = "--deadline") -> float:
    """Parse a time after ``now``, both in UTC seconds. Raises typer.BadParameter, naming the option."""
    text = text.strip()
    here = datetime.fromtimestamp(now).astimezone()
    too_far = typer.BadParameter(f"{option}={text[:40]!r} is too far away: choose an earlier moment")
    if (length := _DURATION.fullmatch(text)) and length[0].strip("+"):
        try:
            days, hours, minutes, seconds = (int(part or 0) for part in length.groups())
            at = now + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
            datetime.fromtimestamp(at).astimezone()
        except (OverflowError, ValueError, OSError):
            raise too_far from None
    elif of_day := _TIME.fullmatch(text):
        hour, minute, second = (int(part or 0) for part in of_day.groups())
        try:
            wanted = time(hour, minute, second)
        except ValueError as error:
            raise typer.BadParameter(f"{option}={text!r} is no time of day: {error}") from error
        day = here.date()
        at = datetime.combine(day, wanted).astimezone().timestamp()
        if at <= now:
            at = datetime.combine(day + timedelta(days=1), wanted).astimezone().timestamp()
    else:
        try:
            at = datetime.fromisoformat(text).astimezone().timestamp()
        except OverflowError:
            raise too_far from None
        except ValueError as error:
            raise typer.BadParameter(f"{option}={text!r} is no moment; write {MOMENT_FORMS}") from error
    if at <= now:
        raise typer.BadParameter(f"{option}={text!r} is in the past: choose a later moment")
    if time_problem(at) is not None:
        raise too_far
    return at
