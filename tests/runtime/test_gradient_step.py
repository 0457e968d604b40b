"""What makes one step of the logical workers' passes, on its own."""

from __future__ import annotations

import torch
from torch import nn

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.stepping.gradient_step import GradientStep


def test_a_worker_without_samples_in_its_first_step_can_scale_gradients() -> None:
    # The last batch of an epoch may be that small, and a worker may begin with it.
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    GradientStep(Registered(model, {"optimizer": optimizer, "scaler": scaler}), 2, consistent=True)
    before = model.weight.detach().clone()
    model.weight.grad = torch.full((1, 2), 16.0)  # the sum of the others' gradients
    model.bias.grad = torch.zeros(1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before - 2.0)
