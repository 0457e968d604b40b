"""The price functions of OASiS and AOnline, and what a booking costs by them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.work import Holding
from elasticflow_airflow.scheduler_core.simulator.baselines.common.prices import Bill, PriceRange, Stretch, stretches


def test_a_price_rises_exponentially_from_the_least_to_the_most_that_jobs_would_pay() -> None:
    prices = PriceRange()
    assert prices.price(0.5) == 0.0  # nobody has come yet
    prices.see(1.0, 10.0, 40.0)
    assert (prices.lowest, prices.highest) == (1 / 160, 1 / 10)
    assert prices.price(0.0) == pytest.approx(1 / 160)
    assert prices.price(1.0) == pytest.approx(1 / 10)
    assert prices.price(0.5) == pytest.approx(math.sqrt(1 / 160 / 10))
    prices.see(1.0, 100.0, 100.0)  # the range only widens
    assert (prices.lowest, prices.highest) == (1 / 400, 1 / 10)
    prices.see(0.0, 1.0, 1.0)  # worth nothing: says nothing about what slots are worth
    assert prices.highest == 1 / 10


def test_an_empty_cluster_is_cheaper_than_any_job_is_worth_and_a_full_one_dearer() -> None:
    prices = PriceRange()
    for value, least, most in ((1.0, 5.0, 9.0), (3.0, 400.0, 900.0), (0.1, 10.0, 10.0)):
        prices.see(value, least, most)
        assert prices.price(0.0) * most < value
        assert prices.price(1.0) * least >= value * (1.0 - 1e-12)


def test_stretches_are_cut_where_bookings_change(nodes: Any) -> None:
    layout = Layout(nodes(1, 4))
    book = Bookings.of(layout, 0.0, [Holding(10.0, 30.0, 0b11)])
    prices = PriceRange(lowest=1.0, highest=16.0)
    assert stretches(book, 4, prices, 0.0, 40.0) == [
        Stretch(0.0, 10.0, 0b1111, 1.0),
        Stretch(10.0, 30.0, 0b1100, 4.0),
        Stretch(30.0, 40.0, 0b1111, 1.0),
    ]


def test_a_bill_is_size_times_time_times_price() -> None:
    bill = Bill([Stretch(0.0, 10.0, 0, 1.0), Stretch(10.0, 30.0, 0, 4.0)])
    assert bill.of([Holding(0.0, 10.0, 0b1)]) == 10.0
    assert bill.of([Holding(5.0, 15.0, 0b11)]) == 2 * (5.0 + 20.0)
    assert bill.of([Holding(0.0, 5.0, 0b1), Holding(20.0, 30.0, 0b1111)]) == 5.0 + 160.0
