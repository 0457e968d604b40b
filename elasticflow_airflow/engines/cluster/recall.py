"""What a node tells a service that leads from now on and has no files of its jobs: once, before anything is sent there.

The node gives its copies of what services have sent (plans, specs, orders), and what its supervisors and workers say
of themselves; all that grows further, and the logs, come by pulling. Of what all nodes have of an incarnation, the copy
that goes with the newest plan counts: a service may have died before it had told every node.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.engines.cluster.job_folder import Direction, Place
from elasticflow_airflow.engines.cluster.messages import FilePart
from elasticflow_airflow.engines.local.files.last_read import stamp_of
from elasticflow_airflow.engines.local.node_facts import NodeFacts

_SESSION, _PLAN = "session.json", "membership.json"
_TAKING = threading.Lock()
"""What a node brings is compared with what is here: nodes bring it one at a time."""


@dataclass(slots=True)
class Recalled:
    """What a node has of one incarnation. ``copies``: what workers of other nodes have said, as far as it came here."""

    files: list[FilePart] = field(default_factory=list)
    copies: list[FilePart] = field(default_factory=list)


def files_here(root: Path, incarnation: str, nodes: Collection[str], own_workers: Collection[str]) -> Recalled:
    """Return what this machine has of an incarnation. Statuses come last, and only those that tell of no end.

    An end is told by pulling, after all that the worker has said.
    """
    folders = [folder for _, folder in job_folder.supervisor_folders(root, incarnation, nodes)]
    statuses = {path: job_folder.read_whole(root / path) for path in (f"{folder}/status.json" for folder in folders)}
    paths = [*job_folder.files_down(root, incarnation, nodes), *job_folder.files_up(root, incarnation, nodes)]
    found, is_cut = Recalled(), False
    for path in dict.fromkeys(paths):
        place = job_folder.place_of(path)
        if place is None or path in statuses or (place.grows and place.direction is Direction.UP):
            continue
        if place.grows:
            data: bytes | None = job_folder.read_part(root / path, 0, job_folder.LARGEST_BYTES)
            is_cut = is_cut or (data is not None and len(data) == job_folder.LARGEST_BYTES)
        else:
            data = job_folder.read_whole(root / path)
        if data is not None:
            part = FilePart(path=path, data=data, offset=0 if place.grows else None)
            of_others = place.worker_id is not None and place.worker_id not in own_workers
            (found.copies if of_others else found.files).append(part)
    for path, status in statuses.items():
        if status is not None and not is_cut and not _tells_of_an_end(status):
            found.files.append(FilePart(path=path, data=status))
    return found


def _tells_of_an_end(status: bytes) -> bool:
    try:
        raw = json.loads(status)
        return bool(raw["ended"]) or any(worker["ended"] for worker in raw["workers"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return True  # A script has damaged it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Taker:
    """Puts what a node has told into the service's folder ``root``; ``code_root``: where the service has code.

    ``facts``: of the node's machine. ``with_our_time`` gives a heartbeat the service's time; ``complain`` is told of
    each file that cannot be used, and why.
    """

    root: Path
    code_root: Path
    facts: NodeFacts
    with_our_time: Callable[[FilePart], bytes]
    complain: Callable[[str, object], None]

    def take(self, recalled: Recalled) -> dict[str, tuple[int, int, int]]:
        """Return the files that are now as the node has them, by path, with their stamps."""
        with _TAKING:
            taken = ((path, stamp_of(self.root / path)) for path in self._take_all(recalled))
            return {path: stamp for path, stamp in taken if stamp is not None}

    def _take_all(self, recalled: Recalled) -> list[str]:
        here = {node.node_id for node in self.facts.nodes}
        plans = {
            job_folder.incarnation_of(part.path): _rank_of(part.data)
            for part in recalled.files
            if part.path.endswith(f"/{_PLAN}")
        }
        # Before any of them is written.
        newer = {incarnation for incarnation, rank in plans.items() if rank > self._rank_here(incarnation)}
        taken = []
        for part, is_copy in [*((p, False) for p in recalled.files), *((p, True) for p in recalled.copies)]:
            place = job_folder.place_of(part.path)
            try:
                if place is None or place.node_id not in (None, *here):
                    raise ValueError("it is none of the node's files")
                if self._take(part, place, is_copy=is_copy, is_newer=place.incarnation in newer):
                    taken.append(part.path)
            except Exception as error:  # noqa: BLE001  (a script can have made anything of it: the other files are taken)
                self.complain(part.path, error)
        return taken

    def _take(self, part: FilePart, place: Place, *, is_copy: bool, is_newer: bool) -> bool:
        """Write a file, unless what is here counts more; return whether it is now as the node has it."""
        path = self.root / part.path
        name, is_there = path.name, path.exists()
        if part.offset is not None:
            stamp = stamp_of(path)
            if not is_copy or stamp is None or stamp[2] < len(part.data):
                job_folder.write_part(path, part.offset, part.data)
            return not is_copy
        data = self.with_our_time(part) if job_folder.is_heartbeat(part.path) else part.data
        if name in (_SESSION, _PLAN):
            if is_there and not is_newer:
                return False
            if name == _SESSION:
                data = self._session_here(data)
        elif name == "kill.json" and is_there:
            data = _both(path.read_bytes(), data)
        elif is_there and (is_copy or (place.direction is not Direction.UP and place.worker_id is None)):
            return False  # What was ordered since then counts, and the copy of whoever wrote it.
        job_folder.write_whole(path, data)
        return not is_copy and name != "kill.json"

    def _rank_here(self, incarnation: str) -> tuple[int, bool]:
        data = job_folder.read_whole(self.root / incarnation / _PLAN)
        return (0, False) if data is None else _rank_of(data)

    def _session_here(self, data: bytes) -> bytes:
        """Return ``session.json`` with the paths that it has at the service."""
        session = json.loads(data)
        for name, root in (("incarnation_dir", self.root), ("code_dir", self.code_root)):
            session[name] = self.facts.path_there(Path(session[name]), root)
        return json.dumps(session, indent=1).encode()


def _rank_of(plan: bytes) -> tuple[int, bool]:
    """Return what makes one plan count more than another: its generation, then that nobody is in it.

    A supervisor whose lease has expired writes the latter; the plan of the same generation must not bring workers back.
    """
    try:
        raw = json.loads(plan)
        return int(raw["generation"]), not raw["members"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return 0, False  # A script has damaged it.


def _both(here: bytes, there: bytes) -> bytes:
    """Return the order to kill whom either order names."""
    return json.dumps({"workers": sorted({*json.loads(here)["workers"], *json.loads(there)["workers"]})}).encode()
