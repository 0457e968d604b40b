"""One worker as its supervisor sees it: its torchrun agent, the trainer below it, their output.

Standard library only: part of the supervisor process.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import (
    SupervisorFolder,
    SupervisorSpec,
    WorkerSpec,
    WorkerStatus,
)
from elasticflow_airflow.engines.local.files.worker_logs import LogWriter
from elasticflow_airflow.engines.local.machine.processes import ProcessId, group_led_by, unread_exit_code
from elasticflow_airflow.engines.local.workers.forking import ForkServer
from elasticflow_airflow.runtime import protocol
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    SESSION_ENV,
    WORKER_ENV,
    ReportKind,
    read_json,
    read_some_reports,
    report_path,
    session_path,
)


def bootstrap_path() -> str:
    """Return the path of runtime/bootstrap.py without importing it."""
    return str(Path(protocol.__file__).with_name("bootstrap.py"))


logger = logging.getLogger("elasticflow.supervisor")

_PIPE_PIECE = 64 * 1024
REST_LIMIT_S = 2.0
"""A trainer's leftover processes hide its end from the agent; they get this long to end by themselves."""
AGENT_LIMIT_S = 5.0
"""An agent that still runs this long after its trainer's end has missed that end for good."""
RENDEZVOUS_LIMIT_S = 900


class Worker:
    """One worker. ``status`` is its entry in the supervisor's status file."""

    def __init__(self, spec: SupervisorSpec, worker: WorkerSpec, folder: SupervisorFolder) -> None:
        self.worker_id = worker.worker_id
        self.status = WorkerStatus(rank=worker.rank)
        self._spec, self._worker, self._folder = spec, worker, folder
        self._server: ForkServer | None = None
        self._log = LogWriter(
            Path(spec.incarnation_dir) / "logs", worker.worker_id, spec.log_segment_bytes, spec.log_segments
        )
        self.output: int | None = None
        self._reports = report_path(Path(spec.incarnation_dir), spec.generation, worker.worker_id).parent
        self._has_session = self._can_change_in_place = False
        self._trainer_pid: int | None = None
        self._trainer_gone_s: float | None = None
        self._rest_killed = False

    def open_output(self) -> int:
        """Create the pipe for the worker's output and return its write end."""
        self.output, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(write_end, True)
        return write_end

    def start(self, server: ForkServer, write_end: int) -> None:
        """Request the agent from the fork server."""
        self._server = server
        server.ask(self.worker_id, self._arguments(), self._environment(), write_end)

    def drain(self) -> bytes:
        """Move pending output of the worker to its log and return it. Closes the pipe at end of file."""
        if self.output is None:
            return b""
        try:
            data = os.read(self.output, _PIPE_PIECE)
        except BlockingIOError:
            return b""
        if data:
            self._log.write(data)
        else:
            self._close_output()
        return data

    def look(self) -> None:
        """Check the processes and update the status."""
        if self.status.ended or self._server is None:
            return
        if self.status.agent is None and self.worker_id in self._server.pids:
            self.status.agent = ProcessId.of(self._server.pids[self.worker_id])
        if self.status.trainer is None:
            raw = read_json(self._folder.trainer_file(self.worker_id))
            if raw is not None:
                self._trainer_pid = int(raw["pid"])
                self.status.trainer = ProcessId.of(self._trainer_pid)
        agent_code = self._server.exit_codes.get(self.worker_id)
        if agent_code is None:
            self._look_for_silent_end()
            return
        result = read_json(self._folder.exit_file(self.worker_id))
        self.status.exit_code = agent_code if result is None else result["exit_code"]
        self.kill_rest()
        self.status.ended = True

    def _look_for_silent_end(self) -> None:
        """Check for a trainer that ended without its agent noticing, and end both.

        A forked trainer that exits by ``os._exit(0)`` does not hand over the result for which torchrun waits, and a
        process that it has forked keeps open the pipe whose end tells torchrun that the trainer has ended.
        """
        agent, trainer, now_s = self.status.agent, self.status.trainer, time.monotonic()
        if agent is None or self._trainer_pid is None or (trainer is not None and trainer.is_alive()):
            return
        if self._trainer_gone_s is None:
            self._trainer_gone_s = now_s
        if now_s > self._trainer_gone_s + REST_LIMIT_S and not self._rest_killed:
            self._rest_killed = True
            self.kill_rest()
        if now_s <= self._trainer_gone_s + AGENT_LIMIT_S:
            return
        # torchrun soon notices any status except 0, and ends by itself.
        self.status.exit_code = unread_exit_code(self._trainer_pid, agent.pid) or 0
        logger.warning("%s ended with status %d, and its agent never heard", self.worker_id, self.status.exit_code)
        agent.kill()
        self.kill_rest()
        self.status.ended = True

    def finish_output(self) -> bytes:
        """Drain the pipe, even when a grandchild still holds the other end; return the output."""
        data = b"".join(iter(self.drain, b""))
        self._close_output()
        self._log.close()
        return data

    def has_session(self) -> bool:
        """Return whether the script has reported a session: then it leaves by the plan, without a signal."""
        if not self._has_session:
            # A joining worker reports in the generation that it joins, which may be later than the one it started for.
            files = sorted(self._reports.glob(f"g*-{self.worker_id}.jsonl"))
            started = [r for file in files for r, _ in read_some_reports(file)[0] if r.kind is ReportKind.STARTED]
            self._has_session = bool(started)
            self._can_change_in_place = any(report.data.get("in_place") for report in started)
        return self._has_session

    def can_change_in_place(self) -> bool:
        """Return whether its session reported that it continues when another worker dies or waits for joining ones."""
        return self.has_session() and self._can_change_in_place

    def terminate(self) -> None:
        """Send SIGTERM to the trainer: its script may be able to save. Without a trainer, kill the agent."""
        if self.status.ended:
            return
        if self.status.trainer is not None and self.status.trainer.is_alive():
            self.status.signalled = True
            self.status.trainer.kill(signal.SIGTERM)
        elif self.status.trainer is None:
            # A starting agent loses signals or dies of them; there is nothing to save yet.
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to all, the agent first: it has nothing more to report."""
        if self.status.trainer is None or self.status.trainer.is_alive():
            self.status.signalled = True
        if self.status.agent is not None:
            self.status.agent.kill()
        elif self._server is not None:
            self._server.kill()  # It is still importing: there is no agent yet.
        self.kill_rest()

    def kill_rest(self) -> None:
        """Kill the trainer's leftover processes (data loader workers and the like; they are in its process group)."""
        if self.status.trainer is not None:
            for process in group_led_by(self.status.trainer):
                process.kill()

    def _arguments(self) -> list[str]:
        spec = self._spec
        # A trainer forked from its agent needs no imports. Agents may touch CUDA: on GPUs, start a fresh process.
        trainer = (
            ["--start-method=fork", "--run-path", bootstrap_path()]
            if self._worker.fork_trainer
            else ["-m", "elasticflow_airflow.runtime.bootstrap"]
        )
        return [
            str(self._folder.exit_file(self.worker_id)),
            "--nnodes=1:1",
            "--nproc-per-node=1",
            "--rdzv-backend=elasticflow",
            f"--rdzv-endpoint={spec.incarnation_dir}",
            f"--rdzv-id={spec.job_id}-g{spec.generation:06d}",
            f"--rdzv-conf=timeout={RENDEZVOUS_LIMIT_S}",
            "--max-restarts=0",
            f"--local-addr={spec.address}",
            f"--log-dir={self._folder.path / 'torchelastic'}",
            f"--shutdown-timeout={max(1, int(spec.grace_s))}",
            *trainer,
        ]

    def _environment(self) -> dict[str, str]:
        return {
            **self._worker.env,
            SESSION_ENV: str(session_path(Path(self._spec.incarnation_dir))),
            WORKER_ENV: self.worker_id,
            GENERATION_ENV: str(self._spec.generation),
            "ELASTICFLOW_TRAINER_FILE": str(self._folder.trainer_file(self.worker_id)),
        }

    def _close_output(self) -> None:
        if self.output is not None:
            os.close(self.output)
            self.output = None
