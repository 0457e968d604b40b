"""A complete elastic training script with PyTorch Lightning: a small network that learns to tell noisy patterns apart.

Alone: ``python train_lightning.py``. As an Airflow task: ``ElasticTrainOperator(script="train_lightning.py", ...)``.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from elasticflow_airflow.runtime.lightning import ElasticStrategy


def patterns(samples: int = 1503, classes: int = 10, width: int = 64) -> TensorDataset:
    """Noisy copies of one random pattern a class, the same on every machine."""
    generator = torch.Generator().manual_seed(7)
    prototypes = torch.randn(classes, width, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return TensorDataset(prototypes[labels] + 0.5 * torch.randn(samples, width, generator=generator), labels)


class Classifier(pl.LightningModule):
    """An ordinary LightningModule: nothing in it knows that the training is elastic."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Loss of a micro-batch: the mean over its samples."""
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("training_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        """Log the accuracy; a callback may stop the training by it, or keep the best weights."""
        inputs, labels = batch
        self.log("validation_accuracy", (self.model(inputs).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer; schedules as usual."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train."""
    strategy = ElasticStrategy()
    training, validation = random_split(patterns(), [1203, 300], torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        strategy=strategy,
        max_epochs=3,
        callbacks=[pl.callbacks.ModelCheckpoint(monitor="validation_accuracy", mode="max")],
        enable_progress_bar=False,
    )
    trainer.fit(
        Classifier(),
        DataLoader(training, batch_size=32, shuffle=True),
        DataLoader(validation, batch_size=100),
    )


if __name__ == "__main__":
    main()
