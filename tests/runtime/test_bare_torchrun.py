"""Scripts under a real torchrun, without the service: what each worker trains, prints, and is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.bare_torchrun import torchrun

TRAINS = """
import hashlib, os, torch
from torch import nn
from torch.utils.data import TensorDataset
from elasticflow_airflow import runtime

session = runtime.init(steps=5, consistency=os.environ.get("TEST_CONSISTENCY"))
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(30, 4, generator=generator)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(TensorDataset(inputs, inputs[:, :2]), global_batch_size=12)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for micro, targets in step.split(batch):
                step.backward(nn.functional.mse_loss(model(micro), targets))
            optimizer.step()
            optimizer.zero_grad()
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
os.write(1, f"RESULT {session.rank} {digest.hexdigest()} {int(model[1].num_batches_tracked)}\\n".encode())
session.finish()
"""


@pytest.mark.slow
def test_fast_mode_keeps_the_statistics_of_three_workers(tmp_path: Path) -> None:
    """No power of two: the statistics of BatchNorm are averaged all the same, and all have the same."""
    status, output = torchrun(tmp_path, TRAINS, 3, TEST_CONSISTENCY="fast")
    assert status == 0, output
    found = re.findall(r"^RESULT (\d) (\w+) (\d+)$", output, re.MULTILINE)
    assert sorted(rank for rank, _, _ in found) == ["0", "1", "2"], output
    assert len({digest for _, digest, _ in found}) == 1
    assert {counted for _, _, counted in found} == {"5"}


LOGS_MUCH = """
import hashlib, os, torch
import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from elasticflow_airflow.runtime.lightning import ElasticStrategy

class Logs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        for number in range(40):
            self.log(f"loss_of_part_{number:02}_with_a_long_name", loss * number, on_step=True, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(5)
module = Logs()
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
loader = DataLoader(TensorDataset(inputs, inputs[:, :2]), batch_size=32)
trainer = pl.Trainer(strategy=ElasticStrategy(logical_workers=8, micro_batch_size=1), max_epochs=2, accelerator="cpu",
    logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
trainer.fit(module, loader)
values = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
weights = module.model.weight.detach().numpy().tobytes()
digest = hashlib.sha256(weights + repr(values).encode()).hexdigest()
os.write(1, f"RESULT {trainer.strategy.session.rank} {digest} {len(values)}\\n".encode())
"""


@pytest.mark.soak
def test_lightning_logs_as_much_with_two_workers_as_with_one(tmp_path: Path) -> None:
    """Whatever the steps log, all workers hear of it: 40 names, 8 logical workers, 4 micro-batches each."""
    pytest.importorskip("lightning.pytorch", reason="PyTorch Lightning is not installed: pip install lightning")
    digests = set()
    for workers in (1, 2):
        status, output = torchrun(tmp_path / str(workers), LOGS_MUCH, workers)
        assert status == 0, output
        found = re.findall(r"^RESULT (\d) (\w+) (\d+)$", output, re.MULTILINE)
        assert sorted(int(rank) for rank, _, _ in found) == list(range(workers)), output
        assert {int(count) for _, _, count in found} == {120}  # each by name, of the last step, and of the epoch
        digests |= {digest for _, digest, _ in found}
    assert len(digests) == 1


TRAINS_UNTIL_REFUSED = """
for _ in session.epochs():
    for batch in loader:
        try:
            with session.step() as step:
                for micro in step.split(batch):
                    step.backward(loss_of(micro))
                optimizer.step()
                optimizer.zero_grad()
        except TypeError as error:
            os.write(1, f"REFUSED {session.rank} {session.steps_done} {error}\\n".encode())
            raise
session.finish()
"""
"""What comes after a script that has made its session, loader and ``loss_of``."""

COUNTS = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from elasticflow_airflow import runtime

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
    def forward(self, inputs):
        if bool((inputs == 100.0).any()):
            self.seen += 1
        return inputs

session = runtime.init(steps=5)
inputs = torch.zeros(40, 4)
inputs[19] = 100.0  # in the third step, the second worker's
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
counts = Counts()
model.add_module("counts", counts)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(TensorDataset(inputs), global_batch_size=8, shuffle=False)

def loss_of(batch):
    (micro,) = batch
    return model[1](model[0](counts(micro))).sum()
"""


@pytest.mark.slow
def test_all_workers_refuse_what_one_has_changed_in_vain(tmp_path: Path) -> None:
    status, output = torchrun(tmp_path, COUNTS + TRAINS_UNTIL_REFUSED, 2)
    assert status != 0
    found = re.findall(r"^REFUSED (\d) (\d+) buffer counts\.seen \(torch\.int64, 4 elements\)", output, re.MULTILINE)
    assert sorted(found) == [("0", "2"), ("1", "2")], output


SHUFFLES = """
import os, random, torch
from torch import nn
from torch.utils.data import IterableDataset
from elasticflow_airflow import runtime

class Shuffled(IterableDataset):
    def __init__(self):
        self.order = list(range(32))
        random.Random(SEED).shuffle(self.order)
        self.at = 0

    def __iter__(self):
        while self.at < 32:
            self.at += 1
            yield torch.full((4,), float(self.order[self.at - 1]))
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

session = runtime.init(steps=4)
torch.manual_seed(5)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0001)
session.register(model=model, optimizer=optimizer)
loader = session.dataloader(Shuffled(), global_batch_size=8, samples=32)

def loss_of(micro):
    return model(micro).square().mean()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "same"), [("3", True), ("int(os.environ['RANK'])", False)])
def test_workers_that_read_a_stream_in_different_orders_end_before_they_train(
    tmp_path: Path, seed: str, same: bool
) -> None:
    status, output = torchrun(tmp_path, SHUFFLES.replace("SEED", seed) + TRAINS_UNTIL_REFUSED, 2)
    found = re.findall(r"^REFUSED (\d) (\d+) the workers read the stream in different orders", output, re.MULTILINE)
    assert sorted(found) == ([] if same else [("0", "0"), ("1", "0")]), output
    assert (status == 0) == same, output
