"""What the engine asks of the machines on which its gangs run.

The engine decides and writes what is to be; whatever needs a machine's own kernel (processes, slot locks, interpreters)
is asked through :class:`Machines`. For one machine :class:`~.node_manager.NodeManager` answers by itself, for several
``engines/cluster`` asks the one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder
from elasticflow_airflow.engines.local.machine.layout import NodeLayout
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.local.node_facts import NodeFacts
from elasticflow_airflow.engines.port import EngineNode
from elasticflow_airflow.scheduler_core.model.values import Slot


@dataclass(frozen=True, slots=True)
class Trainer:
    """A worker's training process, and the file for its stacks. ``process`` None: it has not started yet."""

    node_id: str
    process: ProcessId | None
    stacks_file: Path


class Changes(NamedTuple):
    """Numbers that differ from earlier ones where something of an incarnation may have changed since."""

    states: int
    """What its supervisors wrote, whether they live, and what they were told."""
    reports: int
    """What its workers reported."""


class Machines(Protocol):
    """The machines of an engine. Paths are those of the engine; called with the engine's lock held, except stacks."""

    @property
    def nodes(self) -> Mapping[str, NodeLayout]:
        """The nodes that are known, by id, present or not."""
        ...

    def facts(self, node_id: str) -> NodeFacts:
        """Return what is constant about the machine of a node. Raises EngineError while it is not known."""
        ...

    def clock_offset_s(self, node_id: str) -> float:
        """Return what must be added to times by a node's clock to get those by the service's."""
        ...

    def inventory(self, has_gang: Callable[[str], bool]) -> tuple[EngineNode, ...]:
        """Return the nodes that are present. ``has_gang`` tells whether a gang of a job is on record here."""
        ...

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """See the port."""
        ...

    def problems(self) -> list[str]:
        """Return why machines cannot be used that should be."""
        ...

    def check_slots(self, wanted: Iterable[Slot]) -> None:
        """Raise SlotsHeldError when any of the slots is held."""
        ...

    def check_interpreter(self, python: str, job_env: Mapping[str, str], node_ids: Iterable[str]) -> None:
        """Raise EngineError when it is known that workers cannot be started with this interpreter on these nodes."""
        ...

    def prepare_environment(self, python: str, requirements: tuple[str, ...]) -> bool:
        """See the port."""
        ...

    def publish(self, incarnation_dir: Path) -> None:
        """Have what the engine has written into the folder of an incarnation reach its nodes."""
        ...

    def changes(self, incarnation_dir: Path) -> Changes | None:
        """Return what may have changed in the folder of an incarnation; None where only a look into it tells."""
        ...

    def expect(self, folders: Iterable[SupervisorFolder]) -> None:
        """Take note, at the start, of the supervisors on record: some may be known by that alone. Raises OSError."""
        ...

    def renew_lease(self, folder: SupervisorFolder) -> None:
        """Renew the lease of a supervisor. Raises OSError."""
        ...

    # -- supervisors

    def spawn(self, node_id: str, folder: SupervisorFolder, secret_env: Mapping[str, str]) -> None:
        """Start the supervisor of a node, unless it is coming up. Raises EngineError if it did not come up before."""
        ...

    def is_coming_up(self, folder: SupervisorFolder) -> bool:
        """Return whether a supervisor was started and is running, even if it has not written anything yet."""
        ...

    def is_alive(self, folder: SupervisorFolder, status: Status) -> bool:
        """Return whether the supervisor that wrote a status is running, as far as anybody knows."""
        ...

    def was_given_up(self, folder: SupervisorFolder) -> bool:
        """Return whether a supervisor counts as dead because its node does not answer."""
        ...

    def end_leftovers(self, supervisors: Iterable[tuple[SupervisorFolder, Status | None]]) -> bool:
        """Kill leftover processes of dead supervisors; True if there were any."""
        ...

    def reap(self) -> None:
        """Reap supervisors that have ended."""
        ...

    def stacks(self, trainers: Mapping[str, Trainer]) -> Mapping[str, str]:
        """Return the stacks of the threads of these trainers, by worker id. Called without the engine's lock."""
        ...

    def let_go(self) -> None:
        """Release everything; supervisors go on."""
        ...

    # -- gangs whose files cannot be read

    def held_by(self, job_id: str, wanted: Sequence[Slot] | None = None) -> dict[Slot, dict[str, Any]]:
        """Return the slots (of ``wanted``, if given) that a job's supervisors hold, with each lock's holder entry."""
        ...

    def renew(self, job_id: str) -> None:
        """Renew the leases of a job's supervisors."""
        ...

    def ask_to_leave(self, job_id: str) -> None:
        """Make a job's supervisors save and leave, when no order file reaches them."""
        ...

    def latest(self, job_id: str) -> int:
        """Return the highest running generation of a job; 0 when there is none."""
        ...

    def running(self, job_id: str) -> list[tuple[int, int, list[Slot]]]:
        """Return (incarnation, generation, slots) of each running gang of a job; incarnation 0 where it is unknown."""
        ...
