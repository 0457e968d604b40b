"""Sessions inside the test process: run alone, or under a service that is played by the test."""

from __future__ import annotations

import atexit
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support import object_store
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    SESSION_ENV,
    WORKER_ENV,
    Member,
    Membership,
    Promotion,
    Report,
    ReportKind,
    RescaleMode,
    SessionConfig,
    read_reports,
    report_path,
    session_path,
)
from elasticflow_airflow.runtime.reporting import ConsoleReporter, FileReporter
from elasticflow_airflow.runtime.session_core import SessionCore
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, publish, verify_candidate, writing

SAMPLES = 20


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A server of moto's that speaks S3 (not Amazon's), for this test run."""
    with object_store.s3_server() as url:
        yield url


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own of 64 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no disk of its own can be had here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def session_globals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo what a session changes in its process, and let it see nothing of ours."""
    for name in (SESSION_ENV, WORKER_ENV, GENERATION_ENV, "WORLD_SIZE", "RANK", "ELASTICFLOW_CHECKPOINT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for reporter in (ConsoleReporter, FileReporter):  # However slow the machine: no progress report by the clock.
        monkeypatch.setattr(reporter, "interval_s", 1e6)
    monkeypatch.setattr(bootstrap, "session_initialised", False)
    monkeypatch.setattr(bootstrap, "current_step", 0)
    handler = signal.getsignal(signal.SIGTERM)
    state = torch.get_rng_state()
    at_exit, register = [], atexit.register
    monkeypatch.setattr(atexit, "register", lambda function: at_exit.append(function) or register(function))
    yield
    for session in (getattr(function, "__self__", None) for function in at_exit):
        if isinstance(session, SessionCore):
            session.finished = True  # The process ends much later: nobody is to be warned then.
    torch.set_rng_state(state)
    signal.signal(signal.SIGTERM, handler)


@dataclass
class Training:
    """A small regression whose every step is recorded; the session's answers are there to look at."""

    session: Any
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: Any
    used: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    epochs_seen: list[int] = field(default_factory=list)

    def run(self, *, before_step: Callable[[int], None] = lambda step: None, count: int | None = None) -> Training:
        """Train to the end; ``before_step`` is called with the number of steps done."""
        for epoch in self.session.epochs(count):
            self.epochs_seen.append(epoch)
            for batch in self.loader:
                before_step(self.session.steps_done)
                with self.session.step() as step:
                    for inputs, targets in step.split(batch):
                        step.backward(nn.functional.mse_loss(self.model(inputs), targets))
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                assert step.batch is batch
                self.used += batch.indices
                self.losses.append(step.loss)
        return self

    def parameters(self) -> torch.Tensor:
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def regression(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, 4, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(4, 2, generator=generator))


@pytest.fixture
def training(session_globals: None) -> Callable[..., Training]:
    """Build a training; keyword arguments go to ``runtime.init``, except those named here."""

    def build(
        *,
        global_batch_size: int | None = 6,
        dataset: Any = None,
        shuffle: bool = True,
        drop_last: bool = False,
        register: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Training:
        session = runtime.init(**arguments)
        loader = session.dataloader(
            dataset or regression(), global_batch_size=global_batch_size, shuffle=shuffle, drop_last=drop_last
        )
        torch.manual_seed(11)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        session.register(model=model, optimizer=optimizer, scheduler=scheduler, **(register or {}))
        return Training(session, model, optimizer, scheduler, loader)

    return build


@dataclass
class Service:
    """Plays the service towards one worker: writes the plan, reads the reports, promotes."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def configure(self, **changes: Any) -> SessionConfig:
        config = SessionConfig(
            **{
                "job_id": "job",
                "incarnation": 3,
                "incarnation_dir": str(self.folder),
                "code_dir": str(self.folder),
                "global_batch_size": 6,
                "epochs": 2,
                "checkpoint_interval_s": 1e6,
                **changes,
            }
        )
        config.write()
        return config

    def plan(self, generation: int, *workers: str, mode: RescaleMode = RescaleMode.RESTART) -> None:
        members = tuple(Member(worker_id=w, rank=r, node_id="n0", slot_index=r) for r, w in enumerate(workers))
        Membership(generation=generation, mode=mode, members=members, reason="test").write(self.folder)

    def start(self, generation: int, worker: str = "w0") -> None:
        """Set the environment in which a worker of this generation finds itself, with itself in the plan."""
        self.plan(generation, worker)
        self.monkeypatch.setenv(SESSION_ENV, str(session_path(self.folder)))
        self.monkeypatch.setenv(WORKER_ENV, worker)
        self.monkeypatch.setenv(GENERATION_ENV, str(generation))

    def reports(self, generation: int, worker: str = "w0", kind: ReportKind | None = None) -> list[Report]:
        found = [report for report, _ in read_reports(report_path(self.folder, generation, worker))]
        return [report for report in found if kind in (None, report.kind)]

    def promote(self, report: Report) -> CandidateInfo:
        """Judge a reported candidate as the service does, and promote it."""
        info = verify_candidate(self.folder / "checkpoints" / report.data["path"])
        assert info.digest == report.data["digest"]
        Promotion(path=report.data["path"], generation=info.generation, step=info.step, digest=info.digest).write(
            self.folder
        )
        return info


@pytest.fixture
def service(session_globals: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Service:
    return Service(tmp_path / "i000003", monkeypatch)


@pytest.fixture
def candidate(tmp_path: Path) -> Callable[..., CandidateInfo]:
    """Publish a checkpoint of two small files below ``tmp_path / "checkpoints"``."""

    def make(generation: int, step: int, **values: Any) -> CandidateInfo:
        checkpoints = tmp_path / "checkpoints"
        with writing(checkpoints, generation, step) as folder:
            (folder / "model.pt").write_bytes(bytes(range(256)) * values.pop("repeat", 1))
            (folder / "training.pt").write_bytes(b"momentum" * (step + 1))
            return publish(
                folder,
                checkpoints,
                **{"incarnation": 1, "generation": generation, "step": step, "metadata": {"loss": 0.25}, **values},
            )

    return make


@pytest.fixture
def warnings() -> list[str]:
    return []
