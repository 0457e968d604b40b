"""What ``secret_env`` holds: one key for all who are first at once, and values that show nowhere."""

from __future__ import annotations

import multiprocessing
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from elasticflow_airflow.service.secrets import SecretBox, SecretError

THREADS, PROCESSES = 24, 3


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
    key_file = tmp_path / "secret.key"
    context = multiprocessing.get_context("fork")
    with context.Pool(PROCESSES) as pool:
        sealed = [one for some in pool.starmap(_seal_at_once, [(key_file, 8)] * PROCESSES) for one in some]
    box = SecretBox(key_file)
    assert len([box.open(one)["TOKEN"] for one in sealed]) == PROCESSES * 8  # A process may have been asked twice.
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
