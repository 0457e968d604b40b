"""Keeps the logs of jobs that are over in the shared storage: the next leader has another folder, and nodes clean up.

Copying is the business of one thread: whoever asks does not wait for the storage, which may be away.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.engines.cluster.shared_storage import SharedStorage
from elasticflow_airflow.engines.local.files import worker_logs

AGAIN_S = 2.0
"""How soon what failed is tried again."""
COMPLETE_LIMIT_S = 60.0
"""Logs whose supervisors have not been seen to end for so long are copied as they are."""

logger = logging.getLogger("elasticflow.node")


@dataclass(slots=True)
class _Task:
    incarnation: str
    is_removal: bool
    since_s: float
    due_s: float = 0.0


class StorageArchive:
    """The logs of incarnations below ``root``, in ``storage`` (see ``worker_logs.LogArchive``).

    ``earlier``: where a service that had no others beside it may have left those of jobs that no node has any more.
    """

    def __init__(self, root: Path, storage: SharedStorage, earlier: Path | None = None) -> None:
        self._root, self._storage, self._earlier = root, storage, earlier
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._kept: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="elasticflow-logs", daemon=True)
        self._thread.start()

    def keep(self, incarnation_dir: Path) -> None:
        """Have the logs of an incarnation copied."""
        self._tasks.put(_Task(self._name(incarnation_dir), is_removal=False, since_s=time.monotonic()))

    def remove(self, incarnation_dir: Path) -> None:
        """Have the copies of the logs of an incarnation removed."""
        self._tasks.put(_Task(self._name(incarnation_dir), is_removal=True, since_s=time.monotonic()))

    def kept(self) -> list[Path]:
        """Return the folders of the incarnations whose logs were copied since the last call."""
        found = []
        while not self._kept.empty():
            found.append(self._kept.get())
        return found

    def fetch(self, incarnation_dir: Path, name: str) -> None:
        """Bring the log of a worker back. Raises OSError."""
        folder = f"{self._name(incarnation_dir)}/logs"
        for file in self._storage.names(folder):
            if not _is_log(f"{folder}/{file}") or not file.startswith(f"{name}.log."):
                continue
            data = self._storage.read_file(f"{folder}/{file}")
            if data is not None:
                job_folder.write_whole(self._root / folder / file, data)

    def close(self) -> None:
        """End once what is under way is done; what is not copied is copied by the next service."""
        self._tasks.put(None)
        self._thread.join(AGAIN_S)

    def _run(self) -> None:
        waiting: list[_Task] = []
        while True:
            try:
                task = self._tasks.get(timeout=AGAIN_S / 4 if waiting else None)
            except queue.Empty:
                task = _Task("", is_removal=False, since_s=0.0)
            if task is None:
                return
            if task.is_removal:
                waiting = [one for one in waiting if one.incarnation != task.incarnation]
            waiting += [task] if task.incarnation else []
            now_s = time.monotonic()
            for one in [one for one in waiting if one.due_s <= now_s]:
                if self._is_done(one):
                    waiting.remove(one)
                else:
                    one.due_s = now_s + AGAIN_S

    def _is_done(self, task: _Task) -> bool:
        """Try a task; return whether it need not be tried again."""
        try:
            if task.is_removal:
                for file in self._storage.names(f"{task.incarnation}/logs"):
                    self._storage.remove(f"{task.incarnation}/logs/{file}")
                return True
            folder = f"{task.incarnation}/logs"
            supervisors = [path for _, path in job_folder.supervisor_folders(self._root, task.incarnation)]
            if supervisors:
                over = all(job_folder.has_ended(self._root / path) for path in supervisors)
                if not over and time.monotonic() - task.since_s < COMPLETE_LIMIT_S:
                    return False
                self._copy(self._root, folder)
            elif self._earlier is not None and (self._earlier / folder).is_dir():
                self._copy(self._earlier, folder, known=self._storage.names(folder))
            elif not self._storage.names(folder):  # Neither a node nor a service before this one has anything of it.
                return True
        except OSError as error:
            if self._problem != str(error):
                logger.warning("the logs of jobs that are over cannot be kept in the shared storage: %s", error)
            self._problem = str(error)
            return False
        self._problem = None
        self._kept.put(self._root / task.incarnation)
        return True

    def _copy(self, root: Path, folder: str, known: Collection[str] = ()) -> None:
        for path in sorted((root / folder).glob("*")):
            if path.name not in known and _is_log(f"{folder}/{path.name}") and path.is_file() and not path.is_symlink():
                data = job_folder.read_part(path, 0, worker_logs.SEGMENT_BYTES * 4)
                self._storage.write_file(f"{folder}/{path.name}", data)

    def _name(self, incarnation_dir: Path) -> str:
        return str(incarnation_dir.relative_to(self._root))


def _is_log(path: str) -> bool:
    place = job_folder.place_of(path)
    return place is not None and "/logs/" in path
