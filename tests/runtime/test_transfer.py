"""The state of training goes from one worker to another, whole, whatever else comes to the socket."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elasticflow_airflow.runtime import transfer
from elasticflow_airflow.runtime.checkpoint import Registered
from elasticflow_airflow.runtime.transfer import StateServer, TransferError, receive

FACTS = {"step": 5}


class Odd:
    """Something with a state that a script registers."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[StateServer] = []

    def begin(registered: Registered) -> StateServer:
        servers.append(StateServer(registered, FACTS, "127.0.0.1"))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_every_kind_of_tensor_comes_over(serve):
    state = {
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negated": torch.tensor([1 + 2j]).conj().imag,
        "empty": torch.empty(0, 3),
        "number": torch.tensor(7, dtype=torch.int16),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "turned": torch.arange(6).reshape(2, 3).T,
        "flags": torch.tensor([True, False]),
        "large": torch.randn(1 << 16),
        "words": ["a", 1, 2.5, None, float("inf")],
    }
    zeros = {k: torch.zeros_like(v.resolve_conj().resolve_neg()) for k, v in state.items() if k != "words"}
    there = Registered(nn.Linear(2, 2), {"odd": Odd({**zeros, "conjugated": zeros["conjugated"].conj(), "words": []})})
    server = serve(Registered(nn.Linear(2, 2), {"odd": Odd(state)}))
    assert receive(server.contact, there).facts == FACTS
    came = there.others["odd"].state_dict()
    assert came["words"] == state["words"]
    for name in zeros:
        assert came[name].dtype == state[name].dtype
        assert torch.equal(came[name].resolve_conj(), state[name].resolve_conj()), name
    assert server.wait(1, lambda: False)


def test_a_large_tensor_may_take_longer_than_the_limit_of_silence(serve, monkeypatch):
    monkeypatch.setattr(transfer, "SILENCE_LIMIT_S", 0.4)
    model = nn.Linear(1 << 11, 1 << 12)  # 32 MiB
    server = serve(Registered(model))
    host, port, token = server.contact
    total = 4 * (1 << 23)
    with socket.create_connection((host, port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(token.encode())
        stream = slow.makefile("rb", buffering=0)
        (length,) = struct.unpack("!Q", stream.read(8))
        header = b""
        while len(header) < length:
            header += stream.read(length - len(header))
        assert json.loads(header)["facts"] == FACTS
        taken = 0
        while taken < total:
            piece = slow.recv(1 << 20)
            assert piece, f"the server gave up after {taken} of {total} bytes"
            taken += len(piece)
            time.sleep(0.03 * len(piece) / (1 << 20))  # about a second in all
        slow.sendall(b"!")
        assert server.wait(1, lambda: False, limit_s=0.5)


def test_who_shows_no_token_keeps_nobody_waiting(serve):
    server = serve(Registered(nn.Linear(2, 2)))
    host, port, token = server.contact
    strangers = [socket.create_connection((host, port)) for _ in range(3)]
    strangers[1].sendall(b"x" * 32)
    strangers[2].sendall(token[:5].encode())
    began_s = time.monotonic()
    assert receive(server.contact, Registered(nn.Linear(2, 2))).facts == FACTS
    assert server.wait(1, lambda: False)
    server.close()
    assert time.monotonic() - began_s < 20.0, "each would be waited for for half a minute"
    assert [stranger.recv(1) for stranger in strangers] == [b"", b"", b""]
    for stranger in strangers:
        stranger.close()


def test_a_state_that_cannot_be_told_is_not_waited_for(serve, capfd):
    server = serve(Registered(nn.Linear(2, 2), {"odd": Odd({"call": print})}))
    with pytest.raises(TransferError):
        receive(server.contact, Registered(nn.Linear(2, 2)))
    assert not server.wait(1, lambda: False)
    assert "the state at /odd/call is a builtin_function_or_method" in capfd.readouterr().err
