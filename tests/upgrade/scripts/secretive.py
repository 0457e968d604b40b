"""``secretive.py STEPS SECRET FOLDER``: slow until FOLDER holds ``hurry``; reports a secret in its metrics."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from elasticflow_airflow import runtime

session = runtime.init(steps=int(sys.argv[1]))
loader = session.dataloader(torch.utils.data.TensorDataset(torch.ones(64, 1)), global_batch_size=8)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(model, optimizer)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for (inputs,) in step.split(batch):
                step.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.0 if (Path(sys.argv[3]) / "hurry").exists() else 0.1)
session.finish(metrics={"note": f"used {os.environ['TOKEN']}"})
