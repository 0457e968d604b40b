"""What is inside a checkpoint: weights, optimizer, schedule and whatever else a script registers.

``model.pt`` holds the weights alone, so that another run may start from them; ``training.pt`` holds the rest.
Loading never executes code: files are verified against their digests first and then read with
``weights_only=True``. May import torch and the standard library only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from elasticflow_airflow.runtime.manifest import CandidateInfo, CheckpointError, publish, verify_candidate, writing

MODEL_FILE = "model.pt"
TRAINING_FILE = "training.pt"


class Stateful(Protocol):
    """Anything with a state that a checkpoint can hold: optimizer, schedule, gradient scaler, metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings and containers of those."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""
        ...


@dataclass(slots=True)
class Registered:
    """What a script registered: the model, and everything else that has a state, by name."""

    model: nn.Module
    others: Mapping[str, Stateful] = field(default_factory=dict)


def save(
    registered: Registered,
    checkpoints: Path,
    *,
    incarnation: int,
    generation: int,
    step: int,
    metadata: Mapping[str, Any],
) -> CandidateInfo:
    """Write a candidate checkpoint. Raises CheckpointError when the disk does not take it or the state cannot be saved.

    The state of random number generators is not in it: seeds are a function of the step.
    """
    with writing(checkpoints, generation, step) as folder:
        try:
            torch.save(registered.model.state_dict(), folder / MODEL_FILE)
            torch.save({name: part.state_dict() for name, part in registered.others.items()}, folder / TRAINING_FILE)
        except (OSError, RuntimeError) as error:
            # torch reports a full disk as a RuntimeError of its archive writer.
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written below {checkpoints}: {error}. "
                "Free space there; the checkpoints before stay valid."
            ) from error
        _check_readable(folder, step)
        return publish(
            folder, checkpoints, incarnation=incarnation, generation=generation, step=step, metadata=metadata
        )


def load(registered: Registered, info: CandidateInfo) -> None:
    """Restore everything registered from a verified checkpoint.

    Raises CheckpointError when the checkpoint does not fit the model or lacks something that is registered now.
    """
    _load_weights(registered.model, info.path)
    states = _read(info.path / TRAINING_FILE)
    missing = sorted(set(registered.others) - set(states))
    if missing:
        raise CheckpointError(
            f"checkpoint {info.path} has no state for {', '.join(missing)}: it was written by a script that did not "
            "register it. Start again without this checkpoint, or register what that script did."
        )
    for name, part in registered.others.items():
        try:
            part.load_state_dict(states[name])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {info.path} does not fit {name}: {error}") from error


def load_weights(model: nn.Module, folder: Path) -> CandidateInfo:
    """Load only the weights of a checkpoint folder into a model, after checking every byte of it.

    Raises CheckpointError when it is missing or damaged, or does not fit the model.
    """
    info = verify_candidate(folder)
    _load_weights(model, folder)
    return info


def _check_readable(folder: Path, step: int) -> None:
    """Find out now, not when resuming, that a state holds what may not be loaded. Maps the tensors, reads none."""
    for name in (MODEL_FILE, TRAINING_FILE):
        try:
            torch.load(folder / name, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} could not be read back ({name}): {_first_line(error)}. Let every "
                "state_dict() hold only tensors, numbers, strings and containers of those: anything else would have to "
                "run code when it is loaded."
            ) from error


def _load_weights(model: nn.Module, folder: Path) -> None:
    try:
        model.load_state_dict(_read(folder / MODEL_FILE))
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit the model: {error}") from error


def _read(file: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"checkpoint file {file} cannot be read: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint file {file} does not hold a state dictionary")
    return state


def _first_line(error: Exception) -> str:
    """Shorten torch's advice to load without ``weights_only``, which nobody should follow here."""
    return str(error).strip().split("\n")[0] or type(error).__name__
