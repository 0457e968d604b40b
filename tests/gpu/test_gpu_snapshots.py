"""Checkpoints of a state on the GPU: copied into pinned memory, and restored to what they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered, load
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
from elasticflow_airflow.runtime.checkpoints.state_copy import SharedBuffer
from elasticflow_airflow.runtime.stores.manifest import verify_candidate

pytestmark = pytest.mark.gpu


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    one = Checkpointer(tmp_path / "checkpoints", incarnation=1)
    yield one
    one.close()


def built() -> tuple[Registered, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4)
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=2)
    return Registered(model, {"optimizer": optimizer, "scaler": scaler}), optimizer, scaler


def step(registered: Registered, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, seed: int) -> None:
    inputs = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).cuda()
    with torch.autocast("cuda", torch.float16):
        loss = registered.model(inputs).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def state_of(registered: Registered) -> list[torch.Tensor]:
    model = [t.detach().cpu().clone() for t in registered.model.state_dict().values()]
    optimizer = registered.others["optimizer"].state_dict()["state"].values()
    return model + [t.detach().cpu().clone() for one in optimizer for t in one.values() if isinstance(t, torch.Tensor)]


def test_a_restored_state_is_the_saved_one_though_training_went_on(checkpointer: Checkpointer, tmp_path: Path) -> None:
    registered, optimizer, scaler = built()
    for seed in range(3):
        step(registered, optimizer, scaler, seed)
    checkpointer.prepare(registered)
    saved_state, saved_scale = state_of(registered), scaler.get_scale()
    assert checkpointer.save(registered, generation=1, step=3, metadata={}) is None
    for seed in range(3, 6):  # while it is being written
        step(registered, optimizer, scaler, seed)
    (saved,) = checkpointer.flush()
    assert all(buffer.is_pinned for buffer in checkpointer._buffers)
    other, _, other_scaler = built()
    load(other, verify_candidate(tmp_path / "checkpoints" / saved.name))
    assert all(torch.equal(a, b) for a, b in zip(state_of(other), saved_state, strict=True))
    assert other_scaler.get_scale() == saved_scale


def test_training_that_resumes_ends_as_one_that_did_not_stop(checkpointer: Checkpointer, tmp_path: Path) -> None:
    torch.backends.cudnn.deterministic = True
    registered, optimizer, scaler = built()
    for seed in range(2):
        step(registered, optimizer, scaler, seed)
    saved = checkpointer.save(registered, generation=1, step=2, metadata={}, wait=True)
    assert saved is not None
    step(registered, optimizer, scaler, 2)
    other, other_optimizer, other_scaler = built()
    load(other, verify_candidate(tmp_path / "checkpoints" / saved.name))
    step(other, other_optimizer, other_scaler, 2)
    assert all(torch.equal(a, b) for a, b in zip(state_of(other), state_of(registered), strict=True))


def test_memory_can_be_locked_and_given_back_again_and_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for number in range(3):
        buffer = SharedBuffer(number, 1 << 24)
        buffer.touch(pin_for=device)
        assert buffer.is_pinned
        buffer.close()
    assert torch.ones(4, device=device).sum().item() == 4.0  # no error of CUDA's was left behind
