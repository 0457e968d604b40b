"""The files of jobs on a cluster: the service's copy of the job folders, and checkpoints where all nodes reach them."""

from __future__ import annotations

from pathlib import Path

from elasticflow_airflow.engines.cluster.cluster_nodes import ClusterNodes
from elasticflow_airflow.engines.cluster.log_archive import StorageArchive
from elasticflow_airflow.engines.cluster.shared_storage import SharedStorage
from elasticflow_airflow.engines.job_files import CANDIDATE_PATH, JobFolders
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo
from elasticflow_airflow.runtime.stores.remote import RemoteStore


def cluster_files(
    state_dir: Path, storage: SharedStorage, nodes: ClusterNodes, archive: StorageArchive | None = None
) -> JobFolders:
    """Return the files of jobs whose checkpoints are in ``storage``. ``archive`` has the logs of those that are over.

    ``state_dir`` may be new: checkpoints are found in the storage.
    """
    at_url = storage.checkpoints_url("") is not None
    return (_WithCheckpointsAtUrl if at_url else _ClusterFolders)(state_dir, storage, nodes, archive)


class _ClusterFolders(JobFolders):
    """With the checkpoints in a folder that is shared: each job folder has a link to it."""

    def __init__(
        self, state_dir: Path, storage: SharedStorage, nodes: ClusterNodes, archive: StorageArchive | None
    ) -> None:
        super().__init__(state_dir / "jobs")
        self._state_dir, self._storage, self._nodes, self._archive = state_dir, storage, nodes, archive

    def checkpoint(self, job_id: str, incarnation: int, path: str) -> str:
        """Return the path of a checkpoint in the shared folder, which stays when this service's folder goes."""
        return str(self._checkpoint(job_id, incarnation, path))

    def exists(self, job_id: str, incarnation: int) -> bool:
        """Return whether an incarnation has files, here or in the shared storage."""
        return super().exists(job_id, incarnation) or self._storage.has(self._name(job_id, incarnation))

    def promote(self, job_id: str, incarnation: int, promotion: Promotion) -> bool:
        """Write ``promoted.json`` into the shared folder."""
        self.prepare(job_id, incarnation)
        return super().promote(job_id, incarnation, promotion)

    def adopt(self, job_id: str, incarnation: int, earlier: int, path: str) -> CandidateInfo:
        """Copy a checkpoint within the shared folder."""
        self.prepare(job_id, incarnation)
        return super().adopt(job_id, incarnation, earlier, path)

    def prepare(self, job_id: str, incarnation: int) -> None:
        """Create the folder of an incarnation, and the one for its checkpoints."""
        self._storage.make_incarnation(self._state_dir, self._name(job_id, incarnation))

    def discard(self, job_id: str, incarnation: int) -> None:
        """Delete everything except the checkpoints, here and on the nodes."""
        self._nodes.discard(self.folder(job_id, incarnation))
        if self._archive is not None:
            self._archive.remove(self.folder(job_id, incarnation))
        super().discard(job_id, incarnation)

    def _checkpoint(self, job_id: str, incarnation: int, path: str) -> Path:
        shared = self._storage.checkpoints_dir(self._name(job_id, incarnation))
        return super()._checkpoint(job_id, incarnation, path) if shared is None else shared / path

    def _name(self, job_id: str, incarnation: int) -> str:
        return str(self.folder(job_id, incarnation).relative_to(self._state_dir))


class _WithCheckpointsAtUrl(_ClusterFolders):
    """With the checkpoints in an object store.

    Which checkpoint counts, workers are told by their session file, so that nothing in the loop of the service waits
    for the store.
    """

    def checkpoint(self, job_id: str, incarnation: int, path: str) -> str:
        """Return the URL of a checkpoint."""
        return f"{self._url(job_id, incarnation)}/{path}"

    def checkpoints_url(self, job_id: str, incarnation: int) -> str | None:
        """Return the URL below which an incarnation's checkpoints are."""
        return self._url(job_id, incarnation)

    def candidates(self, job_id: str, incarnation: int, generation: int) -> list[str]:
        """List the checkpoints that have a manifest."""
        names = self._store(job_id, incarnation).candidates()
        return [name for name in names if CANDIDATE_PATH.match(name) and name.startswith(f"g{generation:06d}/")]

    def verify(self, job_id: str, incarnation: int, path: str) -> str:
        """Check the manifest, and the sizes of the objects.

        Their contents are not downloaded: a store checks what it is sent. Whoever reads a checkpoint checks every byte.
        """
        return self._store(job_id, incarnation).look_at(_candidate(path)).digest

    def promote(self, job_id: str, incarnation: int, promotion: Promotion) -> bool:  # noqa: ARG002  (nothing is written)
        """Return False: workers are told by their session file."""
        return False

    def adopt(self, job_id: str, incarnation: int, earlier: int, path: str) -> CandidateInfo:
        """Copy the objects of a checkpoint, within the store."""
        source = self._store(job_id, earlier)
        return self._store(job_id, incarnation).adopt(source, _candidate(path), incarnation=incarnation)

    def delete(self, job_id: str, incarnation: int, path: str) -> None:
        """Delete the objects of a candidate."""
        self._store(job_id, incarnation).remove(_candidate(path))

    def _url(self, job_id: str, incarnation: int) -> str:
        url = self._storage.checkpoints_url(self._name(job_id, incarnation))
        assert url is not None
        return url

    def _store(self, job_id: str, incarnation: int) -> RemoteStore:
        return RemoteStore(self._url(job_id, incarnation))


def _candidate(path: str) -> str:
    if not CANDIDATE_PATH.match(path):
        raise ValueError(f"{path!r} is not the path of a candidate checkpoint")
    return path
