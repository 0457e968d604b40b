"""What ``secret_env`` holds: one key for all who are first at once, and values that show nowhere."""

from __future__ import annotations

import inspect
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from cryptography.fernet import Fernet
from pydantic import ValidationError

from elasticflow_airflow.service.secrets import SecretBox, SecretError, hidden_values
from elasticflow_airflow.service.settings import ServiceSettings, problems_of
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


# -- keys by configuration ---------------------------------------------------------------------------------------

OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))
MAKE_ONE = r"python -c 'from cryptography\.fernet import Fernet; print\(Fernet\.generate_key\(\)\.decode\(\)\)'"


def test_the_first_key_encrypts_and_all_decrypt(tmp_path):
    before, rotated, after = (SecretBox(tmp_path / "secret.key", keys) for keys in ((OLD,), (NEW, OLD), (NEW,)))
    old, new = before.seal({"TOKEN": "a"}), rotated.seal({"TOKEN": "b"})
    assert rotated.open(old) == {"TOKEN": "a"}
    assert after.open(new) == {"TOKEN": "b"}
    with pytest.raises(SecretError, match=r"a key that ELASTICFLOW_SECRET_KEY.* does not name any more; submit"):
        after.open(old)
    assert list(tmp_path.iterdir()) == [], "no key is made beside those that are configured"


def test_what_was_encrypted_before_keys_were_configured_stays_readable(tmp_path):
    sealed = SecretBox(tmp_path / "secret.key").seal({"TOKEN": "a"})
    box = SecretBox(tmp_path / "secret.key", [NEW])
    assert box.open(sealed) == {"TOKEN": "a"}
    assert SecretBox(tmp_path / "elsewhere", [NEW]).open(box.seal({"TOKEN": "b"})) == {"TOKEN": "b"}
    assert box.key_ids == (SecretBox(tmp_path / "elsewhere", [NEW]).key_id, SecretBox(tmp_path / "secret.key").key_id)


def test_the_id_of_a_key_tells_it_from_others_and_not_what_it_is(tmp_path):
    one, other = SecretBox(tmp_path / "one", [OLD]), SecretBox(tmp_path / "other", [NEW, OLD])
    assert other.key_ids == (other.key_id, one.key_id)
    assert re.fullmatch("[0-9a-f]{16}", one.key_id)
    assert one.key_id != other.key_id
    assert SecretBox(tmp_path / "made").key_id == SecretBox(tmp_path / "made").key_id
    (tmp_path / "damaged").write_bytes(b"no key at all")
    with pytest.raises(SecretError, match="damaged holds no key"):
        _ = SecretBox(tmp_path / "damaged").key_id


def test_keys_are_read_from_the_environment_or_a_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"{NEW}\n\n  {OLD}\n")
    assert ServiceSettings(secret_key=f" {NEW} , {OLD},").read_secret_keys() == (NEW, OLD)
    assert ServiceSettings(secret_key_file=file).read_secret_keys() == (NEW, OLD)
    assert ServiceSettings(secret_key=OLD, secret_key_file=file).read_secret_keys() == (OLD,)
    assert ServiceSettings(secret_key="").read_secret_keys() == ()
    assert ServiceSettings().read_secret_keys() == ()
    assert OLD not in repr(ServiceSettings(secret_key=OLD))


@pytest.mark.parametrize(
    ("given", "said"),
    [("no-key-at-all", "key 2 of 2 is no Fernet key"), ("A" * 42, "key 2 of 2 is no"), ("schlüssel", "key 2 of")],
)
def test_a_key_that_is_none_is_refused_with_how_to_make_one_and_never_shown(tmp_path, given, said):
    with pytest.raises(ValidationError) as refused:
        ServiceSettings(secret_key=f"{NEW},{given}")
    (sentence,) = problems_of(refused.value)
    assert re.fullmatch(f"ELASTICFLOW_SECRET_KEY: {said}.* {MAKE_ONE}", sentence)
    file = tmp_path / "keys"
    file.write_text(f"{NEW}\n{given}\n")
    with pytest.raises(ValueError, match=f"the file of secret keys {file}: {said}.* {MAKE_ONE}") as from_file:
        ServiceSettings(secret_key_file=file).read_secret_keys()
    for text in (str(refused.value), repr(refused.value), str(from_file.value)):
        assert given not in text
        assert NEW not in text


def test_a_file_without_keys_is_refused(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, said in {"empty": "there is no key", "binary": "cannot be read", "missing": "cannot be read"}.items():
        with pytest.raises(ValueError, match=f"the file of secret keys {tmp_path / name}.*{said}"):
            ServiceSettings(secret_key_file=tmp_path / name).read_secret_keys()
    with pytest.raises(ValidationError):
        ServiceSettings(secret_key=" , ")
