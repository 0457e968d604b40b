"""The checkpoints of a cluster's jobs: the same in a folder that all share and at a URL."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.object_store import bucket, s3_server

from elasticflow_airflow.engines.cluster.job_files import cluster_files
from elasticflow_airflow.engines.cluster.shared_storage import SharedStorage, open_shared_storage
from elasticflow_airflow.engines.job_files import JobFolders
from elasticflow_airflow.runtime.checkpoints.writer import FilePlan, Order, write_checkpoint
from elasticflow_airflow.runtime.protocol import Promotion, SessionConfig, session_path
from elasticflow_airflow.runtime.stores.file_format import Blob
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError, CheckpointUnreachable
from elasticflow_airflow.runtime.stores.open_store import open_store

pytest.importorskip("fsspec", reason="needs fsspec")


@dataclass
class Nodes:
    """Stands for the agents of the nodes, which delete their own copies."""

    discarded: list[Path] = field(default_factory=list)

    def discard(self, folder: Path) -> None:
        self.discarded.append(folder)


@dataclass
class Cluster:
    storage: SharedStorage
    files: JobFolders
    nodes: Nodes

    def write(self, step: int, incarnation: int = 1, generation: int = 1) -> CandidateInfo:
        """Write a checkpoint as a worker on some node does."""
        url = self.files.checkpoints_url("job", incarnation)
        where = url or self.files.folder("job", incarnation) / "checkpoints"
        blob = Blob((0,), "uint8", (4,), memoryview(step.to_bytes(4, "big")))
        plan = FilePlan("model", {"step": step}, [blob])
        info = write_checkpoint(
            open_store(where), [plan], Order(incarnation=incarnation, generation=generation, step=step)
        )
        assert info is not None
        return info


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["folder", "file", pytest.param("s3", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    where = {"folder": f"{tmp_path}/shared", "file": f"file://{tmp_path}/shared"}.get(request.param)
    if where is None:
        where = bucket(request.getfixturevalue("server"), monkeypatch, uuid.uuid4().hex)
    storage, nodes = open_shared_storage(where), Nodes()
    files = cluster_files(tmp_path / "state", storage, nodes)
    files.prepare("job", 1)
    return Cluster(storage, files, nodes)


def test_checkpoints_are_found_checked_and_deleted(cluster: Cluster) -> None:
    files = cluster.files
    assert files.candidates("job", 1, 1) == []
    infos = [cluster.write(step) for step in (5, 10)]
    cluster.write(20, generation=2)
    names = files.candidates("job", 1, 1)
    assert names == [info.name for info in infos]
    assert [files.verify("job", 1, name) for name in names] == [info.digest for info in infos]
    for _ in range(2):  # Idempotent.
        files.delete("job", 1, names[0])
    assert files.candidates("job", 1, 1) == names[1:]
    with pytest.raises(CheckpointError, match="missing"):
        files.verify("job", 1, names[0])
    for wrong in ("../../x", "g000001", "g000001/step-000000000005/.."):
        with pytest.raises(ValueError, match="not the path of a candidate"):
            files.delete("job", 1, wrong)


def test_a_checkpoint_of_which_a_file_is_torn_or_gone_is_damaged(cluster: Cluster) -> None:
    for step, damage in ((5, "torn"), (10, "gone")):
        name = cluster.write(step).name
        url = cluster.files.checkpoints_url("job", 1)
        if url is None or url.startswith("file://"):
            path = Path(cluster.files.checkpoint("job", 1, name).removeprefix("file://")) / "model.tensors"
            path.write_bytes(b"torn") if damage == "torn" else path.unlink()
        else:
            store = open_store(url)
            store.delete_file(f"{name}/model.tensors")
            if damage == "torn":
                store.replace(f"{name}/model.tensors", b"torn")
        with pytest.raises(CheckpointError, match=r"bytes, not|missing") as raised:
            cluster.files.verify("job", 1, name)
        assert not isinstance(raised.value, CheckpointUnreachable)


def test_the_next_incarnation_starts_from_a_copy(cluster: Cluster) -> None:
    info = cluster.write(10)
    cluster.files.prepare("job", 2)
    for _ in range(2):  # Idempotent.
        copy = cluster.files.adopt("job", 2, 1, info.name)
        assert (copy.incarnation, copy.generation, copy.step) == (2, 0, 10)
    assert cluster.files.candidates("job", 2, 0) == [copy.name]
    where = cluster.files.checkpoints_url("job", 2) or cluster.files.folder("job", 2) / "checkpoints"
    known = Promotion(path=copy.name, generation=0, step=10, digest=copy.digest)
    with open_store(where).promoted(pytest.fail, known) as found:
        assert found is not None
        assert (found.digest, found.incarnation) == (copy.digest, 2)
    with pytest.raises(CheckpointError, match="missing"):
        cluster.files.adopt("job", 2, 1, "g000001/step-000000000099")


def test_all_but_the_checkpoints_is_discarded(cluster: Cluster) -> None:
    info = cluster.write(10)
    folder = cluster.files.folder("job", 1)
    (folder / "session.json").touch()
    cluster.files.discard("job", 1)
    assert cluster.nodes.discarded == [folder]
    assert set(os.listdir(folder)) <= {"checkpoints"}
    assert cluster.files.verify("job", 1, info.name) == info.digest


def test_a_session_names_a_url_only_where_there_is_one(cluster: Cluster) -> None:
    """Workers that run on the version before know no such field."""
    url = cluster.files.checkpoints_url("job", 1)
    folder = cluster.files.folder("job", 1)
    config = SessionConfig(
        job_id="job", incarnation=1, incarnation_dir=str(folder), code_dir=str(folder), checkpoints_url=url
    )
    config.write()
    assert ("checkpoints_url" in json.loads(session_path(folder).read_text())) == (url is not None)
    assert SessionConfig.read(session_path(folder)).checkpoints == (url or folder / "checkpoints")


def test_what_workers_and_users_are_told(cluster: Cluster, tmp_path: Path) -> None:
    name = "g000001/step-000000000005"
    path = cluster.files.checkpoint("job", 1, name)
    url = cluster.files.checkpoints_url("job", 1)
    if url is None:
        assert path == str(tmp_path / "shared" / "jobs" / "job" / "i000001" / "checkpoints" / name)
        assert not cluster.files.is_checkpoint(path)
        assert cluster.files.is_checkpoint(f"s3://bucket/{name}")  # as far as anybody knows
    else:
        assert path == f"{cluster.storage.where}/jobs/job/i000001/checkpoints/{name}"
        assert cluster.files.is_checkpoint(path)  # as far as anybody knows
        promotion = Promotion(path=name, generation=1, step=5, digest="d")
        assert not cluster.files.promote("job", 1, promotion)
