"""The service's own log, and who does not read it."""

from __future__ import annotations

import fcntl
import os
import socket
import time

import pytest

from elasticflow_airflow.client import ElasticFlowClient
from elasticflow_airflow.service.telemetry.service_log import PatientWriter


@pytest.fixture
def pipe():
    """A small pipe: its two ends."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with open(reading, "rb", buffering=0), open(writing, "w") as file:
        yield reading, file


def full(pipe):
    """Fill a pipe, so that whoever writes to it waits."""
    file = pipe[1]
    writing = file.fileno()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, b"x" * 4096):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    return file


def test_what_is_written_comes_in_order(tmp_path):
    with (tmp_path / "log").open("w") as file:
        writer = PatientWriter(file)
        for number in range(100):
            writer.write(f"{number}\n")
        writer.end()
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(100)]


def test_nobody_waits_for_a_reader_who_does_not_read_and_what_was_left_out_is_counted(pipe):
    writer = PatientWriter(full(pipe), most_waiting=10)
    for number in range(100):
        writer.write(f"{number}\n")
    read = b""
    while b"left out" not in read:
        read += os.read(pipe[0], 4096)
        writer.write("more\n")
    writer.end()
    written = read.decode().lstrip("x").splitlines()
    numbers = [line for line in written if line.isdigit()]
    assert numbers == [str(number) for number in range(len(numbers))]
    (note,) = [line for line in written if "left out" in line]
    assert int(note.rpartition("=")[2]) >= 80


def test_whoever_leaves_does_not_wait_long(pipe):
    writer = PatientWriter(full(pipe), most_waiting=1)
    for _ in range(3):
        writer.write("nobody hears\n")
    writer.end(limit_s=0.1)


def test_a_disk_that_is_full_for_a_while_costs_lines_and_no_more(tmp_path):
    with open("/dev/full", "w") as changing, (tmp_path / "log").open("w") as file:
        writer = PatientWriter(changing)
        writer.write("lost\n")
        while not writer._left_out:
            time.sleep(0.01)
        os.dup2(file.fileno(), changing.fileno())
        writer.write("kept\n")
        writer.end()
    kept, note = (tmp_path / "log").read_text().splitlines()
    assert (kept, note.rpartition(" ")[2]) == ("kept", "lines=1")


def test_a_service_whose_log_nobody_reads_works_and_ends(daemons, pipe, monkeypatch):
    """Its standard error is a pipe that is full from the first byte on."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    endpoint = daemons.served("a-token-that-is-long", stderr=full(pipe).fileno())
    with ElasticFlowClient(endpoint) as client:
        assert client.version()["api"]
        assert client.health().status == "ok"
    (service,) = daemons.processes
    service.terminate()
    assert service.wait(60) == 0


def test_an_upload_that_ends_in_the_middle_is_no_defect(daemons):
    endpoint = daemons.served("a-token-that-is-long")
    address = ("127.0.0.1", int(endpoint.base_url.rpartition(":")[2]))
    request = (
        f"PUT /v1/snapshots/{'0' * 64} HTTP/1.1\r\nHost: service\r\nAuthorization: Bearer {endpoint.token}\r\n"
        "Content-Length: 1000\r\n\r\n"
    )
    for _ in range(3):
        with socket.create_connection(address) as connection:
            connection.sendall(request.encode() + b"half of it")
    with ElasticFlowClient(endpoint) as client:
        assert client.version()["api"]
    (service,) = daemons.processes
    service.terminate()
    said = service.communicate(timeout=60)[1].decode()
    assert "service stopped" in said
    assert "Traceback" not in said, said
