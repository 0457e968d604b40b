"""Modelled workers of a simulated cluster: they never lose the service, and behave as the test says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV, FakeEngine, fake_nodes
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangSpec


class SimulatedEngine(FakeEngine):
    """The engine port over modelled workers; ``behave`` says how those of a gang do, given how many failed before."""

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
        """When something will next happen to workers by itself (infinity: never), and what they all do now."""
        with self.world.lock:
            doing = tuple(gang.phase for _, gang in sorted(self.world.gangs.items()))
            return self.world.next_turn_s(), doing

    def resize(self, nodes: int, slots: int) -> None:
        """Replace the machines; workers on those that go are lost."""
        with self.world.lock:
            wanted = {node.node_id: node for node in fake_nodes(nodes, slots)}
            for node_id, node in list(self.world.nodes.items()):
                if wanted.get(node_id) != node:
                    self.remove_node(node_id)
            self.world.nodes = wanted

    def apply(self, spec: GangSpec) -> None:
        """As every engine; the lease never runs out, however far the clock jumps."""
        super().apply(replace(spec, lease_s=math.inf))

    def observe(self) -> tuple[GangObservation, ...]:
        """As every engine; everybody says how far he is, and who failed is remembered."""
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
