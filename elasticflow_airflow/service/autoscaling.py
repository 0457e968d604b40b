"""Tells whoever provides machines how many are wanted and which are not needed (``ELASTICFLOW_RAY_AUTOSCALE_HOURS``).

What is wanted is asked for at once. A node goes only after it has not been needed for some minutes, and only one on
which nothing trains: nobody is moved to save a machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from elasticflow_airflow.api.insight import CapacityAnswer
from elasticflow_airflow.engines.port import EngineNode

log = structlog.get_logger()

_ROUND_S = 5.0
CAPACITY_REST_S = 10.0
"""What is wanted is worked out at most once in this time."""


class Autoscaling:
    """A thread that repeats what is wanted.

    ``look``: returns the newest answer about the next hours, if one is known; ``nodes``: those that are present;
    ``tell``: ``want_nodes`` of the engine; ``unneeded_s``: for how long nobody must have needed a node that goes.
    """

    def __init__(
        self,
        look: Callable[[], CapacityAnswer | None],
        nodes: Callable[[], Sequence[EngineNode]],
        tell: Callable[[int, frozenset[str]], None],
        *,
        unneeded_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._nodes, self._tell = look, nodes, tell
        self._unneeded_s, self._monotonic = unneeded_s, monotonic
        self._answer: CapacityAnswer | None = None
        self._idle_since: dict[str, float] = {}
        self._unneeded: frozenset[str] = frozenset()
        self._count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaling", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; what was asked for last stays."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_ROUND_S):
            try:
                self.pass_on()
            except Exception:
                log.exception("which nodes are wanted could not be passed on")

    def pass_on(self) -> None:
        """Judge the newest answer, and tell what follows from it."""
        answer = self._look()
        if answer is not None and answer is not self._answer:
            self._answer = answer
            self._judge(answer)
        if self._answer is not None:
            self._tell(self._count, self._unneeded)

    def _judge(self, answer: CapacityAnswer) -> None:
        now, before = self._monotonic(), (self._count, self._unneeded)
        kept = {node.node_id for node in self._nodes()} - self._unneeded
        if answer.wanted_nodes != 0:  # None: no number would do for all of them, so what is there must stay
            self._idle_since, self._unneeded = {}, frozenset()
        else:
            idle = [node.node_id for node in answer.releasable if node.idle and node.node_id in kept]
            self._idle_since = {node: self._idle_since.get(node, now) for node in idle}
            going = [node for node, since in self._idle_since.items() if now - since >= self._unneeded_s]
            self._unneeded |= set(going[: len(kept) - 1])  # The last one shows what further ones are like.
        self._count = len(kept - self._unneeded) + (answer.wanted_nodes or 0)
        if before != (self._count, self._unneeded):
            said = answer.summary
            log.info("nodes wanted", nodes=self._count, not_needed=", ".join(sorted(self._unneeded)), reason=said)
