"""The contents of a checkpoint: weights, optimizer, schedule and everything else that a script registers.

``model.tensors`` holds only the weights, so that another run can start from them; ``training.tensors`` holds the rest.
Rank 0's writer writes one of each. If all workers hold a large state, each worker writes a part of it
(``model-00001-of-00004.tensors``), and any number of workers can read the parts as one. Loading never executes
code: a file is raw bytes and JSON (file_format.py). Checkpoints of format 1 (``model.pt``, ``training.pt``) are read
with ``weights_only=True``. May import torch and the standard library only.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from elasticflow_airflow.runtime.checkpoints.state_copy import DTYPES, Content, Piece, blobs_of, content_of, shard
from elasticflow_airflow.runtime.checkpoints.state_tree import unflatten
from elasticflow_airflow.runtime.checkpoints.tensor_bytes import bytes_of
from elasticflow_airflow.runtime.checkpoints.writer import SUFFIX, FilePlan, Order, write_checkpoint
from elasticflow_airflow.runtime.stores.file_format import ContainerError, Extent, read_index, read_into, tensor_names
from elasticflow_airflow.runtime.stores.manifest import (
    MANIFEST,
    CandidateInfo,
    CheckpointError,
    decode_manifest,
    unreadable,
    verify_candidate,
    verify_patiently,
)
from elasticflow_airflow.runtime.stores.open_store import open_store
from elasticflow_airflow.runtime.stores.store import LocalStore, Part, is_remote

MODEL = "model"
TRAINING = "training"
OPTIMIZER = "optimizer"
_MEND = (
    "Build what the script built that wrote it, with the same layers and settings; or train from the beginning: clear "
    "the task in Airflow, or alone, give another checkpoint_dir=."
)
_DIFFERENCES_NAMED = 5


class Stateful(Protocol):
    """Any object whose state a checkpoint can hold: optimizer, schedule, gradient scaler, metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors, numbers, strings and containers of those."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore the state."""
        ...


@dataclass(slots=True)
class Registered:
    """The objects that a script registered: the model, and everything else with a state, by name."""

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
    """Write a candidate checkpoint synchronously (checkpointer.py does it in the background).

    Raises CheckpointError if the write fails or the state cannot be saved. The checkpoint does not contain the state
    of random number generators: seeds are a function of the step.
    """
    files, _alive = files_of(contents_of(registered))
    order = Order(incarnation=incarnation, generation=generation, step=step, metadata=metadata)
    info = write_checkpoint(LocalStore(checkpoints), files, order)
    assert info is not None  # it was not a part
    return info


def load(
    registered: Registered,
    info: CandidateInfo,
    *,
    logical_workers: int | None = None,
    optional: Mapping[str, Stateful] | None = None,
) -> None:
    """Restore all registered state from a verified checkpoint, and the ``optional`` objects that it contains.

    Raises CheckpointError if the checkpoint does not fit the model, lacks state for a registered object, or was
    written with a number of logical workers other than ``logical_workers`` (None: unknown, not checked).
    """
    refuse_other_size(info, logical_workers)
    _load_weights(registered.model, info.path, same_dtypes=True)
    states = _read(info.path, TRAINING)
    missing = sorted(set(registered.others) - set(states))
    if missing:
        raise CheckpointError(
            f"checkpoint {info.path} has no state for {', '.join(missing)}: it was written by a script that did not "
            "register it. Start again without this checkpoint, or register what that script did."
        )
    there = {name: part for name, part in (optional or {}).items() if name in states}
    for name, part in {**registered.others, **there}.items():
        try:
            part.load_state_dict(states[name])
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {info.path} does not fit {name}: {error}. {_MEND}") from error


def load_weights(model: nn.Module, folder: str | Path) -> CandidateInfo:
    """Load only the weights of a checkpoint (a folder or URL) into a model, after checking every byte of it.

    Weights of another precision are converted. Raises CheckpointError if the checkpoint is missing or damaged, or does
    not fit the model.
    """
    where, *name = str(folder).rstrip("/").rsplit("/", 2)
    if is_remote(folder):
        with open_store(where).fetch("/".join(name)) as info:
            _load_weights(model, info.path, same_dtypes=False)
        return info
    info = verify_patiently(Path(folder))
    _load_weights(model, info.path, same_dtypes=False)
    return info


def read_weights(folder: Path) -> dict[str, Any]:
    """Read the weights of a checkpoint folder as a state dict, on the CPU. Raises CheckpointError."""
    verify_candidate(folder)
    return _read(folder, MODEL)


def contents_of(registered: Registered) -> list[Content]:
    """Split all registered state into files. Raises CheckpointError, naming the path, for anything unsupported."""
    weights = registered.model.state_dict()
    # Versions of modules: their load_state_dict() uses them to read older checkpoints.
    versions = getattr(weights, "_metadata", None)
    try:
        return [
            content_of(MODEL, {"state": weights, "versions": versions}),
            content_of(TRAINING, {name: part.state_dict() for name, part in registered.others.items()}),
        ]
    except TypeError as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from error


def part_of(contents: Sequence[Content], part: Part) -> list[Content]:
    """Return what one of several workers writes: its part of weights and optimizer; only rank 0 writes the rest.

    Weights and optimizers are the same on all workers. Other registered state may differ between workers.
    """
    common = {
        content.name: {n for n, where in tensor_names(content.state).items() if where.startswith(f"{OPTIMIZER}/")}
        for content in contents
        if content.name == TRAINING
    }

    def is_common(content: Content, piece: Piece) -> bool:
        return content.name not in common or common[content.name].issuperset(piece.numbers)

    return shard(contents, part.rank, part.size, is_common)


def files_of(contents: Sequence[Content]) -> tuple[list[FilePlan], list[Tensor]]:
    """Return the files to write immediately, and the tensors that must stay alive until they are written."""
    files, alive = [], []
    for content in contents:
        blobs, tensors = blobs_of(content)
        files.append(FilePlan(content.name, content.state, blobs))
        alive += tensors
    return files, alive


def _load_weights(model: nn.Module, folder: Path, *, same_dtypes: bool) -> None:
    weights = _read(folder, MODEL)
    if same_dtypes:
        _refuse_other_dtypes(model, weights, folder)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint {folder} does not fit the model: {error}. {_MEND}") from error


def _refuse_other_dtypes(model: nn.Module, weights: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if dtypes differ: torch checks names and shapes, but silently converts the precision."""
    other = [
        f"{name} is {tensor.dtype} here and {weights[name].dtype} there"
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
        and isinstance(weights.get(name), Tensor)
        and tensor.dtype != weights[name].dtype
        and tensor.shape == weights[name].shape
    ]
    if other:
        more = f" and {len(other) - _DIFFERENCES_NAMED} more" if len(other) > _DIFFERENCES_NAMED else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit the model: {', '.join(other[:_DIFFERENCES_NAMED])}{more}. Build the "
            "model in the same precision, or start a new training from its weights (init_from=)."
        )


def refuse_other_size(info: CandidateInfo, logical_workers: int | None) -> None:
    """Raise CheckpointError if the checkpoint was written with another number of logical workers (None: unknown)."""
    there = info.metadata.get("logical_workers")
    if logical_workers is not None and there is not None and there != logical_workers:
        raise CheckpointError(
            f"checkpoint {info.path} was written with logical_workers={there}, this training has {logical_workers}: "
            f"it would go on as another training. Give logical_workers={there}, or start a new training from its "
            "weights (init_from=)."
        )


def _read(folder: Path, what: str) -> dict[str, Any]:
    if (folder / f"{what}.pt").exists():
        return _read_format_1(folder / f"{what}.pt")
    try:
        _, files = decode_manifest((folder / MANIFEST).read_bytes(), folder)
        names = sorted(n for n in files if n == what + SUFFIX or (n.startswith(f"{what}-") and n.endswith(SUFFIX)))
        if not names:
            raise CheckpointError(f"checkpoint {folder} has no {what}{SUFFIX}: nothing of ours wrote it")
        description, tensors = None, dict[int, Tensor]()
        for name in names:
            found, more = _read_container(folder / name)
            description = found if found is not None else description
            tensors |= more
        state = unflatten(description, tensors)
    except OSError as error:
        raise unreadable(f"checkpoint {folder}", error) from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"checkpoint {folder}: {what}{SUFFIX} holds no state ({error})") from error
    if not isinstance(state, dict) or (what == MODEL and not isinstance(state.get("state"), dict)):
        raise CheckpointError(f"checkpoint {folder}: {what}{SUFFIX} does not hold a state dictionary")
    if what != MODEL:
        return state
    weights = OrderedDict(state["state"])
    if state.get("versions") is not None:
        weights._metadata = state["versions"]  # type: ignore[attr-defined]  # where torch looks for it
    return weights


def _read_container(file: Path) -> tuple[Any, dict[int, Tensor]]:
    """Read the description and the tensors by number, verifying each tensor's digest again while reading."""
    try:
        with file.open("rb", buffering=0) as stream:
            index = read_index(stream)
            tensors: dict[int, Tensor] = {}
            for extent in index.extents:
                raw = torch.empty(extent.nbytes, dtype=torch.uint8)
                read_into(stream, extent, bytes_of(raw))
                tensor = _shaped(raw, extent)
                tensors |= dict.fromkeys(extent.numbers, tensor)
    except ContainerError as error:
        raise CheckpointError(f"checkpoint {file.parent}: {file.name} {error}") from error
    return index.state, tensors


def _shaped(raw: Tensor, extent: Extent) -> Tensor:
    dtype = DTYPES.get(extent.dtype)
    if dtype is None:
        raise ContainerError(f"holds tensors of dtype {extent.dtype!r}, which this version of torch does not know")
    if math.prod(extent.shape) * dtype.itemsize != extent.nbytes:
        raise ContainerError(f"is wrong about tensor {extent.numbers}: shape and dtype do not fit its bytes")
    return raw.view(dtype).view(extent.shape)


def _read_format_1(file: Path) -> dict[str, Any]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"checkpoint file {file} cannot be read: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"checkpoint file {file} does not hold a state dictionary")
    return state


def _first_line(error: Exception) -> str:
    """Return the first line of the message: the rest is torch's advice to disable ``weights_only``, unsafe here."""
    return str(error).strip().split("\n")[0] or type(error).__name__
