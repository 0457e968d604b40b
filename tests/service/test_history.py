"""How long a run is taken to be before it says so itself."""

from __future__ import annotations

import pytest

from elasticflow_airflow.service.history import length_of
from elasticflow_airflow.service.models import HistoryRow
from elasticflow_airflow.wire import Length

PAST = HistoryRow(total_steps=760, epochs=20)


@pytest.mark.parametrize(
    ("length", "past", "steps"),
    [
        (Length(steps=5), PAST, 5),
        (Length(epochs=2, samples=33), PAST, 4),
        (Length(epochs=20), PAST, 760),
        (Length(epochs=200_000), PAST, 7_600_000),
        (Length(epochs=3), HistoryRow(total_steps=100, epochs=7), 43),
        (Length(epochs=3), HistoryRow(total_steps=None, epochs=None), None),
        (Length(epochs=3), None, None),
    ],
)
def test_a_run_that_does_not_say_is_as_long_an_epoch_as_the_one_before(length, past, steps):
    assert length_of(length, 32, past) == steps
