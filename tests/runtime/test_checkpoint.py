"""What goes into a checkpoint comes out again; what does not fit, or would run code, is refused."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from elasticflow_airflow.runtime import load_weights
from elasticflow_airflow.runtime.checkpoints import checkpoint
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.tensor_bytes import bytes_of
from elasticflow_airflow.runtime.stores import file_format
from elasticflow_airflow.runtime.stores.file_format import Blob
from elasticflow_airflow.runtime.stores.manifest import (
    CandidateInfo,
    CheckpointError,
    adopt,
    promote,
    promoted,
    publish,
    verify_candidate,
    writing,
)


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


def state_comes_back(tmp_path: Path, value: object) -> object:
    info = save(Registered(nn.Linear(1, 1), {"mine": Counter(value)}), tmp_path)
    after = Counter(None)
    checkpoint.load(Registered(nn.Linear(1, 1), {"mine": after}), info)
    return after.value


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)], ids=str)
def test_tensors_of_every_kind(tmp_path, dtype, shape):
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = state_comes_back(tmp_path, tensor)
    assert isinstance(back, torch.Tensor)
    assert (back.dtype, back.shape) == (dtype, torch.Size(shape))
    assert bytes_of(back).tobytes() == bytes_of(tensor).tobytes()


def test_tensors_that_do_not_lie_in_order(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    views = [base.t(), base[::2], base[:, 1], base.flip(0), torch.ones(1).expand(5), torch.tensor([1 + 2j]).conj()]
    back = state_comes_back(tmp_path, views)
    assert isinstance(back, list)
    for one, two in zip(views, back, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        -(10**40),
        0.1,
        float("inf"),
        -float("inf"),
        "text \ud800 \0",
        b"\0bytes\xff",
        (),
        (1, [2, (3,)]),
        {0: {"step": 3}, "a": {}, (1, "x"): None, 2.5: 1, None: 2, True: 3},
        collections.Counter({2: 1, 5: 2}),
        {"tensor": 0, "dict": [], "list": {"float": "nan"}},
    ],
    ids=str,
)
def test_values_of_every_kind(tmp_path, value):
    back = state_comes_back(tmp_path, value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_comes_back(tmp_path):
    back = state_comes_back(tmp_path, [float("nan"), -0.0, torch.tensor(float("nan"))])
    assert repr(back) == "[nan, -0.0, tensor(nan)]"


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    tensor = torch.randn(1000)
    info = save(Registered(nn.Linear(1, 1), {"mine": Counter([tensor, tensor, tensor.view(10, 100)])}), tmp_path)
    assert 8000 < info.size_bytes < 11000
    after = Counter(None)
    checkpoint.load(Registered(nn.Linear(1, 1), {"mine": after}), info)
    assert isinstance(after.value, list)
    assert after.value[0].data_ptr() == after.value[1].data_ptr()
    assert torch.equal(after.value[2].view(-1), tensor)


def test_versions_of_modules_are_kept(tmp_path):
    """What a module's load_state_dict() goes by, when it must read what an older one of itself has written."""
    seen = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            seen.append(local_metadata.get("version"))
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    info = save(Registered(Versioned(1, 1)), tmp_path)
    load_weights(Versioned(1, 1), info.path)
    assert seen == [7]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"deep": [1, {"x": object()}]}, r"at training/mine/value/deep/1/x is a object: let every state_dict\(\)"),
        (Path("/"), r"at training/mine/value is a PosixPath"),
        ({"f": lambda: None}, r"value/f is a function"),
        (torch.float32, r"value is a dtype"),
        (torch.eye(2).to_sparse(), r"the tensor at training/mine/value is of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), r"is without data \(on the meta device\): a checkpoint holds plain dense"),
    ],
)
def test_what_would_need_code_to_be_loaded_is_refused_when_it_is_saved(tmp_path, value, message):
    with pytest.raises(CheckpointError, match=message):
        save(Registered(nn.Linear(1, 1), {"mine": Counter(value)}), tmp_path / "checkpoints")
    assert not (tmp_path / "checkpoints").exists()


# -- checkpoints of before ----------------------------------------------------------------------------------------


def written_by_format_1(registered: Registered, checkpoints: Path) -> CandidateInfo:
    """As version 1 wrote them: torch.save, and a manifest of that format."""
    with writing(checkpoints, 1, 3) as folder:
        torch.save(registered.model.state_dict(), folder / "model.pt")
        torch.save({name: part.state_dict() for name, part in registered.others.items()}, folder / "training.pt")
        info = publish(folder, checkpoints, incarnation=1, generation=1, step=3, metadata={"epoch": 0})
    body = json.loads((info.path / "manifest.json").read_text())
    del body["digest"]
    body["format"] = 1
    body["digest"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (info.path / "manifest.json").write_text(json.dumps(body))
    return verify_candidate(info.path)


def test_old_checkpoints_can_be_read_and_handed_on(tmp_path):
    before = trained()
    info = written_by_format_1(before, tmp_path)
    for found in (info, adopt(info.path, tmp_path / "next", incarnation=2)):
        after = trained(steps=0)
        checkpoint.load(after, found)
        assert torch.equal(after.model[0].weight, before.model[0].weight)
        assert str(after.others["optimizer"].state_dict()) == str(before.others["optimizer"].state_dict())
        assert torch.equal(checkpoint.read_weights(found.path)["0.weight"], before.model[0].weight)


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


@pytest.mark.parametrize("content", [[1, 2], "text", {"state": 5}, {"dict": 5}, {"tensor": 9}, {"eval": "exit()"}])
def test_a_container_that_holds_something_else(tmp_path, content):
    with writing(tmp_path, 1, 1) as folder:
        with (folder / "model.tensors").open("wb") as stream:
            file_format.write(stream, content, [])
        info = publish(folder, tmp_path, incarnation=1, generation=1, step=1, metadata={})
    with pytest.raises(CheckpointError, match=r"model\.tensors (does not hold a state dictionary|holds no state)"):
        load_weights(nn.Linear(1, 1), info.path)


@pytest.mark.parametrize(("dtype", "shape"), [("float99", (4,)), ("Tensor", (4,)), ("float32", (4,)), ("uint8", (2,))])
def test_tensors_that_cannot_be(tmp_path, dtype, shape):
    with writing(tmp_path, 1, 1) as folder:
        with (folder / "model.tensors").open("wb") as stream:
            file_format.write(stream, {"dict": []}, [Blob((0,), dtype, shape, memoryview(b"abcd"))])
        info = publish(folder, tmp_path, incarnation=1, generation=1, step=1, metadata={})
    with pytest.raises(CheckpointError, match=r"model\.tensors (holds tensors of dtype|is wrong about tensor)"):
        load_weights(nn.Linear(1, 1), info.path)


# -- what does not fit --------------------------------------------------------------------------------------------


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
        CheckpointError,
        match=r"step-000000000003 does not fit the model:(.|\n)*size mismatch for weight(.|\n)*same layers",
    ):
        load_weights(nn.Linear(3, 2), info.path)
    with pytest.raises(CheckpointError, match=r"does not fit the model:(.|\n)*Missing key"):
        load_weights(nn.Sequential(nn.Linear(2, 3)), info.path)


def test_an_optimizer_that_does_not_fit_is_named(tmp_path):
    model = nn.Linear(2, 3)
    info = save(Registered(model, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}), tmp_path)
    other = Registered(model, {"optimizer": torch.optim.SGD([model.weight], lr=0.1)})
    with pytest.raises(
        CheckpointError, match=r"does not fit optimizer: loaded state dict contains a parameter group.*Build what"
    ):
        checkpoint.load(other, info)


def test_another_precision_is_another_model(tmp_path):
    info = save(trained(), tmp_path)
    half = trained(0)
    half.model.bfloat16()
    with pytest.raises(
        CheckpointError,
        match=r"does not fit the model: 0.weight is torch.bfloat16 here and torch.float32 there, .*more",
    ):
        checkpoint.load(half, info)
    load_weights(half.model, info.path)  # a new training may begin so
    assert half.model[0].weight.dtype == torch.bfloat16


def test_another_number_of_logical_workers_is_another_training(tmp_path):
    info = checkpoint.save(trained(), tmp_path, incarnation=1, generation=1, step=3, metadata={"logical_workers": 8})
    checkpoint.load(trained(0), info, logical_workers=8)
    checkpoint.load(trained(0), info)
    with pytest.raises(
        CheckpointError, match=r"was written with logical_workers=8, this training has 4: .*Give logical_workers=8"
    ):
        checkpoint.load(trained(0), info, logical_workers=4)


def test_weights_are_checked_byte_by_byte_before_they_are_read(tmp_path):
    info = save(trained(), tmp_path)
    file = info.path / "model.tensors"
    content = bytearray(file.read_bytes())
    content[20 + 64] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.tensors tensor state/0\.weight is damaged \(SHA-256 differs\)"):
        load_weights(trained(0).model, info.path)
    with pytest.raises(CheckpointError, match=r"model\.tensors tensor 0 is damaged"):
        checkpoint.load(trained(0), info)
    with pytest.raises(CheckpointError, match=r"nowhere: manifest\.json is missing"):
        load_weights(trained(0).model, tmp_path / "nowhere")


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_is_damaged_the_one_before_is_used(tmp_path_factory, data):
    """A bit flipped, or a file torn, anywhere in a checkpoint of real training."""
    folder = tmp_path_factory.mktemp("damage")
    before, newest = save(trained(), folder, step=3), save(trained(), folder, step=4)
    promote(folder, newest)
    file = newest.path / data.draw(st.sampled_from(["manifest.json", "model.tensors", "training.tensors"]))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(0, 1 << 20)) % len(content)
    if data.draw(st.booleans()):
        content[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[position:]
    file.write_bytes(content)
    warnings: list[str] = []
    found = promoted(folder, warnings.append)
    if found == newest:
        assert file.name == "manifest.json"  # white space: it says the same
        return
    assert found == before
    assert str(newest.path) in warnings[0]
    checkpoint.load(trained(0), before)
