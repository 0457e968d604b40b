"""Layers whose forward pass changes buffers: averaged over the logical workers where that is done, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.gang.process_group import WorkerGroup
from elasticflow_airflow.runtime.stepping import running_statistics
from elasticflow_airflow.runtime.stepping.running_statistics import RunningStatistics

LARGE = (1 << 20) + 1

Change = Callable[["Stateful", Tensor], None]


class Stateful(nn.Module):
    """A linear layer with a buffer; a test says how, and from which pass on, forward passes change it."""

    def __init__(self, state: Tensor, change: Change, *, persistent: bool = True, since: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("state", state, persistent=persistent)
        self.passes, self._since, self._change = 0, since, change

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        if self.passes > self._since:
            self._change(self, inputs)
        return self.linear(inputs)


def train(model: nn.Module, between: Callable[[int], None] = lambda step: None, **options: Any) -> Any:
    """Train 12 steps of two logical workers, alone; returns the session."""
    session = runtime.init(**{"steps": 12, "logical_workers": 2, "checkpoint_interval_s": 1e6, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.register(model=nn.Sequential(model), optimizer=optimizer)
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    loader = session.dataloader(TensorDataset(inputs, inputs[:, :2]), global_batch_size=4)
    for _ in session.epochs():
        for batch in loader:
            with session.step() as step:
                for inputs, targets in step.split(batch):
                    step.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            between(session.steps_done)
    return session


def in_place(model: Stateful, _: Tensor) -> None:
    model.state += 1


def by_data(model: Stateful, _: Tensor) -> None:
    model.state.data.add_(1)


def rebinds(model: Stateful, _: Tensor) -> None:
    model.state = model.state + 1


def flips(model: Stateful, _: Tensor) -> None:
    model.state.fill_(True)


def grows(model: Stateful, _: Tensor) -> None:
    model.state = torch.cat([model.state, model.state[:1]])


REFUSED: dict[str, tuple[Tensor, Change]] = {
    "a large average": (torch.zeros(LARGE), in_place),
    "a large average, by .data": (torch.zeros(LARGE), by_data),
    "counts": (torch.zeros(5, dtype=torch.int64), in_place),
    "a ring's pointer": (torch.zeros(1, dtype=torch.int64), rebinds),
    "a flag": (torch.tensor(False), flips),
    "complex numbers": (torch.zeros(3, dtype=torch.complex64), in_place),
    "a bank that grows": (torch.zeros(3), grows),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_merged_is_refused_in_the_first_step(session_globals, what):
    state, change = REFUSED[what]
    model = Stateful(state.clone(), change)
    before = model.linear.weight.detach().clone()
    with pytest.raises(TypeError, match=r"buffer 0\.state \(torch\..*changed.*persistent=False.*consistency='fast'"):
        train(model)
    assert torch.equal(model.linear.weight, before)


@pytest.mark.parametrize("what", REFUSED)
def test_fast_mode_promises_nothing_of_the_kind(session_globals, what):
    state, change = REFUSED[what]
    assert train(Stateful(state.clone(), change), consistency="fast").steps_done == 12


@pytest.mark.parametrize(("change", "refused_in"), [(in_place, 6), (rebinds, 6), (by_data, 8)])
def test_what_begins_to_change_later_is_found_too(session_globals, change, refused_in):
    """At once, except for what torch does not count as a change: that is looked for in ever fewer steps."""
    steps: list[int] = []
    with pytest.raises(TypeError, match=r"buffer 0\.state"):
        train(Stateful(torch.zeros(5, dtype=torch.int64), change, since=10), steps.append)
    assert len(steps) == refused_in - 1


def same_content(model: Stateful, _: Tensor) -> None:
    model.state = model.state.clone()


ALLOWED: dict[str, Callable[[], Stateful]] = {
    "a constant table": lambda: Stateful(torch.randn(LARGE), lambda *_: None),
    "a mask": lambda: Stateful(torch.ones(64, 64, dtype=torch.bool).tril(), lambda *_: None),
    "the same in another place": lambda: Stateful(torch.arange(9), same_content),
    "a cache": lambda: Stateful(torch.arange(9), grows, persistent=False),
    "a counter": lambda: Stateful(torch.tensor(0), in_place),
    "a small average": lambda: Stateful(torch.zeros(3), in_place),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_is_constant_or_merged_is_trained(session_globals, what):
    assert train(ALLOWED[what]()).steps_done == 12


def test_a_constant_table_is_read_in_ever_fewer_steps(session_globals, monkeypatch):
    read: list[int] = []
    steps = [0]
    digest = running_statistics._digest
    monkeypatch.setattr(running_statistics, "_digest", lambda tensor: read.append(steps[-1] + 1) or digest(tensor))
    train(Stateful(torch.randn(LARGE), lambda *_: None), steps.append)
    assert sorted(set(read)) == [1, 2, 4, 8]


def test_a_script_may_change_its_buffers_between_the_steps(session_globals):
    """All workers do, alike."""
    model = Stateful(torch.zeros(LARGE), lambda *_: None)

    def average(_: int) -> None:
        model.state.mul_(0.5).add_(float(model.linear.weight.detach().sum()))
        model.state = model.state.clone()

    assert train(model, average).steps_done == 12


def test_a_statistic_that_is_put_in_the_place_of_the_old_one_is_averaged():
    model = Stateful(torch.tensor([8.0, 0.0]), lambda model, x: setattr(model, "state", model.state + x.detach()))
    first = model.state
    statistics = RunningStatistics(model, tree=True)
    statistics.begin()
    for number, share in enumerate([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]):
        if number:
            statistics.reset()
        model._change(model, share)
        statistics.leaf_done()
    statistics.install(statistics.merge(WorkerGroup(), 2), statistics.counts)
    assert model.state is first
    assert model.state.tolist() == [10.0, 4.0]


def test_a_change_that_must_not_be_is_told_again_when_the_step_is_tried_again():
    """Somebody died before all had heard of it."""
    model = Stateful(torch.tensor([False]), lambda model, _: model.state.fill_(True))
    statistics = RunningStatistics(model, tree=True)
    statistics.begin()
    model._change(model, torch.zeros(4))
    statistics.leaf_done()
    assert statistics.strayed() == 1
    statistics.begin_again()
    model._change(model, torch.zeros(4))
    statistics.leaf_done()
    assert statistics.strayed() == 1


def test_a_scripted_model_keeps_its_statistics(session_globals):
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
    assert train(model).steps_done == 12
    assert int(dict(model.named_buffers())["1.num_batches_tracked"]) == 12
