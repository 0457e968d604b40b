"""What ``secret_env`` holds: one key for all who are first at once, and values that show nowhere."""

from __future__ import annotations

import inspect
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from elasticflow_airflow.service.secrets import SecretBox, SecretError, hidden_values
from elasticflow_airflow.service.store.documents.columns import Unreadable
from elasticflow_airflow.service.store.views import UNREADABLE

THREADS, PROCESSES = 24, 3
IMPORTS = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from elasticflow_airflow.service.secrets import SecretBox
"""
SEAL = """
print("ready", flush=True)
sys.stdin.readline()
for sealed in _seal_at_once(Path(sys.argv[1]), 8):
    print(sealed.decode())
"""


def _seal_at_once(key_file: Path, threads: int) -> list[bytes]:
    """Seal something in many threads that begin together, each with a box of its own."""
    barrier = Barrier(threads)

    def seal(number: int) -> bytes:
        barrier.wait(30)
        sealed = SecretBox(key_file).seal({"TOKEN": f"value {os.getpid()} {number}"})
        assert sealed is not None
        return sealed

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(seal, range(threads)))


def test_whoever_is_first_makes_the_key_and_all_others_take_it(tmp_path):
    for round_number in range(5):
        key_file = tmp_path / str(round_number) / "secret.key"
        key_file.parent.mkdir()
        sealed = _seal_at_once(key_file, THREADS)
        box = SecretBox(key_file)
        assert len({box.open(one)["TOKEN"] for one in sealed}) == THREADS
        assert [path.name for path in key_file.parent.iterdir()] == ["secret.key"]
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600


def test_processes_that_are_first_at_once_agree_on_one_key(tmp_path):
    """New ones: what is forked from a process with threads may find a lock held for ever."""
    key_file, code = tmp_path / "secret.key", f"{IMPORTS}{inspect.getsource(_seal_at_once)}{SEAL}"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(key_file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(PROCESSES)
    ]
    ready = [process.stdout.readline() for process in started if process.stdout is not None]
    assert ready == [b"ready\n"] * PROCESSES
    for process in started:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    sealed = [line for process in started for line in process.communicate(timeout=60)[0].split()]
    box = SecretBox(key_file)
    assert len({box.open(one)["TOKEN"] for one in sealed}) == PROCESSES * 8
    assert [path.name for path in tmp_path.iterdir()] == ["secret.key"]


@pytest.mark.parametrize("content", [b"", b"no key at all"])
def test_a_file_that_holds_no_key_is_named_and_never_replaced(tmp_path, content):
    key_file = tmp_path / "secret.key"
    key_file.write_bytes(content)
    with pytest.raises(SecretError, match=r"secret\.key holds no key.*remove"):
        SecretBox(key_file).seal({"TOKEN": "a"})
    with pytest.raises(SecretError, match=r"secret\.key"):
        SecretBox(key_file).open(b"sealed")
    assert key_file.read_bytes() == content


def test_secrets_are_hidden_also_where_another_part_of_a_submission_cannot_be_read(tmp_path):
    box = SecretBox(tmp_path / "secret.key")
    sealed = box.seal({"TOKEN": "hunter2-of-the-hub"})
    command = {"args": ["--key", "s3cret-argument"], "args_shown": ["--key", "***"]}
    hidden = hidden_values(box, Unreadable({"command": command, "labels": 3}, "labels: no mapping"), sealed)
    assert {"hunter2-of-the-hub", "s3cret-argument"} <= set(hidden.values())
    with pytest.raises(UNREADABLE):
        hidden_values(box, Unreadable({"command": 3}, "command: no object"), sealed)


def test_what_a_script_reports_of_its_secrets_shows_nowhere(world):
    """In metrics, by name or value, at any depth."""
    secret = "hunter2-and-more"
    fake = {"metrics": {"note": f"used {secret}", secret: [{"deep": secret}], "accuracy": 0.5}}
    job = world.submit(within=900, steps=60, scaling_curve={1: 10.0}, secret_env={"TOKEN": secret}, fake=fake)
    result = world.ended(job).result
    assert result is not None
    assert result.metrics == {"note": "used ***", "***": [{"deep": "***"}], "accuracy": 0.5}
