"""What goes into a checkpoint comes out again; what does not fit, or would run code, is refused."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticflow_airflow.runtime import checkpoint, load_weights
from elasticflow_airflow.runtime.checkpoint import Registered
from elasticflow_airflow.runtime.manifest import CheckpointError, publish, writing


class Malicious:
    """Unpickling this makes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class Counter:
    """Something of the user's own with a state."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def trained(steps: int = 3) -> Registered:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Registered(model, {"optimizer": optimizer, "scheduler": scheduler, "counter": Counter(steps)})


def save(registered: Registered, folder: Path, step: int = 3):
    return checkpoint.save(registered, folder, incarnation=1, generation=1, step=step, metadata={"epoch": 0})


def test_everything_registered_comes_back(tmp_path):
    before = trained()
    info = save(before, tmp_path)
    after = trained(steps=0)
    checkpoint.load(after, info)
    for name, tensor in before.model.state_dict().items():
        assert torch.equal(after.model.state_dict()[name], tensor)
    assert str(after.others["optimizer"].state_dict()) == str(before.others["optimizer"].state_dict())
    assert after.others["scheduler"].state_dict() == before.others["scheduler"].state_dict()
    assert after.others["counter"].state_dict() == {"value": 3}


def test_weights_alone(tmp_path):
    before = trained()
    info = save(before, tmp_path)
    model = trained(steps=0).model
    assert load_weights(model, info.path) == info
    assert torch.equal(model[0].weight, before.model[0].weight)


def test_a_malicious_pickle_runs_nothing(tmp_path):
    trace = tmp_path / "executed"
    with writing(tmp_path, 1, 1) as folder:
        (folder / "model.pt").write_bytes(pickle.dumps(Malicious(trace), protocol=2))
        torch.save({"optimizer": Malicious(trace)}, folder / "training.pt")
        info = publish(folder, tmp_path, incarnation=1, generation=1, step=1, metadata={})
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be read: Weights only load failed"):
        load_weights(nn.Linear(1, 1), info.path)
    assert not trace.exists()
    torch.save(nn.Linear(1, 1).state_dict(), info.path / "model.pt")
    with pytest.raises(CheckpointError, match=r"training\.pt cannot be read"):
        checkpoint.load(Registered(nn.Linear(1, 1), {"optimizer": Counter(0)}), info)
    assert not trace.exists()


def test_a_state_that_could_not_be_loaded_again_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"step 3 could not be read back \(training\.pt\).*Let every state_dict\(\)"
    ):
        save(Registered(nn.Linear(1, 1), {"mine": Counter(Malicious(tmp_path / "executed"))}), tmp_path / "checkpoints")
    assert not list((tmp_path / "checkpoints").glob("*/*"))
    assert not (tmp_path / "executed").exists()


def test_what_is_registered_now_must_have_been_saved(tmp_path):
    info = save(Registered(nn.Linear(1, 1), {"optimizer": Counter(1)}), tmp_path)
    now = Registered(nn.Linear(1, 1), {"optimizer": Counter(1), "scheduler": Counter(2), "ema": Counter(3)})
    with pytest.raises(
        CheckpointError, match=r"has no state for ema, scheduler: it was written by a script that did not"
    ):
        checkpoint.load(now, info)


def test_what_is_no_longer_registered_is_left(tmp_path):
    info = save(trained(), tmp_path)
    checkpoint.load(Registered(trained(0).model), info)


def test_a_model_that_does_not_fit_says_where(tmp_path):
    info = save(Registered(nn.Linear(2, 3)), tmp_path)
    with pytest.raises(
        CheckpointError, match=r"step-000000000003 does not fit the model:(.|\n)*size mismatch for weight"
    ):
        load_weights(nn.Linear(3, 2), info.path)
    with pytest.raises(CheckpointError, match=r"does not fit the model:(.|\n)*Missing key"):
        load_weights(nn.Sequential(nn.Linear(2, 3)), info.path)


def test_an_optimizer_that_does_not_fit_is_named(tmp_path):
    model = nn.Linear(2, 3)
    info = save(Registered(model, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}), tmp_path)
    other = Registered(model, {"optimizer": torch.optim.SGD([model.weight], lr=0.1)})
    with pytest.raises(CheckpointError, match="does not fit optimizer: loaded state dict contains a parameter group"):
        checkpoint.load(other, info)


def test_weights_are_checked_byte_by_byte_before_they_are_read(tmp_path):
    info = save(trained(), tmp_path)
    content = bytearray((info.path / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (info.path / "model.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.pt is damaged \(SHA-256 differs\)"):
        load_weights(trained(0).model, info.path)
    with pytest.raises(CheckpointError, match=r"nowhere: manifest\.json is missing"):
        load_weights(trained(0).model, tmp_path / "nowhere")


def test_a_file_that_holds_something_else(tmp_path):
    with writing(tmp_path, 1, 1) as folder:
        torch.save([1, 2], folder / "model.pt")
        info = publish(folder, tmp_path, incarnation=1, generation=1, step=1, metadata={})
    with pytest.raises(CheckpointError, match=r"model\.pt does not hold a state dictionary"):
        load_weights(nn.Linear(1, 1), info.path)
