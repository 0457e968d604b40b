"""Hands the state of training from a worker that has it to one that joins: over a socket, straight into its tensors.

A plain socket rather than the process group: who leaves can serve, a death ends it at once, and several go in parallel.
The receiver proves that it may read the incarnation's folder, where the token lies. May import torch and the standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elasticflow_airflow.runtime.checkpoint import Registered
from elasticflow_airflow.runtime.state import flatten, unflatten

_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 32
_SMALL_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
SILENCE_LIMIT_S = 30.0
"""A peer that sends or takes nothing for so long has given up, or is stopped."""
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class TransferError(RuntimeError):
    """The state could not be handed over: the other side is gone, silent, or speaks another language."""


@dataclass(frozen=True, slots=True)
class Received:
    """What came with the state."""

    facts: Mapping[str, Any]
    nbytes: int


class StateServer:
    """Serves the state of ``registered`` as it is; nobody may change it until ``wait`` or ``close`` has returned."""

    def __init__(self, registered: Registered, facts: Mapping[str, Any], address: str) -> None:
        self._registered, self._facts = registered, facts
        self._socket = socket.create_server((address, 0), backlog=8)
        self._socket.settimeout(0.1)
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._served = 0
        self._changed = threading.Condition()
        self._closed = False
        self.nbytes = 0
        self._thread = threading.Thread(target=self._serve, name="elasticflow-state", daemon=True)
        self._thread.start()

    @property
    def contact(self) -> list[Any]:
        """Host, port and token, as JSON."""
        host, port = self._socket.getsockname()[:2]
        return [host, port, self._token]

    def wait(self, count: int, gone: Callable[[], bool], limit_s: float = 4 * SILENCE_LIMIT_S) -> bool:
        """Wait until ``count`` workers have the state; False when ``gone`` says that there is nobody to wait for."""
        with self._changed:
            waited_s = 0.0
            while self._served < count:
                if gone() or waited_s > limit_s:
                    return False
                self._changed.wait(0.02)
                waited_s += 0.02
        return True

    def close(self) -> None:
        """Stop serving."""
        self._closed = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            # A receiver that dies asks nobody for anything any more: its generation ends by the plan.
            with connection, contextlib.suppress(OSError):
                self._hand_over(connection)
            with self._changed:
                self._changed.notify_all()

    def _hand_over(self, connection: socket.socket) -> None:
        connection.settimeout(SILENCE_LIMIT_S)
        stream = connection.makefile("rb")
        if not hmac.compare_digest(stream.read(_TOKEN_BYTES), self._token.encode()):
            return
        description, tensors = flatten(_state_of(self._registered))
        shapes = [[str(t.dtype), list(t.shape)] for t in tensors]
        header = json.dumps({"facts": dict(self._facts), "state": description, "tensors": shapes}).encode()
        connection.sendall(_LENGTH.pack(len(header)) + header)
        small = bytearray()
        total = 0
        for tensor in tensors:
            view = bytes_of(whole := tensor.cpu().contiguous())
            total += len(view)
            if len(view) < _SMALL_BYTES:
                small += view
            else:
                connection.sendall(small)
                small.clear()
                connection.sendall(view)
            del view, whole
        connection.sendall(small)
        if stream.read(1) != b"!":
            return
        with self._changed:
            self.nbytes = total
            self._served += 1


def receive(contact: Sequence[Any], registered: Registered) -> Received:
    """Take over the state that a :class:`StateServer` serves. Raises TransferError; the state is then undefined."""
    host, port, token = contact
    try:
        with socket.create_connection((str(host), int(port)), timeout=SILENCE_LIMIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(str(token).encode())
            stream = connection.makefile("rb", buffering=_BUFFER_BYTES)
            (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
            header = json.loads(_exactly(stream, length))
            _, mine = flatten(_state_of(registered))
            tensors, total = [], 0
            for index, (dtype, shape) in enumerate(header["tensors"]):
                at_home = mine[index] if index < len(mine) else None
                tensor, nbytes = _read_tensor(stream, _DTYPES[dtype], shape, at_home)
                tensors.append(tensor)
                total += nbytes
            connection.sendall(b"!")
    except (OSError, EOFError, ValueError, KeyError, TypeError, struct.error) as error:
        raise TransferError(f"the state did not come over: {error}") from error
    _take(registered, unflatten(header["state"], tensors))
    return Received(facts=header["facts"], nbytes=total)


def _state_of(registered: Registered) -> dict[str, Any]:
    # All buffers, also those that a state dict leaves out: who joins has others, or none yet.
    buffers = dict(registered.model.named_buffers())
    return {
        "model": {**dict(registered.model.named_parameters()), **buffers},
        **{name: part.state_dict() for name, part in registered.others.items()},
    }


@torch.no_grad()
def _take(registered: Registered, state: Mapping[str, Any]) -> None:
    own = {**dict(registered.model.named_parameters()), **dict(registered.model.named_buffers())}
    if own.keys() != state["model"].keys():
        odd = sorted(own.keys() ^ state["model"].keys())[:3]
        raise TransferError(f"the joining worker built another model: {', '.join(odd)} is not in both")
    for name, tensor in state["model"].items():
        if tensor.shape != own[name].shape:
            raise TransferError(f"the joining worker built another model: {name} has another shape")
        if tensor.data_ptr() != own[name].data_ptr():
            own[name].copy_(tensor)
    for name, part in registered.others.items():
        part.load_state_dict(state[name])


def _read_tensor(stream: Any, dtype: torch.dtype, shape: list[int], at_home: Tensor | None) -> tuple[Tensor, int]:
    """Read one tensor, into the one at home where that fits: it is what the model and the optimizer use."""
    fits = at_home is not None and at_home.dtype == dtype and list(at_home.shape) == shape
    direct = fits and at_home is not None and at_home.device.type == "cpu" and at_home.is_contiguous()
    target = at_home if direct and at_home is not None else torch.empty(shape, dtype=dtype)
    view = bytes_of(target)
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise EOFError("the connection ended in the middle of a tensor")
        done += count
    return target, done


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU; the tensor must outlive the view."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _exactly(stream: Any, count: int) -> bytes:
    data: bytes = stream.read(count)
    if len(data) != count:
        raise EOFError("the connection ended early")
    return data
