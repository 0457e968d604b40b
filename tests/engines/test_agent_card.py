"""An agent's folder belongs to one agent, and a notice says when a machine goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow_airflow.engines.cluster.agent_card import AgentCard, only_agent
from elasticflow_airflow.engines.cluster.leave_notice import LONGEST_S, leaving_at
from elasticflow_airflow.engines.local.machine.processes import ProcessId

NOBODY = '{"process": null, "url": "", "fingerprint": ""}'


def test_a_second_agent_on_a_folder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with only_agent(tmp_path / "node"):
        AgentCard(ProcessId.current(), "http://10.0.0.2:8322", "f").write(tmp_path / "node")
        who = f"the agent with pid {os.getpid()}, at http://10.0.0.2:8322, uses "
        with pytest.raises(ValueError, match=who), only_agent(tmp_path / "node"):
            raise AssertionError("two agents in one folder")
    with only_agent(tmp_path / "node"):
        pass


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"process": {"pid": -1}}', "\0", NOBODY])
def test_a_damaged_card_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "agent.json").write_text(text)
    assert AgentCard.read(tmp_path) is None


def test_an_agent_that_does_not_leave_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticflow_airflow.engines.cluster.agent_card._LEAVE_LIMIT_S", 0.2)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    found = ProcessId.of(process.pid)
    assert found is not None
    AgentCard(found, "http://x", "").end()
    assert process.wait(5) == -9


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        *[("120", 120), (" 15.5\n", 15.5), ("1e30", LONGEST_S), ("9" * 99, LONGEST_S)],
        *[(text, 0) for text in ("", "soon", "nan", "inf", "-3")],
    ],
)
def test_a_notice_says_when_the_machine_goes(tmp_path: Path, text: str, left_s: float) -> None:
    notice = tmp_path / "leaving"
    assert leaving_at(notice) is None
    assert leaving_at(None) is None
    notice.write_text(text)
    os.utime(notice, (1000.0, 1000.0))
    assert leaving_at(notice) == 1000.0 + left_s
    assert leaving_at(tmp_path) is None, "a folder is no notice"
