"""The state of training goes from one worker to another, whole, whatever else comes to the socket."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.gang import neighbour_memory, transfer
from elasticflow_airflow.runtime.gang.transfer import StateServer, TransferError, receive

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


@pytest.fixture(params=["memory", "socket"])
def way(request, monkeypatch) -> str:
    """How large tensors come over: read by the joiner where they are, or sent."""
    if request.param == "socket":
        monkeypatch.setattr(neighbour_memory, "reach", lambda told: None)
    else:
        with neighbour_memory.readable_by(os.getpid()) as told:
            if neighbour_memory.reach(told) is None:
                pytest.skip(f"this system lets no process read another's memory ({told['where'] or 'no Linux'})")
    return request.param


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Sizes of the pieces that were read out of the other's memory."""
    sizes: list[int] = []
    real = neighbour_memory.Neighbour.read

    def note(self: Any, piece: neighbour_memory.Piece) -> int:
        sizes.append(piece[2])
        return real(self, piece)

    monkeypatch.setattr(neighbour_memory.Neighbour, "read", note)
    return sizes


def test_every_kind_of_tensor_comes_over(serve, way, read):
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
    assert (4 << 16 in read) == (way == "memory")


def test_a_large_model_and_its_optimizer_come_over_bit_by_bit(serve, way, read):
    def build(seed: int) -> Registered:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1 << 11, 1 << 12), nn.Linear(1 << 12, 100))  # 34 MB, in several pieces
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 1 << 11)).sum().backward()
        optimizer.step()
        return Registered(model, {"optimizer": optimizer})

    here, there = build(1), build(2)
    homes = [p.data_ptr() for p in there.model.parameters()]
    server = serve(here)
    assert receive(server.contact, there).nbytes > 100_000_000
    assert [p.data_ptr() for p in there.model.parameters()] == homes
    pairs = zip(here.model.parameters(), there.model.parameters(), strict=True)
    states = [part.others["optimizer"].state for part in (here, there)]
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)
        assert all(torch.equal(states[0][mine][name], states[1][theirs][name]) for name in ("exp_avg", "exp_avg_sq"))
    assert server.wait(1, lambda: False)
    assert sum(read) > 100_000_000 or way == "socket"


@pytest.mark.parametrize("way", ["memory"], indirect=True)
def test_what_is_read_while_the_other_goes_on_does_not_count(serve, way, monkeypatch):
    """Who trains has given up waiting, and changes its weights, while the joiner still reads them."""
    server = serve(Registered(nn.Linear(1 << 8, 1 << 8)))
    real = neighbour_memory.Neighbour.read_all

    def read_late(self: Any, pieces: Any) -> Any:
        server.close()
        return real(self, pieces)

    monkeypatch.setattr(neighbour_memory.Neighbour, "read_all", read_late)
    with pytest.raises(TransferError):
        receive(server.contact, Registered(nn.Linear(1 << 8, 1 << 8)))
    assert not server.wait(1, lambda: True)


@pytest.mark.parametrize("way", ["memory"], indirect=True)
def test_who_dies_while_its_memory_is_read_is_an_error(serve, way, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    server = serve(Registered(nn.Linear(1 << 8, 1 << 8)))
    reach = neighbour_memory.reach

    def reach_and_lose(told: dict[str, Any]) -> Any:
        found = reach(told)
        found._pid = gone.pid
        return found

    monkeypatch.setattr(neighbour_memory, "reach", reach_and_lose)
    with pytest.raises(TransferError, match="cannot be read: No such process"):
        receive(server.contact, Registered(nn.Linear(1 << 8, 1 << 8)))


def test_another_process_of_the_same_number_is_not_read():
    with neighbour_memory.readable_by(os.getpid()) as told:
        if told["where"]:
            assert neighbour_memory.reach({**told, "word": "00" * 16}) is None
            assert neighbour_memory.reach({**told, "where": "another machine"}) is None
            assert neighbour_memory.reach({**told, "at": 8}) is None
    assert neighbour_memory.reach({**told, "where": ""}) is None


def test_a_large_tensor_may_take_longer_than_the_limit_of_silence(serve, monkeypatch):
    monkeypatch.setattr(transfer, "SILENCE_LIMIT_S", 0.4)
    model = nn.Linear(1 << 11, 1 << 12)  # 32 MiB
    server = serve(Registered(model))
    host, port, token = server.contact
    total = 4 * (1 << 23)
    with socket.create_connection((host, port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        slow.sendall(token.encode() + struct.pack("!Q", 0))
        stream = slow.makefile("rb", buffering=0)
        (length,) = struct.unpack("!Q", stream.read(8))
        header = b""
        while len(header) < length:
            header += stream.read(length - len(header))
        assert json.loads(header)["facts"] == FACTS
        slow.sendall(b"S")
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
