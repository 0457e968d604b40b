"""What a modelled session reports about a target loss: the curve so far, and when the target will be reached.

Pure functions over a modelled gang; its loss falls as final + (initial - final) / (1 + step / 20), or as given.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour, Modelled

_HALF_STEPS = 20.0


def modelled_loss(model: FakeBehaviour, step: float) -> float:
    """Return the loss after ``step`` steps."""
    if model.losses:
        return _between(list(model.losses.items()), step)
    return model.final_loss + (model.initial_loss - model.final_loss) / (1.0 + step / _HALF_STEPS)


def reached_at(gang: Modelled) -> int | None:
    """Return the step after which the loss is at the target; None when it never is, or there is no target."""
    model, target = gang.behaviour, gang.spec.session.target_loss
    if target is None:
        return None
    if model.losses:
        return _first_at_most(list(model.losses.items()), target)
    if target <= model.final_loss:
        return None
    ratio = (model.initial_loss - model.final_loss) / (target - model.final_loss)
    return max(0, math.ceil(_HALF_STEPS * (ratio - 1.0) - 1e-9))


def _between(losses: list[tuple[int, float]], step: float) -> float:
    """Interpolate the given losses linearly at a step; outside their range the loss is constant."""
    for (left, before), (right, after) in pairwise(losses):
        if left <= step <= right:
            return before + (after - before) * (step - left) / (right - left)
    return losses[0][1] if step < losses[0][0] else losses[-1][1]


def _first_at_most(losses: list[tuple[int, float]], target: float) -> int | None:
    """Return the first step whose loss is at most the target; None when there is none."""
    if losses[0][1] <= target:
        return losses[0][0]
    for (left, before), (right, after) in pairwise(losses):
        if after <= target:
            return math.ceil(left + (right - left) * (before - target) / (before - after) - 1e-9)
    return None


def said_of_target(gang: Modelled, *, ended: bool = False) -> dict[str, Any]:
    """Return the target data of a report; empty without a target."""
    model, target, step, total = gang.behaviour, gang.spec.session.target_loss, gang.step, gang.total_steps
    if target is None:
        return {}
    step = math.floor(step + 1e-9)
    width = max(1, math.ceil(step / 100))
    middles = [(number + 0.5) * width for number in range(int(step // width))]
    data: dict[str, Any] = {
        "smoothed_loss": modelled_loss(model, step),
        "loss_curve": {"width": width, "losses": [modelled_loss(model, middle) for middle in middles]},
    }
    if ended:
        return data | {"target_reached": modelled_loss(model, step) <= target + 1e-9}
    data["target_loss"] = target
    reached = reached_at(gang)
    if reached is not None and model.target_error is not None:
        left = max(0.0, reached * model.target_length - step)
        data["steps_left"] = left if total is None else min(left, total - step)
        data["steps_left_error"] = reached * model.target_length * model.target_error
    return data
