"""Plays service, engine and supervisor towards real trainer processes: writes plans, starts and kills workers.

Each worker is a process of its own that runs the bootstrap, as under a torchrun agent: forked from one that has
imported torch, as the local engine's are, or started cold.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    SESSION_ENV,
    WORKER_ENV,
    WORLD_ENV,
    Member,
    Membership,
    Report,
    ReportKind,
    RescaleMode,
    SessionConfig,
    heartbeats_path,
    read_reports,
    report_path,
    session_path,
)
from support.forking import ForkedWorker, ForkServer


def install(script: Path, folder: Path) -> Path:
    """Put a script of this folder, as ``train.py``, and what it imports where an engine starts it; returns its path."""
    shutil.copy(script.parent / "digests.py", folder)
    return shutil.copyfile(script, folder / "train.py")


class Gang:
    """One incarnation of a job. ``config`` are fields of SessionConfig; ``env`` is added to the workers'.

    ``imports``: what the process from which they are forked has imported besides torch; None: each starts cold.
    """

    def __init__(
        self,
        root: Path,
        script: Path,
        env: dict[str, str] | None = None,
        *,
        imports: Sequence[str] | None = (),
        **config: Any,
    ) -> None:
        self.folder = root / "i000001"
        (self.folder / "logs").mkdir(parents=True)
        defaults: dict[str, Any] = {"job_id": "job", "incarnation": 1, "checkpoint_interval_s": 1e6, "seed": 7}
        places = {"incarnation_dir": str(self.folder), "code_dir": str(script.parent), "script": script.name}
        SessionConfig(**(defaults | places | config)).write()
        self._env = {"OMP_NUM_THREADS": "1", **(env or {})}
        self.env_of: dict[str, dict[str, str]] = {}
        """By worker: what it alone is to see, its device for instance."""
        self._imports = imports
        self.processes: dict[str, subprocess.Popen[bytes] | ForkedWorker] = {}
        self.generation = 0
        self.members: list[str] = []

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def plan(self, *members: str, lost: Sequence[str] = (), mode: RescaleMode | None = None) -> int:
        """Publish the next generation and start those of its members that are not there; returns its number."""
        self.generation += 1
        if mode is None:
            mode = RescaleMode.IN_PLACE if self.processes else RescaleMode.RESTART
        known = [Member(worker_id=w, rank=r, node_id="node", slot_index=r) for r, w in enumerate(members)]
        plan = Membership(generation=self.generation, mode=mode, members=tuple(known), lost=tuple(lost))
        plan.write(self.folder)
        for rank, worker in enumerate(members):
            if worker not in self.processes:
                self._start(worker, rank, len(members))
        self.members = list(members)
        return self.generation

    def _start(self, worker: str, rank: int, size: int) -> None:
        env = {
            **os.environ,
            **self._env,
            **self.env_of.get(worker, {}),
            SESSION_ENV: str(session_path(self.folder)),
            WORKER_ENV: worker,
            GENERATION_ENV: str(self.generation),
            WORLD_ENV: f"{rank},{size}",
            PARENT_ENV: str(os.getpid()),
        }
        log = self.folder / "logs" / f"{worker}.log"
        if self._imports is not None:
            self.processes[worker] = ForkServer.of(*self._imports).start(env, log)
            return
        with log.open("ab") as output:
            command = [sys.executable, "-m", "elasticflow_airflow.runtime.bootstrap"]
            self.processes[worker] = subprocess.Popen(command, env=env, stdout=output, stderr=output)

    def hurry(self) -> None:
        """Let scripts that wait in each step, so that something can happen meanwhile, train on without."""
        (self.folder / "hurry").touch()

    def kill(self, worker: str, number: int = signal.SIGKILL) -> None:
        """Send a worker a signal."""
        self.processes[worker].send_signal(number)

    def reports(self, kind: ReportKind | None = None, generation: int | None = None) -> list[Report]:
        """All reports, by worker and generation."""
        found = []
        for number in [generation] if generation else range(1, self.generation + 1):
            for worker in self.processes:
                found += [r for r, _ in read_reports(report_path(self.folder, number, worker))]
        return [report for report in found if kind in (None, report.kind)]

    def has_begun(self) -> bool:
        """Whether all members of the newest generation have started in it."""
        begun = {report.worker_id for report in self.reports(ReportKind.STARTED, self.generation)}
        return begun >= set(self.members)

    def step(self) -> int:
        """How far the training is, as far as the heartbeats and reports tell."""
        steps = [report.step for report in self.reports(ReportKind.PROGRESS)]
        beats = [json.loads(path.read_text()) for path in heartbeats_path(self.folder).glob("*.json")]
        return max(steps + [beat["step"] for beat in beats], default=0)

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
        """Wait for a condition; fail, with all logs, when it does not come."""
        end_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end_s, f"{what} did not come about\n{self.story()}"
            time.sleep(0.02)

    def wait_until_begun(self) -> None:
        """Wait until all members of the newest generation have started in it."""
        self.wait(self.has_begun, f"generation {self.generation}")

    def finish(self, limit_s: float = 180.0) -> dict[str, int]:
        """Wait until all workers have left; returns their exit codes."""
        self.wait(lambda: all(p.poll() is not None for p in self.processes.values()), "the end", limit_s)
        return {worker: process.returncode for worker, process in self.processes.items()}

    def output(self) -> list[str]:
        """Everything that the workers printed, line by line."""
        return [line for file in sorted((self.folder / "logs").iterdir()) for line in file.read_text().splitlines()]

    def story(self) -> str:
        """Logs and reports, for the message of a failure."""
        files = [*sorted((self.folder / "logs").iterdir()), *sorted(self.folder.glob("reports/*"))]
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in files)


def random_life(run: Gang, seed: int, steps: int) -> None:
    """Rescale, and kill, at random until the training, of so many steps, is nearly done."""
    random_ = random.Random(seed)
    names = (f"w{i}" for i in range(10_000))
    members = [next(names)]
    run.plan(*members)

    def has_come_to(step: int) -> bool:
        return run.step() >= step

    while run.step() < steps - 40:
        run.wait(partial(has_come_to, min(run.step() + random_.randint(2, 25), steps)), "progress")
        victim = random_.choice(members)
        if len(members) > 1 and random_.random() < 0.5:
            run.kill(victim, random_.choice([signal.SIGKILL, signal.SIGSTOP]))
            alive = [m for m in members if m != victim]
            members = alive[: 1 << (len(alive).bit_length() - 1)]
            run.plan(*members, lost=[victim])
            run.wait_until_begun()
            run.kill(victim)
        else:
            size = random_.choice([1, 2, 4])
            stay = random_.sample(members, random_.randint(0, min(size, len(members))))
            members = stay + [next(names) for _ in range(size - len(stay))]
            random_.shuffle(members)
            run.plan(*members)
            run.wait(lambda: run.has_begun() or has_come_to(steps), "the switch")
    if not run.has_begun():
        # The training ended before the last switch: those who were to join are told to go.
        run.wait(lambda: bool(run.reports(ReportKind.FINISHED)), "the end of training")
        run.plan(mode=RescaleMode.RESTART)
    run.finish()
    assert len(run.reports(ReportKind.FINISHED)) == 1, run.story()
