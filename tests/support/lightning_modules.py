"""Modules and callbacks of Lightning for tests, in a file of their own: to import Lightning takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn


class Small(pl.LightningModule):
    """A regression; a test takes one thing from it, or adds one."""

    optimizers_wanted = 1

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.optimizers_wanted)]


def changed(**changes: Any) -> Any:
    return type("Changed", (Small,), changes)()


def manual() -> Any:
    module = Small()
    module.automatic_optimization = False
    return module


class Hooks(pl.Callback):
    """Writes down what Lightning calls, in which order, and where it says that it is."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in (
            "on_train_start",
            "on_train_epoch_start",
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_train_batch_end",
            "on_validation_end",
            "on_train_epoch_end",
            "on_train_end",
        ):
            setattr(self, name, self._writer(name))

    def _writer(self, name: str) -> Callable[..., None]:
        def write(trainer: Any, *_: Any) -> None:
            rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
            self.calls.append((name, trainer.current_epoch, trainer.global_step, rates))

        return write


def logged(**changes: Any) -> Any:
    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = Small.training_step(self, batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", Small.training_step(self, batch, batch_idx))

    def configure_optimizers(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    torch.manual_seed(3)
    steps = {"training_step": training_step, "validation_step": validation_step}
    return changed(**steps, configure_optimizers=configure_optimizers, **changes)
