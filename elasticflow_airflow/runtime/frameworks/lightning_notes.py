"""Records what a LightningModule logs in training steps, and the rest of Lightning's state that a joiner needs.

Each logical worker logs its own values. They are merged in the order of logical workers, so the result does not depend
on which process computed them. May import torch and the standard library only: Lightning's objects come from the
strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from elasticflow_airflow.runtime.gang.process_group import WorkerGroup

_FLAGS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
_REDUCTIONS = ("mean", "sum", "min", "max")

Value = tuple[float, dict[str, Any]]


class Recorder:
    """Records ``self.log`` calls in training steps of this process's logical workers; merges all workers' values."""

    def __init__(self) -> None:
        self._flags: dict[str, dict[str, Any]] = {}
        self._noted: list[tuple[int, float, str, Any]] = []
        self._leaf, self._weight = 0, 0.0
        self.merged: dict[str, Value] = {}
        """By name: the step's value over the global batch, and the flags with which it was logged."""

    def clear(self) -> None:
        """Discard the values of the step, or of an attempt that is retried."""
        self._flags, self._noted, self.merged = {}, [], {}

    def at(self, leaf: int, weight: float) -> None:
        """Attribute later log calls to this process's ``leaf``; ``weight`` is its share of the global batch."""
        self._leaf, self._weight = leaf, weight

    @contextmanager
    def listening(self, module: Any) -> Iterator[None]:
        """Record the module's log calls instead of passing them to Lightning."""
        module.log = self._log
        try:
            yield
        finally:
            del module.log

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options |= dict(zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False))
        if hasattr(value, "compute"):
            raise TypeError(
                f"self.log({name!r}, ...) in training_step got the metric {type(value).__name__}, whose state would be "
                "of this worker's samples only: log its value, self.log(name, metric(predictions, targets)), or log "
                "the metric in validation_step"
            )
        if isinstance(value, Mapping):
            raise TypeError(f"self.log({name!r}, ...) got a dictionary: use self.log_dict")
        flags = {flag: options[flag] for flag in _FLAGS if options.get(flag) is not None}
        reduction = flags.get("reduce_fx", "mean")
        flags["reduce_fx"] = reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")
        if flags["reduce_fx"] not in _REDUCTIONS:
            raise ValueError(f"self.log({name!r}, reduce_fx={reduction!r}): it may be {', '.join(_REDUCTIONS)}")
        self._flags.setdefault(name, flags)
        self._noted.append(
            (self._leaf, self._weight, name, value.detach() if isinstance(value, torch.Tensor) else value)
        )

    def merge(self, group: WorkerGroup) -> None:
        """Merge this process's values with those of all workers, of any number. Raises GroupBroken."""
        own: list[list[Any]] = [[leaf, weight, name, float(value)] for leaf, weight, name, value in self._noted]
        self.merged = _merge(group.exchange_values([self._flags, own]))


def _merge(workers: list[Any]) -> dict[str, Value]:
    flags: dict[str, dict[str, Any]] = {}
    leaves: dict[str, list[tuple[float, float]]] = {}
    for theirs, noted in workers:
        flags |= {name: value for name, value in theirs.items() if name not in flags}
        for name, parts in _by_leaf(noted, theirs).items():
            leaves.setdefault(name, []).extend(parts)
    merged = {}
    for name in sorted(leaves):
        total, weight = _fold(leaves[name], flags[name]["reduce_fx"])
        merged[name] = (total / weight if flags[name]["reduce_fx"] == "mean" else total, flags[name])
    return merged


def _by_leaf(noted: list[list[Any]], flags: dict[str, dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return one process's values, folded per leaf: the same pieces, whichever process computed them."""
    pieces: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for leaf, weight, name, value in noted:
        scale = weight if flags[name]["reduce_fx"] == "mean" else 1.0
        pieces.setdefault((name, leaf), []).append((value * scale, weight))
    folded: dict[str, list[tuple[float, float]]] = {}
    for (name, _), parts in sorted(pieces.items()):
        folded.setdefault(name, []).append(_fold(parts, flags[name]["reduce_fx"]))
    return folded


def _fold(parts: list[tuple[float, float]], reduction: str) -> tuple[float, float]:
    total, weight = parts[0]
    for value, more in parts[1:]:
        total = {"max": max, "min": min}[reduction](total, value) if reduction in ("max", "min") else total + value
        weight += more
    return total, weight


class Notes:
    """Lightning's own state: callbacks, metrics so far, the epoch's means, whether to stop."""

    def __init__(self, trainer: Callable[[], Any], call: Any) -> None:
        self._trainer, self._call = trainer, call
        self._metrics: dict[str, Any] | None = None
        self._epoch: dict[str, Any] = {}
        """By key: the epoch's values before this worker took over; joined with what it logs itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings and containers of those."""
        trainer = self._trainer()
        connector = trainer._logger_connector
        epoch = dict(self._epoch)
        for key, metric in trainer.fit_loop.epoch_loop._results.items():
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset:
                size = int(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 0
                epoch[key] = (
                    _join(epoch[key], float(metric.value), size, metric.meta)
                    if key in epoch
                    else [
                        float(metric.value),
                        size,
                    ]
                )
        return {
            "callbacks": self._call._call_callbacks_state_dict(trainer),
            "callback_metrics": {name: value.clone() for name, value in connector._callback_metrics.items()},
            "logged_metrics": {name: value.clone() for name, value in connector._logged_metrics.items()},
            "progress_bar": dict(connector._progress_bar_metrics),
            "epoch": epoch,
            "should_stop": bool(trainer.should_stop),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; ``apply`` restores the metrics later, because Lightning clears them before training."""
        trainer = self._trainer()
        for callback in trainer.checkpoint_callbacks:
            theirs = state["callbacks"].get(callback.state_key, {})
            if theirs.get("dirpath") is not None:
                # All workers continue with the same folder, whichever of them writes.
                callback.dirpath = theirs["dirpath"]
        self._call._call_callbacks_load_state_dict(trainer, state)
        trainer.should_stop = state["should_stop"]
        self._metrics, self._epoch = dict(state), dict(state["epoch"])

    def apply(self) -> None:
        """Set Lightning's metrics to the restored ones."""
        if self._metrics is None:
            return
        connector = self._trainer()._logger_connector
        connector._callback_metrics = dict(self._metrics["callback_metrics"])
        connector._logged_metrics = dict(self._metrics["logged_metrics"])
        connector._progress_bar_metrics = dict(self._metrics["progress_bar"])
        self._metrics = None

    def join_epoch(self) -> None:
        """Join the epoch's earlier values with those logged since."""
        results = self._trainer().fit_loop.epoch_loop._results
        for key in [key for key in self._epoch if key in results and not results[key].has_reset]:
            metric = results[key]
            size = int(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 0
            value, size = _join(self._epoch.pop(key), metric.value, size, metric.meta)
            metric.value = torch.as_tensor(value, dtype=metric.value.dtype, device=metric.value.device)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = torch.as_tensor(size, device=metric.value.device)
            metric._computed = None

    def forget_epoch(self) -> None:
        """Discard the epoch's earlier values, because a new epoch begins."""
        self._epoch = {}


def _join(before: list[Any], value: Any, size: int, meta: Any) -> list[Any]:
    if meta.is_max_reduction or meta.is_min_reduction:
        fold = max if meta.is_max_reduction else min
        return [fold(before[0], float(value)), 0]
    return [before[0] + value, before[1] + size]
