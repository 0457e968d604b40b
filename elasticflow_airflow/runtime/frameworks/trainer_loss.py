"""Determines what a Trainer's loss averages over, samples or items (labelled tokens), and who divides by their number.

A model may accept ``num_items_in_batch`` without using it (BertForMaskedLM). Its loss is then the mean over the
micro-batch only, and the sum over several, which transformers itself takes, is several times too large. May import
torch and the standard library only; knows nothing of sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticflow_airflow.runtime.samples.sample_order import seeded, to_device

_TRIALS = 8


def item_count(trainer: Any, inputs: Any) -> float | None:
    """Return the number of labelled items in a collated batch as the Trainer counts them; None if it does not."""
    count = trainer._get_num_items_in_batch([inputs], torch.device("cpu"))
    return None if count is None else float(count)


def divides_by_items(
    trainer: Any,
    dataset: Any,
    collate: Callable[[list[Any]], Any],
    order: Sequence[int],
    size: int,
    device: torch.device,
) -> tuple[bool, bool]:
    """Return whether the Trainer counts items, and whether its loss is divided by their number in the global batch.

    Tests the model: compares the loss of the same samples for two numbers of items. All workers use the same samples.
    """
    for start in range(0, min(len(order), _TRIALS * size), size):
        with seeded(0):
            inputs = collate([dataset[index] for index in order[start : start + size]])
        items = item_count(trainer, inputs)
        if items is None:
            return False, False
        if trainer.loss_is_scaled_for_ga is not None:
            return True, bool(trainer.loss_is_scaled_for_ga)
        first, second = (_loss(trainer, to_device(inputs, device), max(1.0, items) * n, device) for n in (1.0, 2.0))
        if math.isfinite(first) and math.isfinite(second) and first != 0.0:
            return True, first != second
    return True, True  # what transformers assumes


def _loss(trainer: Any, inputs: Any, items: float, device: torch.device) -> float:
    model = trainer.model_wrapped
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), seeded(0), trainer.compute_loss_context_manager():
            number = torch.tensor(items, device=device)
            return float(trainer.compute_loss(model, dict(inputs), num_items_in_batch=number).mean())
    finally:
        model.train(training)
