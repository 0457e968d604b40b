"""Makes several machines look to the engine like one: each call goes to the agent of the node in question.

Nothing here waits for a node. What the engine reads is what has arrived; what it writes is sent by another thread.
A node that has not answered for ``suspicion_s`` is *suspected*: its supervisors count as lost, the survivors of their
jobs go on without them, and nothing is started there. Workers that live on in a node that was cut off publish nothing
(their generation is fenced), are ordered to end as soon as the node answers, and end by themselves with their lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as NoAnswerInTimeError
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.engines.cluster.job_folder import Arrivals, has_ended
from elasticflow_airflow.engines.cluster.log_archive import StorageArchive
from elasticflow_airflow.engines.cluster.messages import EnvironmentRequest, Introduction, SupervisorState
from elasticflow_airflow.engines.cluster.node_link import NodeLink
from elasticflow_airflow.engines.cluster.shared_storage import SharedStorage, StorageProbe
from elasticflow_airflow.engines.local.files.generation_folder import Status, StopOrder, SupervisorFolder
from elasticflow_airflow.engines.local.files.records import Records
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.layout import NodeLayout
from elasticflow_airflow.engines.local.machine.stacks import LIMIT_S as STACKS_LIMIT_S
from elasticflow_airflow.engines.local.machines import Changes, Trainer
from elasticflow_airflow.engines.local.node_facts import NodeFacts
from elasticflow_airflow.engines.local.node_manager import number_in, offer
from elasticflow_airflow.engines.port import EngineError, EngineNode, Fencing, SlotsHeldError, SupersededError
from elasticflow_airflow.scheduler_core.model.values import Slot

SUSPICION_S = 5.0
_TICK_S, _STALL_S = 0.1, 1.0
_LOOK_S = 0.02
_KEPT_S = 600.0
_WRONG_CLOCK_S = 30.0
_LAST_PUSH_S = 2.0
"""How long to wait at the end for what has been written to be sent."""
_ABANDONED = "abandoned"
"""Marker in a supervisor's folder: its node was silent, and its workers were given up."""

logger = logging.getLogger("elasticflow.node")


class OwnEpoch:
    """The number of a service without others beside it: the time of its start, or more than any node has seen."""

    def __init__(self) -> None:
        self._epoch = time.time_ns()

    def epoch(self) -> int:
        """Return the number."""
        return self._epoch

    def above(self, seen: int) -> int:
        """Return a higher number: whatever the clocks say, the service that was started last commands."""
        if seen >= self._epoch:
            logger.warning("a node was commanded by a service with a later clock: this one takes it over")
            self._epoch = seen + 1
        return self._epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Leadership:
    """What a service with others beside it gives its engine, whose folder is new: what is in it, nobody else has.

    ``records``: shared by all of them. ``fencing``: of this leadership. ``code_root``: below it is the code of jobs, in
    the folder ``snapshots``. What runs is asked of the nodes, and the logs of jobs that are over are kept in the shared
    storage.
    """

    records: Records
    fencing: Fencing
    code_root: Path


class ClusterNodes:
    """The machines of a cluster (see ``engines/local/machines.py``).

    ``state_dir``: of the service, where the job folders are. ``token``: shared by service and agents. Where the agents
    are is said by :meth:`set_addresses`. ``leadership``: of a service that others take over from, or that has taken
    over; None: of the only one. Raises OSError when the storage cannot be used.
    """

    def __init__(
        self,
        state_dir: Path,
        storage: SharedStorage,
        token: str,
        *,
        suspicion_s: float = SUSPICION_S,
        leadership: Leadership | None = None,
    ) -> None:
        self._root, self._suspicion_s = state_dir.resolve(), suspicion_s
        self._storage, self._probe = storage, StorageProbe(storage)
        self.log_archive: StorageArchive | None = None
        """Is closed with the connections."""
        self._token, self._leadership = token, leadership
        self.fencing: Fencing = OwnEpoch() if leadership is None else leadership.fencing
        self._addresses: Mapping[str, str] = {}
        self._arrivals = Arrivals()
        self._links: list[NodeLink] = []
        """Replaced as a whole when it changes: the engine reads it in other threads."""
        self._conversations: dict[NodeLink, asyncio.Task[None]] = {}
        self._begun_s = self._ticked_s = time.monotonic()
        """The former: when it was first said where agents are."""
        self._strangers_checked = False
        self._given_up: dict[Path, dict[str, bool]] = {}
        """By folder of an incarnation, and name of a supervisor's folder, whether the marker is in that."""
        self._renewed: dict[str, int] = {}
        """By incarnation: ``Arrivals.everything`` as it was when its leases were renewed last."""
        self._suspected: set[NodeLink] = set()
        self._met: set[NodeLink] = set()
        """Links whose node was reminded of what was given up while it did not answer."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="elasticflow-nodes", daemon=True)
        self._thread.start()

    def set_addresses(self, addresses: Mapping[str, str]) -> None:
        """Say where the agents are: addresses by any key that stays with the node, such as its name.

        A node that is not among them any more is kept as long as its agent answers, and ten minutes longer.
        """
        if not self._addresses:
            self._begun_s = time.monotonic()
        self._addresses = dict(addresses)
        asyncio.run_coroutine_threadsafe(self._go_where_they_are(), self._loop).result()

    async def _go_where_they_are(self) -> None:
        links = {link.key: link for link in self._links}
        for key, url in self._addresses.items():
            link = links.get(key)
            if link is None:
                link = NodeLink(
                    key,
                    url,
                    self._token,
                    self._root,
                    self.fencing,
                    self._probe,
                    self._send_across,
                    self._check_names,
                    self._arrivals,
                    self._suspicion_s,
                    None if self._leadership is None else self._leadership.code_root,
                    None if self._leadership is None else self._make_incarnation,
                )
                self._links = [*self._links, link]
                self._conversations[link] = asyncio.ensure_future(link.run())
            elif link.url != url:
                link.move_to(url)

    def wait_for_nodes(self, limit_s: float) -> None:
        """Wait until all agents have answered, or one has and the others are silent: they may come later.

        Raises EngineError that says why when none has answered within ``limit_s``.
        """
        end_s = time.monotonic() + limit_s
        one_answered = False
        while (silent := [link for link in self._links if link.answers == 0]) and time.monotonic() < end_s:
            if not one_answered and len(silent) < len(self._links):
                one_answered = True
                end_s = min(end_s, time.monotonic() + self._suspicion_s)
            time.sleep(_LOOK_S)
        said = "; ".join(self.problems())
        if len(silent) == len(self._links):
            raise EngineError(said or "no nodes are configured")
        if said:
            logger.warning("%s", said)

    def problems(self) -> list[str]:
        """Return why nodes are not used, and what is wrong with those that are."""
        silent = [link for link in self._links if link.answers == 0 or link in self._suspected]
        found = [f"the node at {link.url} is not used: {link.problem or 'it does not answer'}" for link in silent]
        for link in self._links:
            if link not in silent and abs(link.offset_s) > _WRONG_CLOCK_S:
                way = "behind" if link.offset_s > 0 else "ahead of"
                found.append(
                    f"the clock of node {self._names(link)} is {abs(link.offset_s):.0f} s {way} the service's: set both"
                    " by a time server, or the times in its logs are wrong"
                )
        versions: dict[str, list[str]] = {}
        for link in self._links:
            if link.introduction is not None and link.introduction.torch is not None:
                versions.setdefault(link.introduction.torch.partition("+")[0], []).append(self._names(link))
        if len(versions) > 1:
            said = ", ".join(
                f"{version} on {' and '.join(sorted(names))}" for version, names in sorted(versions.items())
            )
            found.append(f"nodes have different versions of torch ({said}): install one, or workers may not meet")
        return found

    # -- facts

    @property
    def nodes(self) -> Mapping[str, NodeLayout]:
        """All nodes that have ever answered, and have told what they have."""
        return {
            node.node_id: node
            for link in self._links
            if link.introduction is not None and link.was_recalled
            for node in link.introduction.facts.nodes
        }

    def facts(self, node_id: str) -> NodeFacts:
        """Return what is constant about the machine of a node. Raises EngineError while it is not known."""
        introduction = self._link(node_id).introduction
        if introduction is None:
            raise EngineError(f"node {node_id} has not answered yet")
        return introduction.facts

    def clock_offset_s(self, node_id: str) -> float:
        """Return the service's clock minus the node's; 0 for a node that is not known."""
        return next((link.offset_s for link in self._links if node_id in link.node_ids), 0.0)

    def inventory(self, has_gang: Callable[[str], bool]) -> tuple[EngineNode, ...]:
        """Return the nodes that answer. Slots of workers that were given up are busy until these have left."""
        found = []
        for link in self._present():
            introduction = link.introduction
            if introduction is None:
                continue
            for node in introduction.facts.nodes:
                holders = link.holders.get(node.node_id)
                if holders is None:
                    continue
                offered = offer(node, holders, introduction.facts.state_dir, has_gang)
                given_up = {
                    index: f"{slots.describe(holder)}, given up while the node was silent: it is being ended"
                    for index, holder in enumerate(holders)
                    if holder is not None and self._was_abandoned(node.node_id, holder)
                }
                found.append(replace(offered, busy={**offered.busy, **given_up}, leaving_at=link.leaving_at))
        return tuple(found)

    def is_empty(self, node_id: str) -> bool:
        """Return whether nobody holds a slot of a node that answers."""
        links = [link for link in self._present() if node_id in link.node_ids]
        return all(holder is None for link in links for holder in link.holders.get(node_id, ())) and bool(links)

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """Do nothing: nobody provides machines."""

    def check_slots(self, wanted: Iterable[Slot]) -> None:
        """Raise SlotsHeldError when any of the slots is held, or its node does not answer."""
        held = {}
        present = {node_id: link for link in self._present() for node_id in link.node_ids}
        for slot in wanted:
            link = present.get(slot.node_id)
            if link is None:
                held[slot] = f"nobody, but node {slot.node_id} does not answer"
            elif (holder := self._holder(link, slot)) is not None:
                held[slot] = slots.describe(holder)
        if held:
            raise SlotsHeldError(held)

    def check_interpreter(self, python: str, job_env: Mapping[str, str], node_ids: Iterable[str]) -> None:
        """Do nothing: the agent looks at it before it starts anything, and says what is wrong."""

    def prepare_environment(self, python: str, requirements: tuple[str, ...]) -> bool:
        """Have an environment built on all nodes that are present (see the port)."""
        asked = EnvironmentRequest(python=None if python == sys.executable else python, requirements=requirements)
        answers = [(link, link.environment(asked)) for link in self._present()]
        if not answers or any(not answer.ready and answer.failure is None for _, answer in answers):
            return False
        failures = [f"node {self._names(link)}: {answer.failure}" for link, answer in answers if answer.failure]
        if failures:
            for link, _ in answers:
                link.forget_environment(asked)
            raise EngineError("; ".join(failures))
        return True

    # -- folders

    def publish(self, incarnation_dir: Path) -> None:
        """Have what the engine has written into the folder of an incarnation sent to its nodes."""
        incarnation = self._relative(incarnation_dir)
        self._arrivals.note(incarnation)
        for link in self._links_of(incarnation):
            link.mark(incarnation)

    def changes(self, incarnation_dir: Path) -> Changes:
        """Return what may have changed in the folder of an incarnation."""
        return self._arrivals.of(self._relative(incarnation_dir))

    def expect(self, folders: Iterable[SupervisorFolder]) -> None:
        """Make the folders of supervisors on record: of nodes that stay silent, nothing else is known."""
        for folder in folders:
            if not folder.path.is_dir():
                self._make_incarnation(job_folder.incarnation_of(self._relative(folder.path)))
                folder.path.mkdir(parents=True, exist_ok=True)

    def _make_incarnation(self, incarnation: str) -> None:
        self._storage.make_incarnation(self._root, incarnation)

    def renew_lease(self, folder: SupervisorFolder) -> None:
        """Have the lease renewed, and what its node may lack sent: an earlier service may have died before it was."""
        path = self._relative(folder.path)
        for link in self._at(folder):
            if not self.was_given_up(folder):
                link.renew(path)
        incarnation, everything = job_folder.incarnation_of(path), self._arrivals.everything
        if self._renewed.get(incarnation) != everything:
            self.publish(self._root / incarnation)
            self._renewed[incarnation] = everything

    def discard(self, incarnation_dir: Path) -> None:
        """Have the files of an incarnation deleted on its nodes, except its checkpoints."""
        incarnation = self._relative(incarnation_dir)
        for link in self._links_of(incarnation):
            link.discard(incarnation)
        self._arrivals.forget(incarnation)
        self._renewed.pop(incarnation, None)
        self._given_up.pop(incarnation_dir, None)

    def _check_names(self, link: NodeLink, introduction: Introduction) -> None:
        """Raise ValueError when another agent has a node of the same name, or workers could not meet."""
        for node in introduction.facts.nodes:
            for other in self._links:
                if other is not link and node.node_id in other.node_ids:
                    raise ValueError(
                        f"a node named {node.node_id} is at {other.url} already: start one with another --node-id"
                    )
        machines = {introduction.machine_id} | {
            other.introduction.machine_id for other in self._links if other.introduction is not None
        }
        for node in introduction.facts.nodes:
            if len(machines) > 1 and node.address.startswith("127."):
                raise ValueError(
                    f"workers on other machines cannot reach node {node.node_id} at {node.address}: start its agent"
                    " with --address"
                )

    def _send_across(self, source: NodeLink, path: str) -> None:
        """Have a file that came from one node sent to the others of its job."""
        incarnation = job_folder.incarnation_of(path)
        for link in self._links_of(incarnation):
            if link is not source:
                link.mark(incarnation)

    def _links_of(self, incarnation: str) -> list[NodeLink]:
        nodes = {node_id for node_id, _ in job_folder.supervisor_folders(self._root, incarnation)}
        return [link for link in self._links if nodes.intersection(link.node_ids)]

    # -- supervisors

    def spawn(self, node_id: str, folder: SupervisorFolder, secret_env: Mapping[str, str]) -> None:
        """Have the supervisor of a node started. Raises EngineError if it did not come up before."""
        failure = self._link(node_id).start(self._relative(folder.path), dict(secret_env))
        if failure is not None:
            raise EngineError(f"node {node_id}: {failure}")

    def is_coming_up(self, folder: SupervisorFolder) -> bool:
        """Return whether a supervisor is being started on a node that answers."""
        if self.was_given_up(folder):
            return False
        path, links = self._relative(folder.path), self._at(folder)
        if not any(link.answers for link in links):
            return True  # The service has just started, and the node has time to answer.
        return any(link.is_coming_up(path) for link in links if link not in self._suspected)

    def was_given_up(self, folder: SupervisorFolder) -> bool:
        """Return whether its node was silent, and its workers were given up."""
        known = self._given_up.setdefault(folder.path.parents[1], {})
        name = folder.path.name
        if name not in known:
            known[name] = (folder.path / _ABANDONED).exists()
        return known[name]

    def is_alive(self, folder: SupervisorFolder, status: Status) -> bool:  # noqa: ARG002  (its node knows)
        """Return whether a supervisor is running and was not given up."""
        if self.was_given_up(folder):
            return False
        links = self._at(folder)
        if not links or links[0].answers == 0:
            return True  # The service has just started, and the node has time to answer.
        return links[0].state_of(self._relative(folder.path)).is_running

    def end_leftovers(self, supervisors: Iterable[tuple[SupervisorFolder, Status | None]]) -> bool:
        """Return whether a node has just killed what was left of these; it does so by itself."""
        return any(
            link.state_of(self._relative(folder.path)) is SupervisorState.DYING
            for folder, _ in supervisors
            if not self.was_given_up(folder)
            for link in self._at(folder)
        )

    def reap(self) -> None:
        """Give up the supervisors of nodes that have become silent, and take back nodes that answer again.

        Raises SupersededError.
        """
        self.fencing.epoch()
        if time.monotonic() - self._ticked_s > _STALL_S:
            return  # It is this service that stands still: answers may be there, unread.
        for link in self._links:
            if link.silent_s > self._suspicion_s:
                if link not in self._suspected:
                    logger.warning(
                        "node %s has not answered for %.1f s: it is given up", self._names(link), link.silent_s
                    )
                    self._abandon(link.node_ids)
                    self._suspected.add(link)
                    self._met.discard(link)
                    link.is_current = False
            elif link.is_current and link not in self._met:
                if link in self._suspected:
                    logger.warning("node %s answers again", self._names(link))
                self._suspected.discard(link)
                self._remind(link)
                self._met.add(link)
        self._forget_those_gone()
        if not self._strangers_checked and time.monotonic() - self._begun_s > self._suspicion_s:
            self._strangers_checked = True
            known = {node_id for link in self._links for node_id in link.node_ids}
            self._abandon(self._nodes_on_record() - known)

    def _forget_those_gone(self) -> None:
        """Forget nodes that nobody names any more, and whose workers have ended by their lease."""
        gone = {link for link in self._suspected if link.key not in self._addresses and link.silent_s > _KEPT_S}
        self._forget(gone)

    def forget(self, node_ids: Collection[str]) -> None:
        """Forget nodes on which nothing of ours is left."""
        self._forget({link for link in self._links if link.node_ids and set(link.node_ids) <= set(node_ids)})

    def _forget(self, gone: set[NodeLink]) -> None:
        if gone:
            logger.info("forgotten: %s", ", ".join(self._names(link) for link in gone))
            self._links = [link for link in self._links if link not in gone]
            self._arrivals.note_all()
            self._suspected -= gone
            for link in gone:
                self._loop.call_soon_threadsafe(self._conversations.pop(link).cancel)

    def _abandon(self, node_ids: Collection[str]) -> None:
        """Give up all supervisors of nodes; the order that ends them is sent when a node answers again."""
        reason = f"the node has not answered for {self._suspicion_s:g} s"
        for incarnation in job_folder.unfinished(self._root, node_ids, has_ended) if node_ids else ():
            for _, path in job_folder.supervisor_folders(self._root, incarnation, node_ids):
                folder = SupervisorFolder(self._root / path)
                if not has_ended(folder.path):
                    with contextlib.suppress(OSError, ValueError):  # A script has damaged it: its lease ends it.
                        folder.write_order(StopOrder(0.0, reason, kill=True))
                    (folder.path / _ABANDONED).touch()
                    self._given_up.setdefault(folder.path.parents[1], {})[folder.path.name] = True
                    self._arrivals.note(incarnation)

    def _remind(self, link: NodeLink) -> None:
        """Have a node told what was given up while it did not answer; the service may have restarted meanwhile."""
        for incarnation in job_folder.unfinished(self._root, link.node_ids, has_ended):
            folders = job_folder.supervisor_folders(self._root, incarnation, link.node_ids)
            if any(self.was_given_up(SupervisorFolder(self._root / path)) for _, path in folders):
                link.mark(incarnation)

    def _nodes_on_record(self) -> set[str]:
        """Return the nodes of all supervisors that have not ended."""
        return {
            node_id
            for incarnation in job_folder.unfinished(self._root, None, has_ended)
            for node_id, _ in job_folder.supervisor_folders(self._root, incarnation)
        }

    def stacks(self, trainers: Mapping[str, Trainer]) -> Mapping[str, str]:
        """Ask each node for the stacks of its trainers."""
        by_node = {
            node_id: {
                worker: (None if one.process is None else asdict(one.process), self._relative(one.stacks_file))
                for worker, one in trainers.items()
                if one.node_id == node_id
            }
            for node_id in {one.node_id for one in trainers.values()}
        }
        found: dict[str, str] = {}
        asked = {
            node_id: asyncio.run_coroutine_threadsafe(
                self._link(node_id).ask_for_stacks(wanted, STACKS_LIMIT_S * 2), self._loop
            )
            for node_id, wanted in by_node.items()
        }
        for node_id, answer in asked.items():
            try:
                found |= answer.result(STACKS_LIMIT_S * 3)
            except (httpx.HTTPError, NoAnswerInTimeError) as error:
                said = f"(node {node_id} could not be asked: {error or type(error).__name__})"
                found |= dict.fromkeys(by_node[node_id], said)
        return dict(sorted(found.items()))

    def let_go(self) -> None:
        """Close the connections; agents, supervisors and workers go on."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if self.log_archive is not None:
            self.log_archive.close()
        self._probe.close()

    # -- gangs whose files cannot be read

    def held_by(self, job_id: str, wanted: Sequence[Slot] | None = None) -> dict[Slot, dict[str, Any]]:
        """Return the slots that a job's supervisors hold on nodes that answer."""
        return {
            slot: holder
            for slot, holder in self._held()
            if holder.get("job_id") == job_id
            and (wanted is None or slot in wanted)
            and not self._was_abandoned(slot.node_id, holder)
        }

    def renew(self, job_id: str) -> None:
        """Have the leases of a job's supervisors renewed."""
        for link in self._links:
            link.renew_job(job_id)

    def ask_to_leave(self, job_id: str) -> None:
        """Have a job's supervisors save and leave."""
        for link in self._links:
            link.ask_to_leave(job_id)

    def latest(self, job_id: str) -> int:
        """Return the highest running generation of a job; 0 when there is none."""
        return max((number_in(holder, "generation") for holder in self.held_by(job_id).values()), default=0)

    def running(self, job_id: str) -> list[tuple[int, int, list[Slot]]]:
        """Return (incarnation, generation, slots) of each running gang of a job."""
        held = sorted(
            ((number_in(holder, "incarnation"), number_in(holder, "generation")), slot)
            for slot, holder in self.held_by(job_id).items()
        )
        return [(*key, [slot for _, slot in group]) for key, group in itertools.groupby(held, key=lambda one: one[0])]

    # -- helpers

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._stop = asyncio.Event()
        self._loop.run_until_complete(self._converse())
        self._loop.close()

    async def _converse(self) -> None:
        ticking = asyncio.ensure_future(self._tick())
        await self._stop.wait()
        with contextlib.suppress(TimeoutError, SupersededError):
            self.fencing.epoch()  # Otherwise nothing can be sent any more.
            await asyncio.wait_for(asyncio.gather(*(link.flush() for link in self._present())), _LAST_PUSH_S)
        tasks = [ticking, *self._conversations.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        """Note that this loop runs. While it stood still (a paused machine, a full disk), no node was silent."""
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            stood_still_s = now_s - self._ticked_s - _TICK_S
            if stood_still_s > _TICK_S:
                for link in self._links:
                    link.answered_s += stood_still_s
            self._ticked_s = now_s

    def _present(self) -> list[NodeLink]:
        return [link for link in self._links if link.is_current and link.silent_s <= self._suspicion_s]

    def _link(self, node_id: str) -> NodeLink:
        for link in self._links:
            if node_id in link.node_ids:
                return link
        raise EngineError(f"node {node_id} is not known: its agent has not answered since the service started")

    def _at(self, folder: SupervisorFolder) -> list[NodeLink]:
        node_id = job_folder.node_of(folder.path.name)
        return [link for link in self._links if node_id in link.node_ids]

    def _held(self) -> Iterator[tuple[Slot, dict[str, Any]]]:
        for link in self._present():
            for node_id in link.node_ids:
                for index, holder in enumerate(link.holders.get(node_id, ())):
                    if holder is not None:
                        yield Slot(node_id, index), holder

    @staticmethod
    def _holder(link: NodeLink, slot: Slot) -> dict[str, Any] | None:
        holders = link.holders.get(slot.node_id, [])
        return holders[slot.index] if slot.index < len(holders) else None

    def _was_abandoned(self, node_id: str, holder: Mapping[str, Any]) -> bool:
        """Return whether the holder of a slot is a supervisor that was given up."""
        incarnation, generation = number_in(holder, "incarnation"), number_in(holder, "generation")
        job_dir = self._root / "jobs" / str(holder.get("job_id"))
        folder = SupervisorFolder.of(job_dir / f"i{incarnation:06d}", generation, node_id)
        return self.was_given_up(folder)

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._root))

    @staticmethod
    def _names(link: NodeLink) -> str:
        return ", ".join(link.node_ids) or f"at {link.url}"
