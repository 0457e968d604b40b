"""What a worker measures of itself: each second counts for one activity, and the noise scale is what it is called."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, cycle, pairwise, repeat

import pytest
import torch

from elasticflow_airflow.runtime.stepping import measuring
from elasticflow_airflow.runtime.stepping.measuring import (
    Activity,
    DeviceTimer,
    GradientNorms,
    Meter,
    NoiseScale,
    NormSchedule,
    Stopwatch,
    TimedFetcher,
)


class Clock:
    """Shows what a test sets it to, in seconds."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(torch.device("cpu"), clock)


def test_each_second_counts_for_one_activity(clock):
    watch = Stopwatch(clock)
    for activity, seconds in [(Activity.DATA, 1.0), (Activity.COMPUTE, 2.0), (Activity.DATA, 4.0)]:
        watch.enter(activity)
        clock.now_s += seconds
    assert watch.enter(Activity.PAUSE) is Activity.DATA
    clock.now_s += 8.0
    seconds = watch.read()
    assert (seconds["data_s"], seconds["compute_s"], seconds["pause_s"]) == (5.0, 2.0, 8.0)
    assert sum(seconds.values()) == 15.0
    assert set(seconds) == {f"{activity}_s" for activity in Activity}


def test_no_more_is_shifted_than_there_is(clock):
    watch = Stopwatch(clock)
    watch.enter(Activity.REDUCE)
    clock.now_s += 2.0
    watch.enter(Activity.WAIT)
    watch.shift(Activity.REDUCE, Activity.COMPUTE, 0.5)
    assert (watch.read()["reduce_s"], watch.read()["compute_s"]) == (1.5, 0.5)
    watch.shift(Activity.REDUCE, Activity.COMPUTE, 9.0)
    assert (watch.read()["reduce_s"], watch.read()["compute_s"]) == (0.0, 2.0)


def step(meter: Meter, clock: Clock, *, samples: int = 32, own: int = 8) -> None:
    """A step of four seconds: one of each kind that it has."""
    meter.enter(Activity.DATA)
    clock.now_s += 1.0
    meter.step_begins(samples, own)
    clock.now_s += 1.0
    meter.reducing()
    clock.now_s += 1.0
    meter.reduced()
    clock.now_s += 1.0
    meter.step_done()


def test_a_worker_tells_of_its_own_samples_and_progress_of_all(meter, clock):
    meter.begin()
    for _ in range(3):
        step(meter, clock)
    told = meter.worker()
    assert told is not None
    assert (told["window_steps"], told["samples"]) == (3, 24)
    assert [told[name] for name in ("data_s", "compute_s", "reduce_s", "wait_s", "pause_s")] == [3.0, 3.0, 3.0, 3.0, 0]
    assert told["memory_bytes"] > 10_000_000
    assert meter.progress()["samples"] == 96


def test_each_window_begins_where_the_one_before_ended(meter, clock):
    meter.begin()
    step(meter, clock)
    assert meter.worker()["data_s"] == meter.progress()["data_s"] == 1.0
    assert meter.worker() is None  # no step since
    step(meter, clock, samples=16, own=4)
    assert (meter.worker()["samples"], meter.progress()["samples"]) == (4, 16)


def test_an_attempt_that_is_made_again_counts_once(meter, clock):
    meter.begin()
    meter.step_begins(32, 8)
    clock.now_s += 1.0
    meter.enter(Activity.PAUSE)
    clock.now_s += 5.0
    step(meter, clock, own=16)
    told = meter.worker()
    assert (told["window_steps"], told["samples"], told["compute_s"], told["pause_s"]) == (1, 16, 2.0, 5.0)


def test_getting_ready_is_no_part_of_the_training(meter, clock):
    clock.now_s += 60.0
    meter.begin()
    step(meter, clock)
    assert meter.worker()["other_s"] == 0.0
    assert not meter.worker_is_due(10.0)
    clock.now_s += 10.0
    assert meter.worker_is_due(10.0)


def test_waiting_for_samples_is_time_for_data(meter, clock):
    class Slow:
        def get(self, ticket: int) -> int:
            clock.now_s += 2.0
            return ticket + 1

        def expect(self, _tickets: object) -> None:
            clock.now_s += 1.0

    fetcher = TimedFetcher(Slow(), meter)
    meter.begin()
    fetcher.expect([1])
    assert fetcher.get(1) == 2
    step(meter, clock)
    assert (meter.worker()["data_s"], meter._watch.activity) == (4.0, Activity.OTHER)


class Event:
    """Of a device that is a second behind its host."""

    done = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, _end: Event) -> float:
        return 1500.0


def test_what_a_device_computed_after_its_host_had_queued_it(monkeypatch):
    events: list[Event] = []

    def make() -> Event:
        events.append(Event())
        return events[-1]

    timer = DeviceTimer(make)
    assert timer.take() == 0.0  # no step yet
    at_s = iter([10.0, 10.5, 20.0, 20.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(at_s))
    timer.begin()
    timer.end()
    assert timer.take() == 1.0
    assert timer.take() == 0.0
    timer.begin()
    timer.end()
    events[1].done = False
    assert timer.take() == 0.0  # not known yet: nobody waits for it
    assert DeviceTimer.of(torch.device("cpu")) is None


# -- the noise scale ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shares", "share"), [(2, 16), (8, 4)])
def test_the_noise_scale_is_found_again_in_gradients_that_have_it(shares, share):
    """Gradients of single samples: a mean of squared norm 4, and 500 independent numbers of variance 0.64 about it."""
    torch.manual_seed(0)
    dimensions, variance, mean = 500, 0.64, torch.zeros(500)
    mean[0] = 2.0
    scale = NoiseScale()
    for _ in range(2000):
        means = mean + torch.randn(shares, dimensions) * (variance / share) ** 0.5
        squares = means.square().sum(1).tolist()
        scale.add(squares, float(means.mean(0).square().sum()), big_batch=shares * share)
    assert scale.value == pytest.approx(dimensions * variance / 4.0, rel=0.15)
    assert scale.measured == 2000


def test_a_step_by_hand():
    """Two shares of one sample each, gradients (3, 1) and (1, 3): their mean is (2, 2)."""
    scale = NoiseScale()
    scale.add([10.0, 10.0], 8.0, big_batch=2)
    # |G|^2 = (2 * 8 - 1 * 10) / (2 - 1) = 6; tr(Sigma) = (10 - 8) / (1 - 1/2) = 4.
    assert scale.value == pytest.approx(4.0 / 6.0)


def test_without_a_gradient_that_shows_through_the_noise_it_is_unknown():
    scale = NoiseScale()
    assert scale.value is None
    scale.add([10.0, 10.0], 5.0, big_batch=2)  # |G|^2 is 0
    assert scale.value is None


@pytest.mark.parametrize(("squares", "batch"), [([1.0], 8), ([1.0, 1.0, 1.0], 8)])
def test_shares_that_are_not_equal_are_refused(squares, batch):
    with pytest.raises(ValueError, match="the shares must be equal, and two at least"):
        NoiseScale().add(squares, 1.0, big_batch=batch)


def test_norms_of_leaves_and_of_their_sum():
    norms = GradientNorms()
    norms.begin(enabled=True)
    norms.leaf([torch.tensor([3.0, 4.0]), None, torch.tensor([], dtype=torch.float32)])
    norms.leaf([None])
    assert norms.leaves() == [25.0, 0.0]
    assert norms.total([torch.full((2, 2), 2.0, dtype=torch.bfloat16)]) == 16.0
    assert norms.seconds > 0
    norms.begin(enabled=False)
    norms.leaf([torch.ones(1)])
    assert (norms.leaves(), norms.seconds) == ([], 0.0)


@pytest.fixture
def perf(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def measured_steps(perf: Clock, costs_s: Iterable[float], steps: int) -> dict[int, float]:
    """What the norms cost, by step: one after another of ``costs_s``. A step takes a tenth of a second without them."""
    schedule, measured, costs = NormSchedule(), {}, iter(costs_s)
    for number in range(steps):
        norms_s = next(costs) if schedule.due else 0.0
        if norms_s:
            measured[number] = norms_s
        perf.now_s += 0.1 + norms_s
        schedule.step_done(norms_s)
    return measured


@pytest.mark.parametrize(("norms_s", "every"), [(0.0001, 8), (0.0074, 25), (0.0748, 250)])
def test_norms_take_no_more_than_their_budget(perf, norms_s, every):
    """The dearer norms are, the rarer."""
    measured = measured_steps(perf, repeat(norms_s), 1000)
    assert len(measured) >= 3
    assert {later - before for before, later in pairwise(measured)} == {every}


def test_dear_and_cheap_norms_together_keep_the_budget(perf):
    measured = measured_steps(perf, cycle([0.002, 0.03, 0.002]), 5000)
    assert len(measured) > 50
    assert 0.9 < sum(measured.values()) / (5000 * 0.1 * measuring.NORMS_BUDGET) < 1.1


def test_a_machine_that_stood_still_over_norms_does_not_end_them(perf):
    measured = measured_steps(perf, chain([1000.0], repeat(0.003)), 1000)
    assert len(measured) > 30
