"""Tells the service where the agents of a Ray cluster are; keeps the Ray client's process running.

While Ray's head is away nothing is known to have changed: the agents stay where they are, and are spoken to.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from elasticflow_airflow.engines.local.files.records import Records
from elasticflow_airflow.engines.port import EngineError, Fencing, SupersededError
from elasticflow_airflow.engines.ray.messages import ClientSettings, ClusterView, WantedNodes

_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 10.0
_LOG_BYTES = 1 << 20
_LEAVE_LIMIT_S = 3.0
_ASSURE_S = 2.0
_NOTE = "ray-nodes"

logger = logging.getLogger("elasticflow.ray")


class RayDirectory:
    """A thread that follows the Ray client. ``moved`` is called with the agents' addresses, by node, when they change.

    ``records``: the last addresses are noted there for the next service: the head may be away then, and Ray's client
    takes seconds to connect. ``state_dir``: for the client's log. ``fencing``: while it does not let this service
    command, there is no client.
    """

    def __init__(
        self,
        settings: ClientSettings,
        state_dir: Path,
        records: Records,
        moved: Callable[[Mapping[str, str]], None],
        fencing: Fencing,
    ) -> None:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._settings, self._moved, self._fencing = settings, moved, fencing
        self._log, self._records = state_dir / "ray-client.log", records
        self._client: subprocess.Popen[bytes] | None = None
        self._wanted: WantedNodes | None = None
        self._lock = threading.Lock()
        self._stop, self._has_answered = threading.Event(), threading.Event()
        self.view = self._from_before()
        self._addresses = self.view.nodes
        self.knows_from_before = bool(self._addresses)
        """Whether addresses were noted."""
        if self._addresses:
            moved(self._addresses)
        self._thread = threading.Thread(target=self._run, name="elasticflow-ray", daemon=True)
        self._thread.start()
        self._assuring = threading.Thread(target=self._assure, name="elasticflow-ray-lead", daemon=True)
        self._assuring.start()

    def wait(self, limit_s: float) -> None:
        """Wait until the client has found a node, or a reason why there can be none, or until the time is over."""
        self._has_answered.wait(limit_s)

    @property
    def draining(self) -> Mapping[str, float]:
        """By node, when Ray takes it away (UTC seconds)."""
        return self.view.draining

    @property
    def problems(self) -> list[str]:
        """Why the cluster, or nodes of it, cannot be used."""
        return self.view.problems

    def want(self, wanted: WantedNodes) -> None:
        """Have Ray's autoscaler told; repeated to each new client."""
        with self._lock:
            if wanted != self._wanted:
                self._wanted = wanted
                self._say(wanted)

    def _say(self, what: ClientSettings | WantedNodes | None) -> None:
        """Write a line to the client, if there is one; the next one hears of it again. With the lock held."""
        if self._client is not None and self._client.stdin is not None:
            with suppress(BrokenPipeError, ValueError):
                self._client.stdin.write((b"" if what is None else what.model_dump_json().encode()) + b"\n")
                self._client.stdin.flush()

    def _leads(self) -> bool:
        try:
            self._fencing.epoch()
        except SupersededError:
            return False
        return True

    def _assure(self) -> None:
        """Tell the client again and again that this service leads; otherwise the client leaves by itself."""
        while not self._stop.wait(_ASSURE_S):
            if self._leads():
                with self._lock:
                    self._say(None)

    def close(self) -> None:
        """End the client; actors, agents and workers go on."""
        self._stop.set()
        with self._lock:
            client = self._client
        if client is not None and client.stdin is not None:
            with suppress(OSError):
                client.stdin.close()
            try:
                client.wait(_LEAVE_LIMIT_S)
            except subprocess.TimeoutExpired:
                client.kill()
        self._thread.join()
        self._assuring.join()

    def _from_before(self) -> ClusterView:
        try:
            return ClusterView.model_validate(self._records.note(_NOTE) or {})
        except ValidationError:
            return ClusterView()

    def _run(self) -> None:
        again_s = _AGAIN_S
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                if self._leads():
                    self._follow()
            except OSError as error:  # No space, no memory for a process: it is tried again, and what is known stays.
                logger.warning("the client of Ray cannot be followed: %s", error)
            again_s = _AGAIN_S if time.monotonic() - begun_s > 60.0 else min(2 * again_s, _LONGEST_AGAIN_S)
            self._stop.wait(again_s)

    def _follow(self) -> None:
        """Start a client, and take what it says until it ends."""
        if self._log.exists() and self._log.stat().st_size > _LOG_BYTES:
            self._log.replace(self._log.with_suffix(".log.1"))
        with self._log.open("ab") as log:
            client = subprocess.Popen(
                [sys.executable, "-m", "elasticflow_airflow.engines.ray.ray_client"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert client.stdin is not None
        assert client.stdout is not None
        with client:
            with self._lock:
                self._client = client
                self._say(self._settings)
                if self._wanted is not None:
                    self._say(self._wanted)
            if self._stop.is_set():
                client.stdin.close()
            for line in client.stdout:
                self._take(line)
        if not self._stop.is_set():
            logger.warning("the client of Ray has ended with status %s: it is started again", client.returncode)

    def _take(self, line: bytes) -> None:
        try:
            view = ClusterView.model_validate_json(line)
        except ValidationError:
            logger.warning("the client of Ray says what nobody understands: %r", line[:200])
            return
        for problem in view.problems:
            if problem not in self.view.problems:
                logger.warning("%s", problem)
        self.view = view
        if not view.nodes:  # It cannot be reached, or has just begun: those of before may still be there.
            if not view.is_usable:
                self._has_answered.set()
            return
        if view.nodes != self._addresses:
            self._addresses = view.nodes
            self._moved(view.nodes)
            try:
                self._records.keep_note(_NOTE, ClusterView(nodes=view.nodes).model_dump(mode="json"))
            except EngineError as error:  # Noted when they change again; the next service asks Ray.
                logger.warning("where the agents are cannot be noted: %s", error)
        self._has_answered.set()
