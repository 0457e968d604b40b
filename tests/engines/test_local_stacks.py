"""Asking a process for its stacks: whoever has the handler answers, and nobody is ended by the question."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticflow_airflow.engines.local.machine import stacks
from elasticflow_airflow.engines.local.machine.processes import ProcessId

BEGIN = "import sys, time; from pathlib import Path; from elasticflow_airflow.runtime.process import stacks; "
REGISTER = "stacks.register(Path(sys.argv[1])); "
SLEEP = "print('ready', flush=True); time.sleep(600)"
BUSY = "print('ready', flush=True); sum(iter(int, 1))"
TAKEN_AWAY = "import signal; signal.signal(stacks.SIGNAL, signal.SIG_DFL); "
OWN = "import signal; signal.signal(stacks.SIGNAL, lambda *_: print('mine', flush=True)); "
PIECES = (
    "import signal; "
    "write = lambda text: Path(sys.argv[1]).open('a').write(text); "
    "answer = lambda *_: (write('Thread 1 (most recent call first):\\n  File \"a.py\", line 1 in work\\n'), "
    "time.sleep(0.6), write('  File \"train.py\", line 1 in <module>\\n')); "
    "signal.signal(stacks.SIGNAL, answer); "
)
FORGOTTEN = "Path(sys.argv[1]).write_text(''); "

Start = Callable[[str], tuple[ProcessId, Path]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> tuple[ProcessId, Path]:
        path = tmp_path / f"{len(started)}.txt"
        process = subprocess.Popen([sys.executable, "-c", BEGIN + code, str(path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = ProcessId.of(process.pid)
        assert found is not None
        return found, path

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("code", [SLEEP, BUSY])
def test_a_process_tells_again_and_again(start: Start, code: str) -> None:
    process, path = start(REGISTER + code)
    for _ in range(2):
        text = stacks.ask({"w": (process, path)})["w"]
        assert text.startswith(("Current thread", "Thread"))
        assert text.count("most recent call first") == 1
        assert 'File "<string>", line 1' in text
    assert process.is_alive()


def test_an_answer_is_waited_for_to_its_end(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written frame by frame, and a busy machine may rest between two of them."""
    monkeypatch.setattr(stacks, "_QUIET_LOOKS", 1000)  # this one, too, while the test looks on
    process, path = start(REGISTER + PIECES + SLEEP)
    assert "train.py" in stacks.ask({"w": (process, path)}, limit_s=60.0)["w"]


def test_the_end_of_an_answer_is_known(start: Start) -> None:
    """Otherwise every question would take as long as a busy machine may rest."""
    process, path = start(REGISTER + SLEEP)
    assert stacks.ask({"w": (process, path)})["w"].splitlines()[-1].endswith(stacks._OUTERMOST)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (FORGOTTEN + SLEEP, "taken the handler away"),
        (REGISTER + TAKEN_AWAY + SLEEP, "taken the handler away"),
        (SLEEP, "has not begun yet"),
        (REGISTER + OWN + SLEEP, "has not answered within"),
    ],
)
def test_whoever_cannot_tell_is_left_alone(start: Start, code: str, says: str) -> None:
    process, path = start(code)
    assert says in stacks.ask({"w": (process, path)}, limit_s=0.5)["w"]
    assert process.is_alive()


def test_one_that_is_gone_or_not_there_yet_is_named(start: Start) -> None:
    process, path = start(REGISTER + SLEEP)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    found = stacks.ask({"a": (process, path), "b": (None, path)})
    assert all("no process to ask" in text for text in found.values())


def test_a_long_answer_is_cut(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MOST_BYTES", 20)
    process, path = start(REGISTER + SLEEP)
    assert stacks.ask({"w": (process, path)})["w"].endswith("(... and more)")
