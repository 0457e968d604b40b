"""Converts states (of models, optimizers, schedules) to a JSON description and a list of tensors, without pickling.

May import torch and the standard library only.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def flatten(state: Any, path: str = "") -> tuple[Any, list[Tensor]]:
    """Split a state into its description and its tensors.

    A state consists of tensors, numbers, strings, bytes, None, and dicts, lists and tuples of those. Raises TypeError,
    naming the path, for anything else, because restoring it would run code. Ordered dicts are restored as dicts.
    """
    tensors: list[Tensor] = []
    return _describe(state, path, tensors), tensors


def unflatten(description: Any, tensors: Sequence[Tensor] | Mapping[int, Tensor]) -> Any:
    """Reassemble a state; ``tensors`` are indexed by number. Raises ValueError if the description is invalid."""
    if isinstance(description, Mapping) and len(description) == 1:
        ((kind, inner),) = description.items()
        if kind == "tensor":
            return tensors[inner]
        if kind == "float":
            return float(inner)
        if kind == "bytes":
            return base64.b64decode(inner, validate=True)
        if kind == "counter":
            return Counter(unflatten({"dict": inner}, tensors))
        if kind == "list":
            return [unflatten(item, tensors) for item in inner]
        if kind == "tuple":
            return tuple(unflatten(item, tensors) for item in inner)
        if kind == "dict":
            return {unflatten(key, tensors): unflatten(value, tensors) for key, value in inner}
    if description is None or isinstance(description, bool | int | float | str):
        return description
    raise ValueError(f"not the description of a state: {str(description)[:100]}")


def _describe(state: Any, path: str, tensors: list[Tensor]) -> Any:
    if isinstance(state, Tensor):
        tensors.append(state.detach())
        return {"tensor": len(tensors) - 1}
    if state is None or type(state) in (bool, int, str):
        return state
    if type(state) is float:
        return state if math.isfinite(state) else {"float": repr(state)}
    if type(state) is bytes:
        return {"bytes": base64.b64encode(state).decode()}
    if type(state) is Counter:
        # For example the milestones of torch's MultiStepLR.
        return {"counter": _describe(dict(state), path, tensors)["dict"]}
    if isinstance(state, Mapping):
        # Keys may be numbers (in optimizers), which JSON objects cannot have.
        return {"dict": [[_describe(k, path, tensors), _describe(v, f"{path}/{k}", tensors)] for k, v in state.items()]}
    if type(state) in (list, tuple, torch.Size):
        items = [_describe(item, f"{path}/{i}", tensors) for i, item in enumerate(state)]
        return {"list" if isinstance(state, list) else "tuple": items}
    raise TypeError(
        f"the state at {path or '/'} is a {type(state).__name__}: let every state_dict() hold only tensors, numbers,"
        " strings and containers of those; anything else would have to run code when it is loaded"
    )
