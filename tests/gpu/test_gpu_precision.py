"""Mixed precision on the GPU: a loss scale that is too high at first, and found alike by any number of workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.gang import Gang

from elasticflow_airflow.runtime.stepping.devices import make_repeatable
from elasticflow_airflow.runtime.stepping.optimizer_step import seed_everything

pytestmark = pytest.mark.gpu


def losses(gang: Gang) -> dict[str, str]:
    lines = [line.split() for line in gang.output() if line.startswith("STEP")]
    return {step: loss for _, step, _, loss, _ in lines}


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_losses_are_the_same_with_any_number_of_workers(gpu_gang: Callable[..., Gang], precision: str) -> None:
    found = []
    for workers in (1, 2):
        gang = gpu_gang(precision)
        gang.plan(*(f"w{rank}" for rank in range(workers)))
        assert set(gang.finish().values()) == {0}, gang.story()
        found.append(losses(gang))
    assert found[0] == found[1]
    assert len(found[0]) > 10


def test_dropout_draws_by_its_seed_alone() -> None:
    make_repeatable(torch.device("cuda"))
    ones = torch.ones(1 << 16, device="cuda")

    def mask(seed: int) -> torch.Tensor:
        seed_everything(seed)
        return torch.nn.functional.dropout(ones, 0.5)

    first = mask(11)
    torch.randn(1000, device="cuda")  # whatever else was drawn before
    assert torch.equal(mask(11), first)
    assert not torch.equal(mask(12), first)
