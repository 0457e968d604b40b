"""A real service over machines of the tests: an agent on each, and one slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from support.machines import Machines
from support.node_agents import TOKEN, start_agent
from support.trial import Trial


@dataclass
class ClusterTrial(Trial):
    """A service over machines with a slot each."""

    machines: Machines = field(default_factory=lambda: Machines(2))

    def listen(self, index: int) -> str:
        return f"{self.machines.addresses[index]}:8322"

    def start_node(self, index: int) -> None:
        start_agent(self.state_dir.parent, f"node{index}", self.listen(index), 1, self.machines, index)


AnyTrial = TypeVar("AnyTrial", bound=ClusterTrial)


@contextmanager
def running(trial: AnyTrial, **settings: object) -> Iterator[AnyTrial]:
    """Start the agents and the service, and end them, with all that is left, afterwards."""
    indices = range(len(trial.machines.addresses))
    trial.settings = {
        "engine": "cluster",
        "nodes": ",".join(f"http://{trial.listen(index)}" for index in indices),
        "shared_dir": trial.state_dir.parent / "shared",
        "node_token": TOKEN,
        **settings,
    }
    try:
        for index in indices:
            trial.start_node(index)
        trial.start()
        yield trial
    finally:
        trial.machines.close()
    trial.end()
