"""The supervisor: a small process that runs one generation's workers on one node and outlives the service.

``python -m elasticflow_airflow.engines.local.workers.supervisor FOLDER [FD]``, with ``{"secret_env": {...}}`` on
standard input; FD is a channel to a fork server of the warm pool.
It holds the locks of its slots, spawns a torchrun agent per worker, stores their output, watches orders and lease, and
writes the actual state. It imports neither torch nor the service. When it is killed with ``kill -9``, its workers die
with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import (
    OF_THE_MACHINE,
    Status,
    StopOrder,
    SupervisorFolder,
    SupervisorSpec,
    failure_path,
)
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.processes import ProcessId, children_of
from elasticflow_airflow.engines.local.workers.forking import ForkServer
from elasticflow_airflow.engines.local.workers.script_progress import PlainProgress
from elasticflow_airflow.engines.local.workers.worker import Worker
from elasticflow_airflow.runtime.protocol import (
    Membership,
    RescaleMode,
    SessionConfig,
    report_path,
    session_path,
    write_json_atomic,
)
from elasticflow_airflow.times import duration

TICK_S = 0.1
GO_TICK_S = 0.02
POOL_LIMIT_S = 20.0
"""A fork server of the warm pool that is not ready after this time is replaced by one of our own."""
WARMING_TICK_S = 1.0
WARMING_CPU_LIMIT_S = 120.0
"""Imports with more CPU time than this count as stuck in a loop, not as making progress."""
EXIT_NOT_NEEDED = 3
"""Exit status: another supervisor is running, or this one was never given anything to do."""
PLAIN_DELAY_S = 1.0
"""A script without a session gets this long to end by itself before SIGTERM."""
BROKEN_GRACE_S = 3.0
"""When one worker has failed, the others cannot continue: they are killed this long after SIGTERM."""
_PR_SET_CHILD_SUBREAPER = 36

logger = logging.getLogger("elasticflow.supervisor")


class Supervisor:
    """The supervisor's loop and state. Everything relevant to other processes is in ``status``."""

    def __init__(self, folder: SupervisorFolder, spec: SupervisorSpec, pool: socket.socket | None = None) -> None:
        self._folder, self._spec, self._pool = folder, spec, pool
        self._incarnation_dir = Path(spec.incarnation_dir)
        self._failure_path = failure_path(self._incarnation_dir, spec.chain)
        self.status = Status(supervisor=ProcessId.of(os.getpid()))
        self._workers = {worker.worker_id: Worker(spec, worker, folder) for worker in spec.workers}
        self._server: ForkServer | None = None
        self._colder: Callable[[], ForkServer]
        self._order: StopOrder | None = None
        self._stamps: dict[str, tuple[int, int]] = {}
        self._told_s = 0.0
        self._broken_s: float | None = None
        self._terminated_s: float | None = None
        self._asked: str | None = None
        self._lease_stamp = 0
        self._lease_seen_s = time.monotonic()
        self._written = ""
        self._locks: dict[str, int] = {}
        self._progress: PlainProgress | None = None

    def run(self, secret_env: dict[str, str]) -> bool:
        """Run the workers to their end. Return False when ``go`` never came and nothing was started."""
        try:
            outputs = self._warm_up(secret_env)
            if not self._wait_for_go():
                if self._folder.go.exists():  # For the service it has started: how it ended must be told.
                    self._look_at_order()
                    self._watch_lease()
                    raise ValueError("told to leave before the workers were started")
                assert self._server is not None
                self._server.close()  # A server that hangs before it has tied its life to ours would survive.
                return False
            self._progress = self._plain_progress()
            self._lock_slots()
            self._start(outputs)
        except (slots.SlotHeldError, OSError, ValueError) as error:
            self.status.slot_held = isinstance(error, slots.SlotHeldError)
            self._end_unstarted(str(error))
            return True
        while not all(worker.status.ended for worker in self._workers.values()):
            self._move_output(TICK_S)
            self._look()
            self._watch_lease()
            self._escalate()
            self._release_slots()
            self._write_status()
        for worker in self._workers.values():
            self._feed_progress(worker, worker.finish_output())
        if self._progress:
            self._keep_progress(last=True)
        if self._server is not None:
            self._server.close()
        self._end_orphans()
        self._release_slots()  # Before the final status, so that its readers find the slots free.
        self.status.ended = True
        self._write_status(insist=True)
        return True

    def ask_to_leave(self, reason: str) -> None:
        """Request to leave at the next iteration of the loop; safe in signal handlers."""
        self._asked = reason

    def leave(self, reason: str) -> None:
        """Make the workers save and leave because of a signal to the supervisor or an expired lease."""
        if self.status.told:
            return
        plan = Membership.read(self._incarnation_dir)
        if plan is not None and any(plan.rank_of(worker) is not None for worker in self._workers):
            replace(plan, members=(), mode=RescaleMode.RESTART, reason=reason).write(self._incarnation_dir)
        self._take(StopOrder(self._spec.grace_s, reason))

    # Beginning and end.

    def _lock_slots(self) -> None:
        holder = {
            "job_id": self._spec.job_id,
            "incarnation": self._spec.incarnation,
            "generation": self._spec.generation,
            "state_dir": self._spec.state_dir,
            "pid": os.getpid(),
        }
        lock_dir = Path(self._spec.lock_dir)
        for worker in self._spec.workers:
            self._locks[worker.worker_id] = slots.acquire(lock_dir, worker.lock_name, holder)

    def _release_slots(self) -> None:
        """Release the slots of workers that have ended, for others to use while the rest continues."""
        for worker_id, worker in self._workers.items():
            if worker.status.ended and worker_id in self._locks:
                os.close(self._locks.pop(worker_id))

    def _warm_up(self, secret_env: dict[str, str]) -> list[int]:
        """Begin importing torch while the previous generation may still train; return the workers' output pipes."""
        outputs = [worker.open_output() for worker in self._workers.values()]
        # Error output of the server belongs in the first worker's log.
        env = {**self._spec.env, **self._spec.workers[0].env, **secret_env}
        self._server = ForkServer(self._spec.python, env, self._folder.path, outputs[0], self._pool)
        self._colder = lambda: ForkServer(self._spec.python, env, self._folder.path, outputs[0])
        return outputs

    def _wait_for_go(self) -> bool:
        assert self._server is not None
        pool_ends_s = time.monotonic() + POOL_LIMIT_S
        looks_s, computed_s = 0.0, 0.0
        while not self._folder.go.exists() or (self._server.is_adopted and not self._server.warm):
            self._move_output(GO_TICK_S)
            if not self._server.warm:
                self._server.poll()
                if self._server.useless or (self._server.is_adopted and time.monotonic() > pool_ends_s):
                    logger.info("the warm pool does not serve: importing by itself")
                    self._server.close()
                    self._server = self._colder()
                elif self._server.warm:
                    self._folder.warm.touch()
                elif time.monotonic() > looks_s:
                    looks_s, before_s, computed_s = time.monotonic() + WARMING_TICK_S, computed_s, self._server.cpu_s
                    if before_s < computed_s < WARMING_CPU_LIMIT_S:
                        self._folder.warming.touch()
            if self._folder.read_order() is not None or self._lease_has_expired():
                return False
        return True

    def _start(self, outputs: list[int]) -> None:
        assert self._server is not None
        for worker in self._workers.values():
            self.status.workers[worker.worker_id] = worker.status
        self._look_at_order()
        if self.status.told:
            raise ValueError("told to leave before the workers were started")
        self._write_status(insist=True)
        for worker, output in zip(self._workers.values(), outputs, strict=True):
            worker.start(self._server, output)
            os.close(output)

    def _end_unstarted(self, failure: str) -> None:
        for worker in self._workers.values():
            worker.kill()
            worker.status.ended = True
        if self._server is not None:
            self._server.close()
        self.status.failure = None if self.status.told else failure
        self.status.ended = True
        logger.error("%s", failure)
        self._write_status(insist=True)

    def _end_orphans(self) -> None:
        """Kill leftover processes outside the workers' groups: they are our children, as we are a subreaper."""
        for process in children_of(os.getpid()):
            logger.warning("ending pid %s, left behind by a worker", process.pid)
            process.kill()

    # One iteration of the loop.

    def _move_output(self, limit_s: float) -> None:
        outputs = {worker.output: worker for worker in self._workers.values() if worker.output is not None}
        ready, _, _ = select.select(list(outputs), [], [], limit_s)
        for descriptor in ready:
            worker = outputs[descriptor]
            self._feed_progress(worker, worker.drain())
        if self._progress:
            self._keep_progress(last=False)

    def _look(self) -> None:
        if self._server is not None:
            self._server.poll()
        for worker in self._workers.values():
            worker.look()
        self._look_at_kills()
        self._look_at_order()
        if self._broken_s is not None:
            return
        failed = next((w for w in self._workers.values() if self._is_failure(w)), None)
        if failed is not None and not self._told_otherwise():
            self.status.failed = True
            self._broken_s = time.monotonic()
            write_json_atomic(self._failure_path, {"worker_id": failed.worker_id})
        elif failed is None and self._failure_path.exists():
            self._broken_s = time.monotonic()

    def _is_failure(self, worker: Worker) -> bool:
        """Return whether the end of a worker means the end of all.

        It does not when the worker was killed and the others in its session continue from memory, nor when it was to
        join and never did.
        """
        status = worker.status
        if not status.ended or status.exit_code == 0:
            return False
        if self._spec.generation != self._spec.chain and not worker.has_session():
            return False
        died = status.exit_code is None or status.exit_code < 0
        return not (died and worker.can_change_in_place())

    def _told_otherwise(self) -> bool:
        """Return whether a worker left because of an order, or a plan without it, that was not read yet."""
        self._look_at_order()
        if self.status.told:
            return True
        plan = Membership.read(self._incarnation_dir)
        if plan is not None and all(plan.rank_of(worker) is None for worker in self._workers):
            self._take(StopOrder(self._spec.grace_s, plan.reason))
            return True
        return False

    def _look_at_order(self) -> None:
        if self._has_changed("order.json"):
            order = self._folder.read_order()
            if order is not None:
                self._take(order)

    def _look_at_kills(self) -> None:
        if self._has_changed("kill.json"):
            for worker_id in self._folder.read_kills() & self._workers.keys():
                if not self._workers[worker_id].status.ended:
                    logger.info("ending %s: it was given up, or has not left in time", worker_id)
                    self._workers[worker_id].kill()

    def _has_changed(self, name: str) -> bool:
        """Return whether a file of the folder exists and is not the one that the last call found."""
        try:
            found = (self._folder.path / name).stat()
        except FileNotFoundError:
            return False
        before, self._stamps[name] = self._stamps.get(name), (found.st_ino, found.st_mtime_ns)
        return before != self._stamps[name]

    def _take(self, order: StopOrder) -> None:
        if not self.status.told:
            self._told_s = time.monotonic()
            logger.info("told to leave: %s", order.reason or "no reason given")
        elif self._order is not None and not order.kill:
            # Repeated order: the shorter grace applies.
            order = replace(order, grace_s=min(order.grace_s, self._order.grace_s))
        self._order, self.status.told, self.status.reason = order, True, order.reason

    def _watch_lease(self) -> None:
        if self._asked is not None:
            self.leave(self._asked)
        if self._lease_has_expired():
            self.leave(f"no service has renewed the lease for {duration(self._spec.lease_s)}")

    def _lease_has_expired(self) -> bool:
        try:
            stamp = self._folder.lease.stat().st_mtime_ns
        except FileNotFoundError:
            stamp = 0
        now_s = time.monotonic()
        if stamp != self._lease_stamp:
            self._lease_stamp, self._lease_seen_s = stamp, now_s
        return now_s - self._lease_seen_s > self._spec.lease_s

    def _escalate(self) -> None:
        now_s = time.monotonic()
        if self._broken_s is not None:
            begin_s, grace_s = self._broken_s, BROKEN_GRACE_S
        elif self._order is not None:
            grace_s = self._order.grace_s
            patience_s = grace_s if self._has_session() else min(PLAIN_DELAY_S, grace_s)
            begin_s = self._told_s + patience_s
        else:
            return
        if self._order is not None and self._order.kill:
            self._for_all(Worker.kill)
        elif now_s >= begin_s and self._terminated_s is None:
            self._terminated_s = now_s
            self.status.terminated = True
            self._for_all(Worker.terminate)
        elif self._terminated_s is not None and now_s >= self._terminated_s + grace_s:
            self._for_all(Worker.kill)

    def _for_all(self, action: Callable[[Worker], None]) -> None:
        for worker in self._workers.values():
            if not worker.status.ended:
                action(worker)

    def _has_session(self) -> bool:
        return not self._spec.is_plain and any(worker.has_session() for worker in self._workers.values())

    # Writing status and progress.

    def _write_status(self, *, insist: bool = False) -> None:
        """Write the status if it changed; ``insist``: retry for up to ``lease_s`` while the disk is full."""
        text = json.dumps(asdict(self.status))
        deadline_s = time.monotonic() + self._spec.lease_s
        while text != self._written:
            try:
                self._folder.write_status(self.status)
                self._written = text
            except OSError as error:
                logger.error("status could not be written: %s", error)
                passes = error.errno in OF_THE_MACHINE  # otherwise a script has put something in its place
                if not insist or not passes or time.monotonic() > deadline_s:
                    return
                time.sleep(1.0)

    def _plain_progress(self) -> PlainProgress | None:
        first = next((worker for worker in self._spec.workers if worker.rank == 0), None)
        if first is None or not self._spec.is_plain:
            return None
        session = SessionConfig.read(session_path(self._incarnation_dir))
        file = self._spec.progress_file
        return PlainProgress(
            report_file=report_path(self._incarnation_dir, self._spec.generation, first.worker_id),
            generation=self._spec.generation,
            worker_id=first.worker_id,
            regex=self._spec.progress_regex,
            file=Path(session.working_dir or session.code_dir) / file if file else None,
        )

    def _feed_progress(self, worker: Worker, data: bytes) -> None:
        if self._progress and data and worker.worker_id == self._progress.worker_id:
            self._progress.feed(data)

    def _keep_progress(self, *, last: bool) -> None:
        assert self._progress is not None
        try:
            self._progress.poll(last=last)
        except OSError as error:
            logger.error("progress could not be reported: %s", error)


def main(folder_path: str, channel: str | None = None) -> int:
    """Run the supervisor of a folder, unless another one is already running; return the exit status."""
    pool = None if channel is None else socket.socket(fileno=int(channel))
    folder = SupervisorFolder(Path(folder_path))
    lock = os.open(folder.path / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return EXIT_NOT_NEEDED
    secret_env = json.load(sys.stdin)["secret_env"]
    if folder.read_status() is not None:
        return EXIT_NOT_NEEDED  # This generation already had its supervisor and workers: it never starts again.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    supervisor = Supervisor(folder, folder.read_spec(), pool)
    signal.signal(signal.SIGTERM, lambda *_: supervisor.ask_to_leave("the supervisor got SIGTERM"))
    return 0 if supervisor.run(secret_env) else EXIT_NOT_NEEDED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
