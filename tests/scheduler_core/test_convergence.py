"""How long a training will be, from its losses: what fits recover, what error they state, what else is there."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow_airflow.scheduler_core.convergence import (
    FEWEST_POINTS,
    POINTS,
    ConvergenceModel,
    LossCurve,
    Prediction,
    _fit,
    _points,
    _recency,
    predict,
)

MODELS = st.builds(
    ConvergenceModel,
    b0=st.floats(1e-4, 0.1),
    b1=st.floats(0.1, 2.0),
    b2=st.floats(0.0, 2.0),
)


def curve_of(model: ConvergenceModel, steps: int, *, noise: float = 0.0, seed: int = 0) -> LossCurve:
    """Losses of every step, averaged to about 64 points."""
    width = max(1, steps // POINTS)
    whole = steps // width * width
    number = np.arange(1, whole + 1)
    losses = 1.0 / (model.b0 * number + model.b1) + model.b2
    losses = losses + np.random.default_rng(seed).normal(0.0, noise, whole)
    return LossCurve(width, tuple(losses.reshape(-1, width).mean(axis=1).tolist()))


def fit(curve: LossCurve) -> ConvergenceModel:
    points = _points(curve.coarser(POINTS))
    return _fit(*points, _recency(points[0]))


# -- the model ----------------------------------------------------------------------------------------------------


@given(MODELS, st.floats(0.05, 0.95))
def test_steps_to_a_loss_are_where_the_model_has_it(model: ConvergenceModel, part: float) -> None:
    target = model.b2 + part / model.b1
    assert model.loss(model.steps_to(target)) == pytest.approx(target, rel=1e-6)


@given(MODELS)
def test_below_its_floor_a_model_never_comes(model: ConvergenceModel) -> None:
    assert math.isinf(model.steps_to(model.b2))
    assert model.steps_to(model.loss(0.0)) == 0.0


def test_a_lower_loss_takes_longer() -> None:
    model = ConvergenceModel(0.01, 0.5, 0.3)
    steps = [model.steps_to(target) for target in (1.5, 1.0, 0.6, 0.4, 0.31)]
    assert steps == sorted(steps)


# -- the fit --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(MODELS)
def test_an_undisturbed_curve_is_recovered(model: ConvergenceModel) -> None:
    end = int(max(200.0, model.steps_to(model.b2 + 0.3 / model.b1)))
    found = fit(curve_of(model, end))
    target = model.b2 + 0.2 / model.b1
    assert found.steps_to(target) == pytest.approx(model.steps_to(target), rel=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=FEWEST_POINTS, max_size=80))
def test_whatever_the_losses_are_the_bounds_hold(losses: list[float]) -> None:
    found = fit(LossCurve(1.0, tuple(losses)))
    assert found.b0 >= 0.0
    assert found.b1 > 0.0
    assert math.isfinite(found.b2)
    if min(losses) >= 0.0:
        assert found.b2 >= 0.0


def test_outliers_count_little() -> None:
    model = ConvergenceModel(0.01, 0.5, 0.3)
    curve = curve_of(model, 640, noise=0.02)
    spoilt = list(curve.losses)
    for index in (7, 21, 40, 55):
        spoilt[index] += 3.0
    found, undisturbed = fit(LossCurve(curve.width, tuple(spoilt))), fit(curve)
    assert found.steps_to(0.4) == pytest.approx(undisturbed.steps_to(0.4), rel=0.35)


def test_few_points_make_no_fit() -> None:
    assert predict(LossCurve(1.0, (3.0, 2.0, 1.0)), 0.5) is None


def test_a_flat_curve_never_falls() -> None:
    found = predict(LossCurve(10.0, (2.0,) * 30), 1.0)
    assert found is not None
    assert math.isinf(found.steps)
    assert math.isinf(found.error)


@pytest.mark.parametrize(("width", "losses"), [(0.0, (1.0,)), (math.nan, ()), (1.0, (math.nan,)), (1.0, (math.inf,))])
def test_what_is_no_curve_is_refused(width: float, losses: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"width=|finite"):
        LossCurve(width, losses)


@given(st.integers(1, 300), st.integers(1, 64))
def test_a_coarser_curve_is_the_same_curve(points: int, most: int) -> None:
    curve = LossCurve(2.0, tuple(float(number) for number in range(points)))
    coarser = curve.coarser(most)
    assert 1 <= len(coarser.losses) <= most
    times = round(coarser.width / curve.width)
    assert coarser.losses[0] == pytest.approx(sum(range(times)) / times)
    assert curve.steps - coarser.width < coarser.steps <= curve.steps


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [ConvergenceModel(0.01, 0.3, 0.5), ConvergenceModel(0.001, 0.4, 0.0), ConvergenceModel(0.05, 0.2, 2.0)]
)
@pytest.mark.parametrize("part", [0.3, 0.6])
def test_the_error_that_a_prediction_states_holds(model: ConvergenceModel, part: float) -> None:
    target = model.b2 + 0.1 / model.b1
    truth = model.steps_to(target)
    within = 0
    for seed in range(20):
        found = predict(curve_of(model, int(truth * part), noise=0.1, seed=seed), target)
        assert found is not None
        within += abs(math.log(found.steps / truth)) <= 2 * found.error
    assert within >= 17  # of 20, for what should be 19


def test_the_error_falls_as_the_run_goes_on() -> None:
    model = ConvergenceModel(0.01, 0.3, 0.5)
    target = 0.8
    truth = model.steps_to(target)
    errors = []
    for part in (0.1, 0.3, 0.6, 0.9):
        found = [predict(curve_of(model, int(truth * part), noise=0.1, seed=seed), target) for seed in range(9)]
        errors.append(float(np.median([math.inf if one is None else one.error for one in found])))
    assert errors == sorted(errors, reverse=True)


def test_early_on_the_earlier_run_is_trusted_and_later_the_fit() -> None:
    model = ConvergenceModel(0.004, 0.3, 0.5)
    target = 0.8
    truth = model.steps_to(target)
    earlier = curve_of(model, int(truth * 1.2), noise=0.1, seed=99)
    early = predict(curve_of(model, int(truth * 0.05), noise=0.3, seed=1), target, earlier=earlier)
    late = predict(curve_of(model, int(truth * 0.9), noise=0.1, seed=1), target, earlier=earlier)
    assert early is not None
    assert late is not None
    assert (early.source, late.source) == ("earlier", "fit")
    assert early.steps == pytest.approx(truth, rel=0.4)
    assert late.steps == pytest.approx(truth, rel=0.15)


def test_before_the_first_step_there_is_the_earlier_run_alone() -> None:
    earlier = LossCurve(10.0, tuple(10.0 / (number + 1) for number in range(50)))
    found = predict(LossCurve(1.0, ()), 1.0, earlier=earlier)
    assert found is not None
    assert found.source == "earlier"
    assert found.steps == pytest.approx(95.0)
    assert predict(LossCurve(1.0, ()), 1.0) is None


def test_a_run_that_takes_twice_as_long_so_far_is_expected_to_go_on_so() -> None:
    model, slower = ConvergenceModel(0.01, 0.3, 0.5), ConvergenceModel(0.005, 0.3, 0.5)
    earlier = curve_of(model, 600)
    found = predict(LossCurve(1.0, curve_of(slower, 120).coarser(6).losses[:6]), 0.8, earlier=earlier)
    assert found is not None
    # Only six points: too few for a fit.
    assert found.source == "earlier"


def test_what_is_promised_is_on_the_late_side() -> None:
    found = Prediction(steps=100.0, error=0.2, source="fit")
    assert found.at_most() == pytest.approx(100.0 * math.exp(0.2))
    assert found.steps_left(30.0) == 70.0
    assert found.steps_left(130.0) == 0.0
    assert math.isinf(Prediction(steps=100.0, error=math.inf, source="fit").at_most())


def test_a_real_training_is_foreseen() -> None:
    """Logistic regression by stochastic gradient descent, labels with noise: a curve that the model did not make."""
    random = np.random.default_rng(4)
    inputs = random.normal(size=(4000, 20)) * np.linspace(0.2, 1.5, 20)
    chance = 1.0 / (1.0 + np.exp(-inputs @ random.normal(size=20)))
    labels = (random.random(4000) < chance).astype(float)
    weights, losses = np.zeros(20), []
    for _ in range(3000):
        pick = random.integers(0, 4000, 32)
        said = 1.0 / (1.0 + np.exp(-inputs[pick] @ weights))
        losses.append(float(-np.mean(labels[pick] * np.log(said) + (1 - labels[pick]) * np.log(1 - said))))
        weights += 0.005 * inputs[pick].T @ (labels[pick] - said) / 32
    smooth = np.convolve(losses, np.ones(200) / 200, mode="valid")
    target = float(smooth[1800])
    truth = 1900.0  # the middle of that mean
    for done in (600, 1000, 1500):
        width = done // 50
        means = np.asarray(losses[: done // width * width]).reshape(-1, width).mean(axis=1)
        found = predict(LossCurve(width, tuple(means.tolist())), target)
        assert found is not None
        assert abs(math.log(found.steps / truth)) <= 2.0 * found.error, (done, found)
