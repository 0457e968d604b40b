"""Every sample of an epoch exactly once, whatever the workers do; and batches cut into micro-batches."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset, default_collate

from elasticflow_airflow.runtime.samples.fetching import DirectFetcher
from elasticflow_airflow.runtime.samples.sample_order import (
    BatchPlan,
    ElasticLoader,
    mix_seed,
    refuse_own_options,
    share,
    split_content,
    to_device,
)
from elasticflow_airflow.runtime.stepping.optimizer_step import seed_everything


class Squares(Dataset[int]):
    """A dataset whose samples tell their index."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index * index


class Trainer:
    """Stands in for a session: a step counter, and a number of workers that somebody changes."""

    def __init__(self, plan: BatchPlan, rank: int) -> None:
        self.plan, self.rank, self.world_size, self.step = plan, rank, 1, 0
        self.last_step: int | None = None
        self.loader = ElasticLoader(
            plan,
            DirectFetcher(Squares(plan.samples), default_collate),
            logical_workers=lambda: self.world_size,
            position=lambda: divmod(self.step, plan.steps_per_epoch),
            owned=lambda: range(self.rank, self.rank + 1),
            finished=lambda: self.last_step is not None and self.step >= self.last_step,
        )


plans = st.builds(
    BatchPlan,
    samples=st.integers(1, 60),
    global_batch_size=st.integers(1, 20),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)


@given(
    plan=plans, epochs=st.integers(1, 3), stages=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7)), max_size=8)
)
def test_every_sample_of_an_epoch_exactly_once_across_changes_of_the_workers(plan, epochs, stages):
    """``stages``: so many workers for so many steps, each time from a fresh process; the last stage takes the rest."""
    total, step = epochs * plan.steps_per_epoch, 0
    used: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    schedule = [(workers, step_count) for workers, step_count in stages] + [(1, total)]
    for workers, step_count in schedule:
        for _ in range(min(step_count, total - step)):
            epoch, in_epoch = divmod(step, plan.steps_per_epoch)
            batch = plan.global_batch(plan.order(epoch), in_epoch)
            shares = [share(batch, rank, workers) for rank in range(workers)]
            assert [index for part in shares for index in part] == list(batch)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
            short = plan.samples - (plan.steps_per_epoch - 1) * plan.global_batch_size
            assert len(batch) == (short if in_epoch == plan.steps_per_epoch - 1 else plan.global_batch_size)
            used[epoch] += batch
            step += 1
    assert step == total
    assert all(sorted(samples) == list(range(plan.samples)) for samples in used.values())


@given(samples=st.integers(0, 70), power=st.integers(0, 5), fewest=st.integers(1, 4))
def test_no_share_has_fewer_samples_than_it_needs(samples, power, fewest):
    batch, workers = range(samples), 1 << power
    shares = [share(batch, rank, workers, fewest) for rank in range(workers)]
    assert [index for part in shares for index in part] == list(batch)
    sizes = [len(part) for part in shares if part]
    assert not sizes or min(sizes) >= min(fewest, samples)
    if samples >= fewest * workers:
        assert shares == [share(batch, rank, workers) for rank in range(workers)]


@settings(deadline=None)
@given(plan=plans, stages=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), max_size=4))
def test_loaders_deal_out_the_plan_and_resume_in_the_middle(plan, stages):
    used: list[int] = []
    step = 0
    for workers, step_count in [*stages, (2, plan.steps_per_epoch)]:
        last = min(step + step_count, plan.steps_per_epoch)
        if step == last:
            continue
        for rank in range(workers):
            trainer = Trainer(plan, rank)
            trainer.world_size, trainer.step, trainer.last_step = workers, step, last
            for batch in trainer.loader:
                assert (batch.epoch, batch.step_in_epoch) == (0, trainer.step)
                assert batch.samples == len(batch.indices) <= batch.global_samples
                contents = [] if batch.content is None else batch.content.tolist()
                assert contents == [index * index for index in batch.indices]
                used += batch.indices
                trainer.step += 1
        step = last
    assert sorted(used) == list(range(plan.samples))


@given(plan=plans, epoch=st.integers(0, 3))
def test_without_the_short_last_batch_all_are_full(plan, epoch):
    if plan.samples < plan.global_batch_size:
        with pytest.raises(ValueError, match=f"drop_last=True leaves no batch: the dataset has {plan.samples} samples"):
            replace(plan, drop_last=True)
        return
    full = replace(plan, drop_last=True)
    assert full.steps_per_epoch == full.samples // full.global_batch_size
    order = full.order(epoch)
    assert order == plan.order(epoch)
    batches = [full.global_batch(order, step) for step in range(full.steps_per_epoch)]
    assert {len(batch) for batch in batches} == {full.global_batch_size}
    used = [index for batch in batches for index in batch]
    assert len(set(used)) == len(used)  # none twice
    trainer = Trainer(full, 0)
    assert len(trainer.loader) == len(batches)
    for batch in trainer.loader:
        assert batch.global_samples == batch.samples == full.global_batch_size
        trainer.step += 1
        trainer.last_step = full.steps_per_epoch
    assert trainer.step == full.steps_per_epoch


def test_other_samples_are_left_over_in_each_epoch():
    plan = BatchPlan(samples=11, global_batch_size=4, seed=2, shuffle=True, drop_last=True)
    left_over = [frozenset(plan.order(epoch)[8:]) for epoch in range(30)]
    assert frozenset.union(*left_over) == frozenset(range(11))


def test_fewer_samples_than_workers_leaves_some_shares_empty():
    plan = BatchPlan(samples=3, global_batch_size=8, seed=0, shuffle=False)
    batches = []
    for rank in range(4):
        trainer = Trainer(plan, rank)
        trainer.world_size = 4
        batches += list(trainer.loader)
    assert [batch.samples for batch in batches] == [0, 1, 1, 1]
    assert batches[0].content is None
    assert {batch.global_samples for batch in batches} == {3}


def test_order_depends_on_seed_and_epoch_alone():
    plan = BatchPlan(samples=50, global_batch_size=8, seed=3, shuffle=True)
    torch.manual_seed(1)
    first = plan.order(0)
    torch.manual_seed(2)
    assert plan.order(0) == first
    assert plan.order(1) != first
    other_seed = BatchPlan(samples=50, global_batch_size=8, seed=4, shuffle=True)
    assert other_seed.order(0) != first


class Noise(Squares):
    """A dataset that augments its samples."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def test_augmentation_depends_on_the_logical_worker_alone():
    plan = BatchPlan(samples=8, global_batch_size=8, seed=1, shuffle=True)

    def drawn(owned: range) -> list[list[float]]:
        before = torch.get_rng_state()
        loader = ElasticLoader(
            plan,
            DirectFetcher(Noise(plan.samples), default_collate),
            logical_workers=lambda: 4,
            position=lambda: (0, 0),
            owned=lambda: owned,
        )
        (batch,) = loader
        assert torch.equal(torch.get_rng_state(), before)
        return [share.content.tolist() for share in batch.shares]

    everything = drawn(range(4))
    assert drawn(range(2)) + drawn(range(2, 4)) == everything
    assert len({str(part) for part in everything}) == 4


def test_fetching_leaves_every_generator_as_it_was():
    plan = BatchPlan(samples=8, global_batch_size=8, seed=1, shuffle=True)
    trainer = Trainer(plan, 0)
    trainer.world_size = 4

    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), numpy.random.rand()

    seed_everything(5)
    expected = drawn()
    seed_everything(5)
    trainer.loader.batch(0, 0)
    assert drawn() == expected


def test_every_generator_is_seeded_on_devices_too(monkeypatch):
    seed = 2**63 - 5
    torch.manual_seed(seed)
    expected = torch.rand(3).tolist()
    seen: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seen.append)
    for in_use, is_there in ((False, False), (True, True)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda is_there=is_there: is_there)
        seed_everything(seed)
        assert torch.rand(3).tolist() == expected
        assert (random.random(), numpy.random.rand()) == (
            random.Random(seed).random(),
            numpy.random.RandomState(seed & 0xFFFFFFFF).rand(),
        )
        assert seen == [seed] * in_use
    # A device that is there and not in use: torch is to remember the seed.
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    remembered: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", remembered.append)
    seed_everything(seed)
    assert remembered == [seed]
    assert torch.rand(3).tolist() == expected


def test_numpys_generator_is_seeded_before_anybody_has_used_it():
    """numpy brings its generators in with their first use: after the seed, that would be another draw each time."""
    module = "elasticflow_airflow.runtime.stepping.optimizer_step"
    script = f"import numpy; from {module} import seed_everything; seed_everything(5)"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}; print(numpy.random.rand())"], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == numpy.random.RandomState(5).rand()


def test_a_pass_given_up_in_the_middle_loses_nothing():
    """Leaving ends a pass with batches fetched ahead; the next pass starts at the step counter, not behind them."""
    plan = BatchPlan(samples=40, global_batch_size=4, seed=1, shuffle=True)
    trainer = Trainer(plan, 0)
    used: list[int] = []
    for batch in trainer.loader:
        if trainer.step == 3:
            break
        used += batch.indices
        trainer.step += 1
    for batch in trainer.loader:
        used += batch.indices
        trainer.step += 1
    assert sorted(used) == list(range(40))


def test_wrong_sizes_and_contradicting_options_are_refused():
    with pytest.raises(ValueError, match="the dataset is empty"):
        BatchPlan(samples=0, global_batch_size=1, seed=0, shuffle=True)
    with pytest.raises(ValueError, match="global_batch_size=0: it must be at least 1"):
        BatchPlan(samples=5, global_batch_size=0, seed=0, shuffle=True)
    with pytest.raises(ValueError, match=r"batch_sampler, batch_size: the session decides.*global_batch_size="):
        refuse_own_options({"batch_size": 4, "batch_sampler": [[0]]})
    with pytest.raises(ValueError, match="in_order: the session decides"):
        refuse_own_options({"num_workers": 2, "in_order": False})


def test_changes_since_names_what_differs():
    plan = BatchPlan(samples=5, global_batch_size=2, seed=0, shuffle=True)
    assert plan.changes_since({"samples": 5, "global_batch_size": 4, "seed": 0, "shuffle": True}) == (
        "global_batch_size was 4, is 2"
    )
    assert plan.changes_since({}) == ""
    full = replace(plan, drop_last=True)
    assert full.changes_since(plan.metadata) == "drop_last was False, is True"
    assert plan.changes_since(full.metadata) == "drop_last was True, is False"
    before_there_was_such_a_thing = {"samples": 5, "global_batch_size": 2, "seed": 0, "shuffle": True}
    assert full.changes_since(before_there_was_such_a_thing) == "drop_last was False, is True"
    assert plan.changes_since(before_there_was_such_a_thing) == full.changes_since(full.metadata) == ""


# -- cutting a batch into micro-batches ---------------------------------------------------------------------------

Pair = namedtuple("Pair", "inputs labels")


def rows(samples: int) -> torch.Tensor:
    return torch.arange(samples * 3).reshape(samples, 3)


def test_split_tensors_dicts_tuples_and_lists_of_fields():
    inputs, labels = rows(5), torch.arange(5)
    assert torch.equal(split_content(inputs, 1, 3, 5), inputs[1:3])
    part = split_content({"inputs": inputs, "nested": {"labels": labels}, "task": "a", "none": None}, 1, 3, 5)
    assert torch.equal(part["inputs"], inputs[1:3])
    assert torch.equal(part["nested"]["labels"], labels[1:3])
    assert (part["task"], part["none"]) == ("a", None)
    for batch in ((inputs, labels), [inputs, labels], Pair(inputs, labels), (inputs, {"labels": labels}["labels"])):
        part = split_content(batch, 1, 3, 5)
        assert type(part) is type(batch)
        assert torch.equal(part[0], inputs[1:3])
        assert torch.equal(part[1], labels[1:3])
    part = split_content([(inputs, labels), ("a", "b", "c", "d", "e")], 1, 3, 5)
    assert torch.equal(part[0][1], labels[1:3])
    assert part[1] == ("b", "c")


def test_split_two_samples_of_two_fields():
    """What the default collate function makes are fields, also where there are as many samples as fields."""
    part = split_content([rows(2), torch.arange(2)], 0, 1, 2)
    assert torch.equal(part[0], rows(2)[:1])
    assert torch.equal(part[1], torch.tensor([0]))


def test_split_lists_of_samples():
    assert split_content(["a", "b", "c"], 1, 3, 3) == ["b", "c"]
    assert split_content({"tokens": [[1, 2], [3], [4, 5, 6]]}, 1, 3, 3) == {"tokens": [[3], [4, 5, 6]]}
    assert split_content([[1, 2], [3, 4]], 0, 1, 2) == [[1, 2]]
    images = [torch.zeros(3, 4), torch.zeros(3, 7), torch.zeros(3, 2)]
    assert [image.shape[1] for image in split_content([*images, torch.zeros(3, 9)], 1, 3, 4)] == [7, 2]


def test_split_batch_encoding_keeps_its_type():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": rows(4), "labels": torch.arange(4)})
    part = to_device(split_content(batch, 1, 2, 4), torch.device("cpu"))
    assert type(part) is transformers.BatchEncoding
    assert torch.equal(part.input_ids, rows(4)[1:2])


@pytest.mark.parametrize(
    "content",
    [5, torch.tensor(1.0), torch.zeros(3), {"a": torch.zeros(3)}, [torch.zeros(4), torch.zeros(3)], object(), "text"],
)
def test_split_refuses_what_has_no_samples(content):
    with pytest.raises(TypeError, match=r"cannot be split into micro-batches of its 4 samples: let collate_fn return"):
        split_content(content, 0, 2, 4)


@given(samples=st.integers(1, 12), size=st.integers(1, 12))
def test_the_parts_are_the_whole(samples, size):
    batch = {"inputs": rows(samples), "names": [str(i) for i in range(samples)]}
    parts = [split_content(batch, s, min(s + size, samples), samples) for s in range(0, samples, size)]
    assert torch.equal(torch.cat([part["inputs"] for part in parts]), batch["inputs"])
    assert [name for part in parts for name in part["names"]] == batch["names"]


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4), st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_mixed_seeds_are_seeds_and_differ(one, other):
    assert 0 <= mix_seed(*one) < 2**63
    assert (mix_seed(*one) == mix_seed(*other)) == (one == other)


def test_default_collate_of_a_tensor_dataset_comes_through():
    plan = BatchPlan(samples=4, global_batch_size=4, seed=0, shuffle=False)
    dataset = TensorDataset(rows(4), torch.arange(4))
    loader = ElasticLoader(
        plan,
        DirectFetcher(dataset, default_collate),
        logical_workers=lambda: 2,
        position=lambda: (0, 0),
        owned=lambda: range(1, 2),
    )
    (batch,) = loader
    assert torch.equal(batch.content[0], rows(4)[2:])
    assert batch.indices == (2, 3)
    assert len(loader) == 1
