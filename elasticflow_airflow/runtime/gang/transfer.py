"""Transfers the training state from a worker that has it to a joiner, over a socket and directly into its tensors.

It uses a plain socket instead of the process group: leaving workers can serve, a death ends the transfer at once, and
several run in parallel. The receiver presents a token from the incarnation's folder as proof that it may read that
folder. On the same machine the receiver reads large tensors directly from the sender's memory (neighbour_memory.py),
which is several times as fast. May import torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.state_tree import flatten, unflatten
from elasticflow_airflow.runtime.checkpoints.tensor_bytes import bytes_of
from elasticflow_airflow.runtime.gang import neighbour_memory

_LENGTH = struct.Struct("!Q")
_TOKEN_BYTES = 32
_BY_MEMORY, _BY_SOCKET = b"M", b"S"
_READING, _DONE, _GRANTED = b".", b"!", b"k"
_SMALL_BYTES = 1 << 16
_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
"""Size of one send: a socket's timeout applies to the whole buffer that it is given."""
_INTRODUCTION_LIMIT_S = 5.0
"""A client that has not sent the token after this long, in seconds, is not one of our workers."""
SILENCE_LIMIT_S = 30.0
"""A peer that sends or receives nothing for this long, in seconds, has given up or is stopped."""
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}


class TransferError(RuntimeError):
    """The state could not be transferred: the peer is gone, silent, or uses another protocol."""


@dataclass(frozen=True, slots=True)
class Received:
    """The facts that came with the state, and the size of the state in bytes."""

    facts: Mapping[str, Any]
    nbytes: int


class StateServer:
    """Serves the state of ``registered`` as it is; it must not change until ``wait`` or ``close`` has returned."""

    def __init__(self, registered: Registered, facts: Mapping[str, Any], address: str) -> None:
        self._registered, self._facts = registered, facts
        self._socket = socket.create_server((address, 0), backlog=8)
        self._socket.settimeout(0.1)
        self._token = secrets.token_hex(_TOKEN_BYTES // 2)
        self._served = 0
        self._moved_s = time.monotonic()
        """Monotonic time at which the last byte was received by a peer."""
        self._failed = False
        self._guests: list[tuple[threading.Thread, socket.socket]] = []
        self._changed = threading.Condition()
        self._closed = False
        self.nbytes = 0
        self._thread = threading.Thread(target=self._serve, name="elasticflow-state", daemon=True)
        self._thread.start()

    @property
    def contact(self) -> list[Any]:
        """Host, port and token, JSON-serializable."""
        host, port = self._socket.getsockname()[:2]
        return [host, port, self._token]

    def wait(self, count: int, gone: Callable[[], bool], limit_s: float = 4 * SILENCE_LIMIT_S) -> bool:
        """Wait until ``count`` workers have the state; return False if there is no worker left to wait for.

        This is the case when ``gone()`` is true, when the state cannot be sent, or when no byte was received for
        ``limit_s`` seconds.
        """
        began_s = time.monotonic()
        with self._changed:
            while self._served < count:
                if self._failed or gone() or time.monotonic() - max(began_s, self._moved_s) > limit_s:
                    return False
                self._changed.wait(0.02)
        return True

    def close(self) -> None:
        """Stop serving."""
        self._closed = True
        with contextlib.suppress(OSError):  # If this does not wake ``accept``, its timeout does.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for thread, connection in self._guests:
            with contextlib.suppress(OSError):  # It has already disconnected.
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closed:
                    return
                raise
            # One thread per connection: a silent client blocks nobody else.
            self._guests = [guest for guest in self._guests if guest[0].is_alive()]
            thread = threading.Thread(target=self._attend, args=[connection], name="elasticflow-state", daemon=True)
            thread.start()
            self._guests.append((thread, connection))

    def _attend(self, connection: socket.socket) -> None:
        # OSError: the receiver died; the plan will end its generation.
        with connection, contextlib.suppress(OSError):
            try:
                self._hand_over(connection)
            except (TypeError, ValueError, RuntimeError) as error:
                sys.stderr.write(f"elasticflow: the state cannot be handed over: {error}\n")
                self._failed = True
        with self._changed:
            self._changed.notify_all()

    def _introduces_itself(self, connection: socket.socket) -> bool:
        end_s, said = time.monotonic() + _INTRODUCTION_LIMIT_S, b""
        while len(said) < _TOKEN_BYTES:
            connection.settimeout(max(0.001, end_s - time.monotonic()))
            piece = connection.recv(_TOKEN_BYTES - len(said))
            if not piece:
                return False
            said += piece
        return hmac.compare_digest(said, self._token.encode())

    def _hand_over(self, connection: socket.socket) -> None:
        if not self._introduces_itself(connection):
            return
        connection.settimeout(SILENCE_LIMIT_S)
        (pid,) = _LENGTH.unpack(connection.recv(_LENGTH.size, socket.MSG_WAITALL))
        description, tensors = flatten(_state_of(self._registered))
        with neighbour_memory.readable_by(pid) as memory:
            shapes = [[str(t.dtype), list(t.shape)] for t in tensors]
            places = [_place_of(tensor) for tensor in tensors]
            header = {"facts": dict(self._facts), "state": description, "tensors": shapes}
            text = json.dumps(header | {"memory": memory, "places": places}).encode()
            self._send(connection, memoryview(_LENGTH.pack(len(text)) + text))
            by_memory = connection.recv(1) == _BY_MEMORY
            if by_memory:
                self._send_tensors(connection, [t for t, at in zip(tensors, places, strict=True) if at is None])
                self._let_read(connection)
        if not by_memory:
            self._send_tensors(connection, tensors)
            self._let_read(connection)
        # Tells the receiver that nothing changed while it was reading.
        connection.sendall(_GRANTED)
        with self._changed:
            self.nbytes = sum(tensor.nbytes for tensor in tensors)
            self._served += 1

    def _send_tensors(self, connection: socket.socket, tensors: Sequence[Tensor]) -> None:
        small = bytearray()
        for tensor in tensors:
            # A conjugated view's memory holds the unconjugated numbers.
            view = bytes_of(whole := tensor.resolve_conj().resolve_neg().cpu().contiguous())
            if len(view) < _SMALL_BYTES:
                small += view
            else:
                self._send(connection, memoryview(bytes(small)))
                small.clear()
                self._send(connection, view)
            del view, whole
        self._send(connection, memoryview(bytes(small)))

    def _let_read(self, connection: socket.socket) -> None:
        """Wait until the receiver has everything. Raises ConnectionError if it disconnects before that."""
        while (said := connection.recv(1)) == _READING:
            self._moved_s = time.monotonic()
        if said != _DONE or self._closed:
            raise ConnectionAbortedError("it did not take all of the state")

    def _send(self, connection: socket.socket, data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            connection.sendall(data[start : start + _PIECE_BYTES])
            self._moved_s = time.monotonic()


def receive(contact: Sequence[Any], registered: Registered) -> Received:
    """Receive the state that a :class:`StateServer` serves. Raises TransferError; the state is then undefined."""
    host, port, token = contact
    try:
        with socket.create_connection((str(host), int(port)), timeout=SILENCE_LIMIT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(str(token).encode() + _LENGTH.pack(os.getpid()))
            stream = connection.makefile("rb", buffering=_BUFFER_BYTES)
            (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
            header = json.loads(_exactly(stream, length))
            source = neighbour_memory.reach(header["memory"])
            connection.sendall(_BY_SOCKET if source is None else _BY_MEMORY)
            _, mine = flatten(_state_of(registered))
            tensors, pieces = [], []
            for index, (dtype, shape) in enumerate(header["tensors"]):
                tensor = _target(_DTYPES[dtype], shape, mine[index] if index < len(mine) else None)
                tensors.append(tensor)
                if source is None or header["places"][index] is None:
                    _read_into(stream, tensor)
                else:
                    pieces.append((int(header["places"][index]), tensor.data_ptr(), tensor.nbytes))
            if source is not None:
                for _ in source.read_all(pieces):
                    connection.sendall(_READING)
            connection.sendall(_DONE)
            if stream.read(1) != _GRANTED:
                raise EOFError("who served the state has gone on meanwhile")
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise TransferError(f"the state did not come over: {error}") from error
    _take(registered, unflatten(header["state"], tensors))
    return Received(facts=header["facts"], nbytes=sum(tensor.nbytes for tensor in tensors))


def _state_of(registered: Registered) -> dict[str, Any]:
    # All buffers, including those that a state dict omits: a joiner has different ones, or none yet.
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


def _place_of(tensor: Tensor) -> int | None:
    """Return the address at which a peer may read a tensor directly; None if it must be sent."""
    plain = tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    # With a GPU a tensor may lie in memory that only the device's driver can read.
    if not plain or tensor.nbytes < _SMALL_BYTES or _has_gpu():
        return None
    return tensor.data_ptr()


def _has_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch's own


def _target(dtype: torch.dtype, shape: list[int], at_home: Tensor | None) -> Tensor:
    """Return the tensor to write into: the local one that model and optimizer use, if it fits; else a new one."""
    fits = at_home is not None and at_home.dtype == dtype and list(at_home.shape) == shape
    direct = fits and at_home is not None and at_home.device.type == "cpu" and at_home.is_contiguous()
    direct = direct and at_home is not None and not (at_home.is_conj() or at_home.is_neg())
    return at_home if direct and at_home is not None else torch.empty(shape, dtype=dtype)


def _read_into(stream: Any, tensor: Tensor) -> None:
    view = bytes_of(tensor)
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise EOFError("the connection ended in the middle of a tensor")
        done += count


def _exactly(stream: Any, count: int) -> bytes:
    data: bytes = stream.read(count)
    if len(data) != count:
        raise EOFError("the connection ended early")
    return data
