"""Environments for ``requirements=``: real uv, without an index."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.wheels import make_wheel, requirement

from elasticflow_airflow.engines.local.machine import virtual_environments
from elasticflow_airflow.engines.local.machine.virtual_environments import Environments, python_in
from elasticflow_airflow.engines.port import EngineError

LIMIT_S = 60.0


@pytest.fixture
def used() -> set[str]:
    return set()


@pytest.fixture
def machine(tmp_path: Path, used: set[str]) -> Iterator[Environments]:
    made = Environments(tmp_path, {**os.environ, "UV_OFFLINE": "1"}, lambda: used)
    yield made
    made.close()


def build(machine: Environments, *lines: str, base: str = sys.executable) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not machine.is_ready(base, lines):
        assert machine.is_being_built(base, lines)
        assert time.monotonic() < until_s
        time.sleep(0.05)


def run(python: Path, program: str) -> str:
    return subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_what_is_required_is_added_to_the_packages_of_the_interpreter(machine: Environments, tmp_path: Path) -> None:
    lines = (requirement(make_wheel(tmp_path, "extra_package", module="def answer(): return 42\n", requires="torch")),)
    assert not machine.is_ready(sys.executable, lines)
    build(machine, *lines)
    python = python_in(tmp_path, sys.executable, lines)
    assert run(python, "import extra_package; print(extra_package.answer())") == "42"
    where = run(python, "import importlib.util as u; print(u.find_spec('torch').origin)")
    assert where == run(Path(sys.executable), "import importlib.util as u; print(u.find_spec('torch').origin)")
    assert not machine.is_being_built(sys.executable, lines)
    again = Environments(tmp_path, os.environ, set)  # As after a restart.
    assert again.is_ready(sys.executable, lines)
    again.close()


def test_what_is_required_goes_before_the_same_package_of_the_interpreter(
    machine: Environments, tmp_path: Path
) -> None:
    other = requirement(make_wheel(tmp_path, "tomli_w", "99.0"))
    build(machine, other)
    assert run(python_in(tmp_path, sys.executable, (other,)), "import tomli_w; print(tomli_w.VERSION)") == "99.0"


def test_a_failure_says_what_the_installer_said_and_the_next_question_tries_again(
    machine: Environments, tmp_path: Path
) -> None:
    wheel = tmp_path / "late_package-1.0-py3-none-any.whl"
    with pytest.raises(EngineError, match=r"could not be built: [\s\S]*late_package-1\.0"):
        build(machine, requirement(wheel))
    make_wheel(tmp_path, "late_package")
    build(machine, requirement(wheel))
    left = [path.name for path in (tmp_path / virtual_environments.FOLDER).iterdir() if path.name.startswith(".")]
    assert not left, "what a failed build has left is deleted"


def test_a_package_for_another_torch_is_refused(machine: Environments, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"old_package 1\.0 needs torch==1\.0, and the interpreter has torch 2"):
        build(machine, requirement(make_wheel(tmp_path, "old_package", requires="torch==1.0")))


def test_what_is_built_ends_with_the_service(machine: Environments, tmp_path: Path, monkeypatch) -> None:
    slow = tmp_path / "uv"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(virtual_environments, "find_uv", lambda: str(slow))
    assert not machine.is_ready(sys.executable, ("anything",))
    until_s = time.monotonic() + LIMIT_S
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    machine.close()
    pid = int((tmp_path / "pid").read_text())
    assert not os.path.exists(f"/proc/{pid}")


def test_no_secret_of_the_service_reaches_what_packages_run_when_they_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = tmp_path / "uv"
    listing.write_text(f"#!/bin/sh\nenv > {tmp_path}/environment\nexit 1\n")
    listing.chmod(0o755)
    monkeypatch.setattr(virtual_environments, "find_uv", lambda: str(listing))
    environ = {"PATH": os.environ["PATH"], "UV_OFFLINE": "1", "ELASTICFLOW_DATABASE_URL": "postgresql://me:secret@db"}
    machine = Environments(tmp_path, environ, set)
    with pytest.raises(EngineError, match="exit code 1"):
        build(machine, "anything")
    machine.close()
    said = (tmp_path / "environment").read_text()
    assert "UV_OFFLINE=1" in said
    assert "secret" not in said


def test_environments_that_nobody_uses_are_deleted(
    machine: Environments, tmp_path: Path, used: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(virtual_environments, "KEPT", 1)
    old, running, many, lately = (requirement(make_wheel(tmp_path, name)) for name in ("one", "two", "three", "four"))
    for line, age_s in (
        (old, virtual_environments.KEPT_S),
        (running, virtual_environments.KEPT_S),
        (many, 2 * 86400.0),
        (lately, 0.0),
    ):
        build(machine, line)
        python = python_in(tmp_path, sys.executable, (line,))
        if line == running:
            used.add(str(python))
        os.utime(python.parent.parent, (time.time() - age_s - 60, time.time() - age_s - 60))
    build(machine, requirement(make_wheel(tmp_path, "five")))
    kept = [line for line in (old, running, many, lately) if python_in(tmp_path, sys.executable, (line,)).exists()]
    assert kept == [running, lately]


def test_without_uv_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uv", None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match=r"pip install 'elasticflow-airflow\[environments\]'"):
        virtual_environments.find_uv()
