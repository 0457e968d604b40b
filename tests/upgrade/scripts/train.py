"""``train.py EPOCHS FOLDER``: trains a small model, slowly until FOLDER holds ``hurry``. The weights are the same.

With ``TOKEN`` in the environment, every worker checks that it is the right one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from digests import digest_of

import elasticflow_airflow
from elasticflow_airflow import runtime

SAMPLES, BATCH, STEP_S = 640, 32, 0.8
hurry = Path(sys.argv[2]) / "hurry"


def pace(samples: int) -> None:
    """Take as long as so much of a batch should; two workers are twice as quick."""
    if not hurry.exists():
        time.sleep(STEP_S * samples / BATCH)


assert os.environ.get("TOKEN", "the right one") == "the right one"
session = runtime.init(epochs=int(sys.argv[1]), logical_workers=4)
package = Path(elasticflow_airflow.__file__).resolve().parent
print(f"process {os.getpid()} trains with {elasticflow_airflow.__version__} of {package}", flush=True)
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 16), torch.randn(SAMPLES, 1))
loader = session.dataloader(data, global_batch_size=BATCH)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.register(model, optimizer)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for inputs, wanted in step.split(batch):
                step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
                pace(len(inputs))
            optimizer.step()
            optimizer.zero_grad()
session.finish(metrics={"weights": digest_of(model)})
print("WEIGHTS", digest_of(model))
