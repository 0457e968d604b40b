"""Where the stores of workers listen: sessions and torchrun agents open theirs alike."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from elasticflow_airflow.runtime import meeting, rendezvous
from elasticflow_airflow.runtime.meeting_store import serve_store

LIMIT = datetime.timedelta(seconds=10)


def listening() -> list[tuple[str, int]]:
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A":
                found.append((address.rsplit(":", 1)[0], int(address.rsplit(":", 1)[1], 16)))
    return found


def test_it_listens_where_the_others_are_told_to_come_and_nowhere_else():
    store = serve_store("127.0.0.1", LIMIT)
    store.set("key", "value")
    assert {address for address, port in listening() if port == store.port} == {"0100007F"}
    assert store.get("key") == b"value"


def test_both_who_open_stores_do_it_so():
    for module in (meeting, rendezvous):
        assert module.serve_store is serve_store
        assert "is_master=True" not in Path(module.__file__).read_text()


def test_an_address_of_another_machine():
    with pytest.raises(OSError, match="assign requested address"):
        serve_store("192.0.2.1", LIMIT)
