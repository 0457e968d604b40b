"""Where the stores of workers listen: sessions and torchrun agents open theirs alike."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from elasticflow_airflow.runtime import rendezvous
from elasticflow_airflow.runtime.gang import handover
from elasticflow_airflow.runtime.gang.meeting_store import publish_store, wait_for_address

LIMIT = datetime.timedelta(seconds=10)


def listening() -> list[tuple[str, int]]:
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == "0A":
                found.append((address.rsplit(":", 1)[0], int(address.rsplit(":", 1)[1], 16)))
    return found


def test_it_listens_where_the_others_are_told_to_come_and_nowhere_else(tmp_path):
    store = publish_store(tmp_path / "g000001.json", "127.0.0.1", LIMIT)
    store.set("key", "value")
    assert {address for address, port in listening() if port == store.port} == {"0100007F"}
    assert store.get("key") == b"value"


def test_both_who_open_stores_do_it_so():
    for module in (handover, rendezvous):
        assert module.publish_store is publish_store
        assert module.wait_for_address is wait_for_address
        assert "is_master=True" not in Path(module.__file__).read_text()


def test_an_address_of_another_machine(tmp_path):
    with pytest.raises(OSError, match="assign requested address"):
        publish_store(tmp_path / "g000001.json", "192.0.2.1", LIMIT)


def test_who_waits_finds_what_is_published(tmp_path):
    path = tmp_path / "rendezvous" / "g000001-session.json"
    store = publish_store(path, "127.0.0.1", LIMIT)
    assert wait_for_address(path, lambda: True) == ("127.0.0.1", store.port)


def test_it_reads_the_file_of_a_worker_from_before_an_upgrade(tmp_path):
    path = tmp_path / "g000001.json"
    path.write_text('{"address": "127.0.0.1", "port": 4711, "worker_id": "w0"}')
    assert wait_for_address(path, lambda: True) == ("127.0.0.1", 4711)


def test_waiting_ends_when_it_is_stopped(tmp_path):
    asked = iter([False, False, True])
    assert wait_for_address(tmp_path / "never.json", lambda: next(asked)) is None
