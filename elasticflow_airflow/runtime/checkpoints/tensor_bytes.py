"""Access to tensor memory as bytes, and digests of it. May import torch and the standard library only."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; the tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def add_tensor(digest: Any, tensor: Tensor) -> None:
    """Update a :mod:`hashlib` digest with the dtype, the shape and every byte of a dense tensor."""
    whole = tensor.detach().cpu().contiguous()
    digest.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
    digest.update(bytes_of(whole))
