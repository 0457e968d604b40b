"""A complete elastic training script: a small network that learns to tell noisy patterns apart.

Alone: ``python train_digits.py``. As an Airflow task: ``ElasticTrainOperator(script="train_digits.py", ...)``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime


def patterns(samples: int = 1203, classes: int = 10, width: int = 64) -> TensorDataset:
    """Noisy copies of one random pattern a class, the same on every machine."""
    generator = torch.Generator().manual_seed(7)
    prototypes = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.5 * torch.randn(samples, width, generator=generator), labels)


def main() -> None:
    """Train."""
    session = runtime.init(epochs=3)
    loader = session.dataloader(patterns(), global_batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.register(model=model, optimizer=optimizer)

    right = 0.0
    for _epoch in session.epochs():
        for batch in loader:
            with session.step() as step:
                for inputs, labels in step.split(batch):
                    logits = model(inputs)
                    step.backward(nn.functional.cross_entropy(logits, labels))
                    right = float((logits.argmax(1) == labels).float().mean())
                optimizer.step()
                optimizer.zero_grad()
            session.log(loss=step.loss)
    session.finish(metrics={"accuracy_of_last_batch": right})


if __name__ == "__main__":
    main()
