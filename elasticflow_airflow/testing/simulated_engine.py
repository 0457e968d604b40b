"""Modelled workers of a simulated cluster: their leases never expire, and they behave as the test defines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV, FakeEngine, fake_nodes
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangSpec


class SimulatedEngine(FakeEngine):
    """Engine over modelled workers; ``behave`` returns a gang's behaviour, given the number of earlier failures."""

    def __init__(
        self,
        jobs_dir: Path,
        nodes: int,
        slots: int,
        clock: Callable[[], float],
        behave: Callable[[GangSpec, int], FakeBehaviour],
    ) -> None:
        super().__init__(fake_nodes(nodes, slots), jobs_dir, clock=clock)
        self._behave = behave
        self._failed: dict[str, set[int]] = {}

    @property
    def name(self) -> str:
        """Short name for logs."""
        return "simulated"

    def outlook(self) -> tuple[float, tuple[str, ...]]:
        """Return the time of the next spontaneous event (infinity: never), and the phases of all gangs."""
        with self.world.lock:
            doing = tuple(gang.phase for _, gang in sorted(self.world.gangs.items()))
            return self.world.next_turn_s(), doing

    def resize(self, nodes: int, slots: int) -> None:
        """Replace the machines; workers on removed ones are lost."""
        with self.world.lock:
            wanted = {node.node_id: node for node in fake_nodes(nodes, slots)}
            for node_id, node in list(self.world.nodes.items()):
                if wanted.get(node_id) != node:
                    self.remove_node(node_id)
            self.world.nodes = wanted

    def apply(self, spec: GangSpec) -> None:
        """Apply as any engine does, but with a lease that never expires, however far the clock jumps."""
        super().apply(replace(spec, lease_s=math.inf))

    def observe(self) -> tuple[GangObservation, ...]:
        """Observe as any engine does; first every gang reports its progress, and failed generations are recorded."""
        with self.world.lock:
            self.world.advance()
            for gang in self.world.gangs.values():
                gang.speak()
            observations = super().observe()
        for seen in observations:
            if seen.outcome is GangOutcome.FAILED:
                self._failed.setdefault(seen.job_id, set()).add(seen.generation)
        return observations

    def _behaviour(self, spec: GangSpec) -> FakeBehaviour:
        if BEHAVIOUR_ENV in spec.env:
            return super()._behaviour(spec)
        return self._behave(spec, len(self._failed.get(spec.job_id, ())))
