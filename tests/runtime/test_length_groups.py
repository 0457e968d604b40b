"""Samples of similar length share a batch, in an order that depends on nothing but lengths, seed and epoch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bare_torchrun import torchrun

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime import consistency_check
from elasticflow_airflow.runtime.samples.length_groups import SampleLengths, length_grouped_order
from elasticflow_airflow.runtime.samples.sample_order import BatchPlan

EXAMPLE = Path(__file__).parents[2] / "docs/examples/train_lengths.py"


def plan_of(lengths: Any, batch: int, **options: Any) -> BatchPlan:
    found = SampleLengths.of(lengths, len(lengths))
    return BatchPlan(samples=len(lengths), global_batch_size=batch, seed=3, shuffle=True, lengths=found, **options)


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=80), batch=st.integers(1, 9), epoch=st.integers(0, 2))
def test_every_sample_once_with_the_longest_first(lengths, batch, epoch):
    plan = plan_of(lengths, batch)
    order = plan.order(epoch)
    assert sorted(order) == list(range(len(lengths)))
    assert plan.order(epoch) == order
    batches = [plan.global_batch(order, step) for step in range(plan.steps_per_epoch)]
    for samples in batches:
        sizes = [lengths[index] for index in samples]
        assert sizes == sorted(sizes, reverse=True)
    full = [samples for samples in batches if len(samples) == batch]
    if full:
        assert lengths[full[0][0]] == max(lengths[index] for samples in full for index in samples)


def test_batches_are_of_similar_length_and_yet_random():
    lengths = torch.randint(1, 500, (4000,), generator=torch.Generator().manual_seed(1))
    grouped, shuffled = plan_of(lengths, 32), BatchPlan(samples=4000, global_batch_size=32, seed=3, shuffle=True)

    def padded(plan: BatchPlan, epoch: int) -> int:
        order = plan.order(epoch)
        batches = [lengths[list(plan.global_batch(order, step))] for step in range(plan.steps_per_epoch)]
        return sum(int(batch.max()) * len(batch) for batch in batches) - int(lengths.sum())

    assert padded(grouped, 0) < 0.1 * padded(shuffled, 0)
    first, second = ({frozenset(plan_batch) for plan_batch in batches_of(grouped, epoch)} for epoch in (0, 1))
    assert not first & second
    longest = [int(lengths[batch[0]]) for batch in batches_of(grouped, 0)]
    assert longest[0] == max(longest[:-1])
    assert sorted(longest, reverse=True) != longest  # no curriculum from long to short


def batches_of(plan: BatchPlan, epoch: int) -> list[tuple[int, ...]]:
    order = plan.order(epoch)
    return [tuple(plan.global_batch(order, step)) for step in range(plan.steps_per_epoch)]


def test_what_is_left_out_is_chosen_whatever_its_length():
    lengths = [1] * 50 + [100] * 50
    plan = plan_of(lengths, 8, drop_last=True)
    left_over = [index for epoch in range(100) for index in plan.order(epoch)[96:]]
    assert 0.3 < sum(lengths[index] == 1 for index in left_over) / len(left_over) < 0.7


def test_lengths_of_any_kind():
    for lengths in ([1, 2], (1, 2), torch.tensor([1, 2], dtype=torch.int32), numpy.array([1, 2]), range(1, 3)):
        found = SampleLengths.of(lengths, 2)
        assert (found.values.tolist(), found.values.dtype) == ([1, 2], torch.int64)
        assert found.digest == SampleLengths.of([1, 2], 2).digest < 2**48
    assert found.digest != SampleLengths.of([2, 1], 2).digest


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([1, 2, 3], ValueError, r"lengths= has the shape \(3,\), and the dataset 2 samples"),
        ([[1], [2]], ValueError, r"the shape \(2, 1\)"),
        ([1, -2], ValueError, "lengths= has -2: a length is 0 or more"),
        ([1.5, 2], TypeError, "must be whole numbers.*torch.float32"),
        ([True, False], TypeError, "must be whole numbers"),
        (["a", "b"], TypeError, "must be whole numbers"),
        ([None, 1], TypeError, "must be whole numbers"),
    ],
)
def test_what_are_no_lengths_is_refused(lengths, error, message):
    with pytest.raises(error, match=message):
        SampleLengths.of(lengths, 2)


def test_an_order_of_nobody_elses_making():
    """The generator alone decides: not what the script has drawn before."""
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append(length_grouped_order(torch.arange(20), 4, torch.Generator().manual_seed(5)))
    assert orders[0] == orders[1]


def test_what_does_not_go_with_lengths_is_refused(session_globals):
    session = runtime.init(epochs=1)
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    with pytest.raises(ValueError, match="lengths= makes batches of shuffled samples: shuffle, or leave lengths= out"):
        session.dataloader(dataset, global_batch_size=4, lengths=range(8), shuffle=False)
    with pytest.raises(
        ValueError, match=r"batch_sampler: .* with lengths=, samples of similar length come in the same"
    ):
        session.dataloader(dataset, global_batch_size=4, batch_sampler=[[0]])

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(8))

    with pytest.raises(ValueError, match="a stream is read in its own order"):
        session.dataloader(Endless(), global_batch_size=4, samples=8, lengths=range(8))


def test_a_checkpoint_of_other_lengths_is_warned_of():
    plan, other = plan_of([1, 2, 3, 4], 2), plan_of([4, 3, 2, 1], 2)
    plain = BatchPlan(samples=4, global_batch_size=2, seed=3, shuffle=True)
    assert plan.changes_since(plan.metadata) == plain.changes_since(plain.metadata) == ""
    assert re.fullmatch(r"lengths was sha256:\w{12}, is sha256:\w{12}", other.changes_since(plan.metadata))
    assert re.fullmatch(r"lengths was None, is sha256:\w{12}", plan.changes_since({"samples": 4}))
    assert re.fullmatch(r"lengths was sha256:\w{12}, is None", plain.changes_since(plan.metadata))


TRAINS = """
import os, sys, torch
from torch import nn
from torch.utils.data import TensorDataset
from elasticflow_airflow import runtime

session = runtime.init(steps=4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session.register(model=model, optimizer=optimizer)
lengths = [(i + LENGTH) % 7 for i in range(32)]
loader = session.dataloader(TensorDataset(torch.ones(32, 4)), global_batch_size=8, lengths=lengths)
try:
    for _ in session.epochs():
        for batch in loader:
            with session.step() as step:
                for (inputs,) in step.split(batch):
                    step.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    session.finish()
except TypeError as error:
    os.write(1, f"REFUSED {session.rank} {session.steps_done} {error}\\n".encode())
    os._exit(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("length", "same"), [("3", True), ("int(os.environ['RANK'])", False)])
def test_workers_with_other_lengths_end_before_they_train(tmp_path, length, same):
    status, output = torchrun(tmp_path, TRAINS.replace("LENGTH", length), 2)
    found = re.findall(r"^REFUSED (\d) (\d+) the workers were given different lengths=", output, re.MULTILINE)
    assert sorted(found) == ([] if same else [("0", "0"), ("1", "0")]), output
    assert (status == 0) == same, output


@pytest.mark.slow
def test_the_example_pads_little_and_learns(tmp_path):
    done = subprocess.run([sys.executable, str(EXAMPLE)], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.search(r"finished step=188 metrics={'accuracy': ([\d.]+), 'padding': ([\d.]+)}", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 0.7
    assert float(found[2]) < 0.05


@pytest.mark.soak
def test_the_example_trains_the_same_with_any_number_of_workers(capsys):
    arguments = ["--global-batch-size", "32", "--steps", "6", "--workers", "1,4"]
    assert consistency_check.main([str(EXAMPLE), *arguments]) == 0
    assert "the same, bit for bit, with 1, 4 workers" in capsys.readouterr().out
