"""Scripts that real workers train in tests of the service: quick, and what they did can be read off the result."""

from __future__ import annotations

from pathlib import Path

SAMPLES, BATCH = 640, 32
STEPS_PER_EPOCH = SAMPLES // BATCH
HURRY_ENV = "TEST_HURRY"
"""The folder in which a file with the name of a job says that there is nothing to wait for any more."""
COUNTING = f"""
import os
import sys
import time
import torch
from elasticflow_airflow import runtime

SAMPLES, BATCH = {SAMPLES}, {BATCH}

class Counter(torch.nn.Module):
    '''Every use of a sample adds 1/BATCH to its weight: exactly, as BATCH is a power of two.'''
    def __init__(self):
        super().__init__()
        self.uses = torch.nn.Parameter(torch.zeros(SAMPLES))
    def forward(self, ids):
        return -self.uses[ids].mean()

def rest(seconds):
    if not os.path.exists(os.path.join(os.environ.get("{HURRY_ENV}", "/"), session.config.job_id)):
        time.sleep(seconds)

session = runtime.init(epochs=int(sys.argv[1]))
loader = session.dataloader(range(SAMPLES), global_batch_size=BATCH, shuffle=True)
model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
session.register(model=model, optimizer=optimizer)
for epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for ids in step.split(batch):
                step.backward(model(ids))
            optimizer.step()
            optimizer.zero_grad()
        rest(0.1)
        session.log(loss=step.loss)
uses = model.uses.detach() * BATCH
session.finish(metrics={{"least": float(uses.min()), "most": float(uses.max())}})
"""
"""``COUNTING EPOCHS``: trains a model that counts how often each sample was used."""

_MODEL = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def forward(self, ids):
        think_hard()
        return self.weight * ids.float().mean()

session = runtime.init()
loader = session.dataloader(range(64), global_batch_size=8)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
session.register(model=model, optimizer=optimizer)
for epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for ids in step.split(batch):
                step.backward(model(ids))
            optimizer.step()
            optimizer.zero_grad()
session.finish()
"""


def hurry(folder: Path, job_id: str) -> None:
    """Have a job, whose ``HURRY_ENV`` is the folder, rest no more."""
    folder.mkdir(exist_ok=True)
    (folder / job_id).touch()


def thinking(head: str) -> str:
    """A script whose model calls ``think_hard()``, which ``head`` defines, with whatever that needs."""
    return "import time\nimport torch\nfrom elasticflow_airflow import runtime\n" + head + _MODEL
