"""The state of a Trainer besides model, optimizer and schedule, for checkpoints and for transfer to joiners.

May import transformers and the standard library only; knows nothing of sessions.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers import TrainerControl
from transformers.trainer_callback import ExportableState

_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Saved fields of ``TrainerState``; the others follow from the arguments, or describe the process."""
_COUNTERS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)


class TrainerProgress:
    """Steps, logs, best metric, loss since the last log, and the state of callbacks and control."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as text, for a checkpoint."""
        trainer = self._trainer
        loss = getattr(trainer, "_tr_loss", None)
        progress = {
            "state": {name: getattr(trainer.state, name) for name in _STATE},
            "control": dataclasses.asdict(trainer.control),
            "callbacks": [callback.state()["attributes"] for callback in self._callbacks()],
            "counters": {name: getattr(trainer, name, 0) for name in _COUNTERS},
            "loss_since_log": 0.0 if loss is None else float(loss),
        }
        return {"json": json.dumps(progress, default=_plain)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state. :meth:`resume` restores the counters that the Trainer resets when it begins."""
        trainer = self._trainer
        self._restored = progress = json.loads(state_dict["json"])
        for name, value in progress["state"].items():
            setattr(trainer.state, name, value)
        for callback, attributes in zip(self._callbacks(), progress["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)

    @property
    def stopped(self) -> bool:
        """Whether the restored state is the end of a training that stopped early."""
        return self._restored is not None and bool(self._restored["control"]["should_training_stop"])

    def resume(self) -> None:
        """Restore the values that the Trainer has just reset to zero. Does nothing if no state was restored."""
        progress, self._restored = self._restored, None
        if progress is None:
            return
        for name, value in progress["counters"].items():
            setattr(self._trainer, name, value)
        self._trainer._tr_loss = torch.tensor(progress["loss_since_log"], device=self._trainer.args.device)
        for name, value in progress["control"].items():
            setattr(self._trainer.control, name, value)

    def _callbacks(self) -> list[Any]:
        found = self._trainer.callback_handler.callbacks
        return [c for c in found if isinstance(c, ExportableState) and not isinstance(c, TrainerControl)]


def _plain(value: Any) -> Any:
    """Convert numpy and torch numbers, which logs may contain, to plain ones."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} in the Trainer's logs or callbacks cannot be saved")
