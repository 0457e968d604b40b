"""A loss to train to: what is smoothed how, when the training ends, and what it says of the steps that are left."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.stepping.loss_target import MOST_POINTS, SMOOTHING_STEPS, LossTrack, Outlook


def test_the_smoothed_loss_is_a_mean_first_and_a_moving_average_then():
    track = LossTrack(0.0)
    losses = [float(number % 7) for number in range(SMOOTHING_STEPS)]
    for loss in losses:
        track.add(loss)
    assert track.smoothed == pytest.approx(sum(losses) / SMOOTHING_STEPS)
    before = track.smoothed
    track.add(10.0)
    assert track.smoothed == pytest.approx(before + (10.0 - before) / SMOOTHING_STEPS)


def test_no_lucky_batch_ends_a_training():
    track = LossTrack(1.0)
    for step in range(1, SMOOTHING_STEPS):
        track.add(0.5)
        assert not track.reached, step
    track.add(float("nan"))
    assert not track.reached
    track.add(0.5)
    assert track.reached


def test_without_a_target_nothing_is_reached():
    track = LossTrack(None)
    track.add(0.0)
    assert (track.reached, track.state(), Outlook(track).look()) == (False, None, {})


@pytest.mark.parametrize("target", [float("nan"), float("inf")])
def test_a_target_that_is_no_number_is_refused(target):
    with pytest.raises(ValueError, match="target_loss"):
        LossTrack(target)


def test_a_long_curve_stays_short_and_right():
    track = LossTrack(0.0)
    steps = MOST_POINTS * 5 + 3
    for step in range(steps):
        track.add(float(step))
    curve = track.curve
    assert MOST_POINTS / 2 <= len(curve["losses"]) < MOST_POINTS
    width = curve["width"]
    assert curve["losses"] == [width * number + (width - 1) / 2 for number in range(steps // width)]


def test_the_state_goes_on_to_the_bit_after_json():
    torch.manual_seed(1)
    losses = torch.rand(500, dtype=torch.float64).tolist()
    undisturbed, first = LossTrack(0.4), LossTrack(0.4)
    for loss in losses:
        undisturbed.add(loss)
    for loss in losses[:333]:
        first.add(loss)
    second = LossTrack(0.4)
    second.restore(json.loads(json.dumps(first.state())))
    for loss in losses[333:]:
        second.add(loss)
    assert second.state() == undisturbed.state()


def test_what_was_trained_without_a_target_starts_anew():
    track = LossTrack(1.0)
    track.restore(None)
    assert track.smoothed is None


def test_the_outlook_tells_the_steps_that_are_left():
    track = LossTrack(0.6)
    outlook = Outlook(track)
    for step in range(1, 401):
        track.add(1.0 / (0.01 * step + 0.5) + 0.2)
    found = outlook.look()
    assert found["target_loss"] == 0.6
    assert found["steps_left"] + 400 == pytest.approx((1.0 / 0.4 - 0.5) / 0.01, rel=0.3) or found["steps_left"] == 0
    assert len(found["loss_curve"]["losses"]) >= 64
    # The next fit comes when this one has cost less than its share of the time.
    assert "steps_left" not in outlook.look()


# -- in a session --------------------------------------------------------------------------------------------------


class Linear:
    """A regression whose loss falls steadily; 64 samples, 8 a step."""

    def __init__(self, **arguments) -> None:
        torch.manual_seed(3)
        inputs = torch.randn(64, 4)
        self.session = runtime.init(**arguments)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.session.register(model=self.model, optimizer=self.optimizer)
        dataset = TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]))
        self.loader = self.session.dataloader(dataset, global_batch_size=8)
        self.losses: list[float] = []

    def run(self, epochs: int | None = None, most: int = 100_000) -> Linear:
        for _ in self.session.epochs(epochs):
            for batch in self.loader:
                if len(self.losses) == most:
                    return self
                with self.session.step() as step:
                    for inputs, targets in step.split(batch):
                        step.backward(nn.functional.mse_loss(self.model(inputs), targets))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.losses.append(step.loss)
        return self


def expected_end(losses: list[float], target: float) -> int:
    track = LossTrack(target)
    for number, loss in enumerate(losses, 1):
        track.add(loss)
        if track.reached:
            return number
    raise AssertionError(f"never at {target}: {track.smoothed}")


@pytest.mark.usefixtures("session_globals")
def test_a_training_ends_at_its_target_in_the_middle_of_an_epoch(capsys):
    run = Linear(target_loss=0.5).run()
    assert run.session.steps_done == len(run.losses) == expected_end(run.losses, 0.5)
    run.session.finish()
    out = capsys.readouterr().out
    assert "target_reached=True" in out
    assert "loss_curve" not in out


@pytest.mark.usefixtures("session_globals")
def test_the_length_ends_it_where_the_target_is_out_of_reach():
    run = Linear(target_loss=1e-30, epochs=5).run()
    assert run.session.steps_done == run.session.total_steps == 40
    run.session.finish()


@pytest.mark.usefixtures("session_globals")
def test_a_training_that_resumes_ends_at_the_same_step():
    whole = Linear(target_loss=0.5, checkpoint_dir="whole").run()
    broken = Linear(target_loss=0.5, checkpoint_dir="broken", checkpoint_interval_s=0).run(most=len(whole.losses) // 2)
    broken.session._core.at_exit()
    resumed = Linear(target_loss=0.5, checkpoint_dir="broken").run()
    assert 0 < len(resumed.losses) < len(whole.losses)
    assert resumed.session.steps_done == whole.session.steps_done
    assert torch.equal(resumed.model.weight, whole.model.weight)
    again = Linear(target_loss=0.5, checkpoint_dir="whole")
    whole.session.finish()
    again.run()


@pytest.mark.usefixtures("session_globals")
def test_somebody_must_say_how_long_to_train():
    with pytest.raises(ValueError, match="target_loss="):
        Linear().run()
