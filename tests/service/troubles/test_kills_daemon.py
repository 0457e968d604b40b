"""``kill -9`` of the complete daemon, at any age, while several owners submit, renew and acknowledge through it.

Nobody starts the service but its clients, as in production: whoever finds it gone brings it back.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, ensure_service, snapshot_folder

OWNERS = 3
JOBS = 2 * OWNERS
"""It goes on until so many have ended, too: a busy machine needs more services for them."""
AGES_S = ((0.0, 0.4), (0.4, 1.5), (0.5, 3.0))
"""Killed while it imports and makes its tables, while it takes up its work, and so long after its first answer."""
LIMIT_S = 600


def submission(snapshot: str, owner: int, run: int) -> JobSubmission:
    """A job of a few modelled seconds, profiled first; every third one with a curve."""
    given = {"scaling_curve": {1: 10.0, 2: 18.0, 4: 32.0}} if owner % 3 == 2 else {}
    return JobSubmission(
        identity=JobIdentity(dag_id="daily", run_id=f"run{run}", task_id=f"owner{owner}"),
        command=Command(snapshot=snapshot, script="train.py"),
        length=Length(steps=60 + 30 * owner),
        global_batch_size=8,
        best_effort=True,
        **given,
    )


def kill_again_and_again(daemons, chance: random.Random, done: list[str], enough: int) -> int:
    """Kill every service that shows up, at another age each, until enough jobs are done; returns how many times."""
    kills = 0
    killed: set[int] = set()
    end = time.monotonic() + LIMIT_S
    while kills < enough or len(done) < JOBS:
        assert time.monotonic() < end, f"{kills} services showed up, {len(done)} jobs were done"
        pids = [pid for pid in daemons.pids() if pid not in killed]
        if not pids:
            time.sleep(0.01)
            continue
        ages_s = AGES_S[kills % len(AGES_S)]
        if ages_s is AGES_S[-1]:
            ensure_service(daemons.state_dir(), limit_s=120)
            pids = [pid for pid in daemons.pids() if pid not in killed]
        time.sleep(chance.uniform(*ages_s))
        for pid in pids:  # Several race for the lock: whoever finds the service gone starts one.
            with suppress(ProcessLookupError):  # A loser of the race.
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        kills += 1
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("kills_wanted", [9, pytest.param(30, marks=pytest.mark.soak)])
def test_owners_get_what_they_want_from_a_daemon_that_is_killed_again_and_again(
    daemons, monkeypatch, tmp_path, kills_wanted
):
    for name, value in daemons.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "train.py").write_text("print('training')\n")
    snapshot = snapshot_folder(tmp_path)
    state_dir = daemons.state_dir()
    enough = threading.Event()
    done: list[str] = []

    def own(owner: int) -> list[str]:
        """One task after the other, until the killer has had enough; returns the ids of its jobs."""
        jobs: list[str] = []
        with ElasticFlowClient(ensure_service(state_dir, limit_s=120), retry_for_s=120) as client:
            client.upload_snapshot(snapshot)
            while not enough.is_set():
                wanted = submission(snapshot.sha256, owner, len(jobs))
                job_id = wanted.identity.job_id
                jobs.append(job_id)
                claim = client.submit(wanted).claim
                while not (status := client.renew(job_id, claim)).state.terminal:
                    time.sleep(0.1)
                assert status.state == "succeeded", status.state_reason
                client.acknowledge(job_id, claim)
                done.append(job_id)
        return jobs

    with ThreadPoolExecutor(OWNERS + 1) as pool:
        killer = pool.submit(kill_again_and_again, daemons, random.Random(3), done, kills_wanted)
        owners = [pool.submit(own, number) for number in range(OWNERS)]
        try:
            kills = killer.result()
        finally:
            enough.set()
        jobs = [job_id for owner in owners for job_id in owner.result(120)]
    assert kills >= kills_wanted
    assert len(jobs) >= JOBS

    with ElasticFlowClient(ensure_service(state_dir), retry_for_s=30) as client:
        assert sorted(status.job_id for status in client.list_jobs(limit=500)) == sorted(jobs)
        for job_id in jobs:
            status, events = client.status(job_id), client.events(job_id)
            story = "\n".join(f"{event.kind}: {event.reason}" for event in events)
            assert (status.state, status.incarnation, status.acknowledged) == ("succeeded", 1, True), story
            assert status.step == status.total_steps == status.result.steps, story
            kinds = Counter(event.kind for event in events)
            assert kinds["submitted"] == kinds["succeeded"] == kinds["acknowledged"] == 1, story
            assert not {"restarting", "not_started", "failed", "cancelled", "warning"} & set(kinds), story
            ordered = [event.data["generation"] for event in events if event.kind == "resized"]
            assert ordered == list(range(1, status.generation + 1)), story
    end = time.monotonic() + 30
    while len(daemons.pids()) != 1:  # Losers of the race leave by themselves.
        assert time.monotonic() < end, daemons.pids()
        time.sleep(0.1)
    assert database_is_whole(state_dir / "elasticflow.db")


def database_is_whole(path: Path) -> bool:
    """What SQLite itself says of the file."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
