"""Where the checkpoints of a cluster's jobs are: in a folder that service and nodes share, or at a URL."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Protocol

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.runtime.protocol import write_atomic
from elasticflow_airflow.runtime.stores.manifest import CheckpointError
from elasticflow_airflow.runtime.stores.remote import RemoteStore
from elasticflow_airflow.runtime.stores.store import is_in_process, is_remote

_PROBE = ".elasticflow-probe-"


class SharedStorage(Protocol):
    """A place for files that the service and all nodes reach. Its methods raise OSError."""

    where: str

    def write(self, name: str, text: str) -> None:
        """Write a small file."""
        ...

    def read(self, name: str) -> str | None:
        """Return the content of a small file; None if there is none."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder; none when it does not exist."""
        ...

    def write_file(self, name: str, data: bytes) -> None:
        """Replace a file, in a folder that need not exist; readers see the old or the new content."""
        ...

    def read_file(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        ...

    def make_incarnation(self, root: Path, incarnation: str) -> None:
        """Create the folder of an incarnation below ``root``, and the way from it to its checkpoints. Idempotent."""
        ...

    def has(self, incarnation: str) -> bool:
        """Return whether an incarnation has had checkpoints here; False where only a request would tell."""
        ...

    def checkpoints_dir(self, incarnation: str) -> Path | None:
        """Return the folder of its checkpoints; None where they are at a URL."""
        ...

    def checkpoints_url(self, incarnation: str) -> str | None:
        """Return where workers find the checkpoints of an incarnation; None: below its folder."""
        ...


def open_shared_storage(where: Path | str) -> SharedStorage:
    """Open a folder or an fsspec URL. Raises OSError with the reason when it cannot be used."""
    if not is_remote(where):
        return _SharedFolder(Path(where))
    if is_in_process(where):
        raise OSError(f"{where} exists in one process only: give a folder or a URL that all machines reach")
    return _SharedUrl(str(where))


class _SharedFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.where = str(self._folder)

    def write(self, name: str, text: str) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / name).write_text(text)

    def read(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / name).read_text()
        return None

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._folder / folder))
        except FileNotFoundError:
            return []

    def write_file(self, name: str, data: bytes) -> None:
        write_atomic(self._folder / name, data)

    def read_file(self, name: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / name).read_bytes()
        return None

    def has(self, incarnation: str) -> bool:
        return (self._folder / incarnation).exists()

    def checkpoints_dir(self, incarnation: str) -> Path:
        return self._folder / incarnation / "checkpoints"

    def make_incarnation(self, root: Path, incarnation: str) -> None:
        if (root / incarnation / "checkpoints").exists():
            return
        shared = self.checkpoints_dir(incarnation)
        shared.mkdir(mode=0o700, parents=True, exist_ok=True)
        job_folder.make_incarnation(root, incarnation, checkpoints=shared)

    def checkpoints_url(self, incarnation: str) -> str | None:  # noqa: ARG002  (there is none)
        return None


class _SharedUrl:
    def __init__(self, url: str) -> None:
        self.where = url.rstrip("/")
        with _as_oserror():
            self._store = RemoteStore(self.where)

    def write(self, name: str, text: str) -> None:
        with _as_oserror():
            self._store.replace(name, text.encode())

    def read(self, name: str) -> str | None:
        with _as_oserror():
            raw = self._store.read(name)
            return None if raw is None else raw.decode()

    def remove(self, name: str) -> None:
        with _as_oserror():
            self._store.delete_file(name)

    def names(self, folder: str) -> list[str]:
        with _as_oserror():
            return self._store.names(folder)

    def write_file(self, name: str, data: bytes) -> None:
        with _as_oserror():
            self._store.replace(name, data)

    def read_file(self, name: str) -> bytes | None:
        with _as_oserror():
            return self._store.read(name)

    def has(self, incarnation: str) -> bool:  # noqa: ARG002
        return False

    def checkpoints_dir(self, incarnation: str) -> None:  # noqa: ARG002
        return None

    def make_incarnation(self, root: Path, incarnation: str) -> None:
        job_folder.make_incarnation(root, incarnation, checkpoints=None)

    def checkpoints_url(self, incarnation: str) -> str | None:
        return f"{self.where}/{incarnation}/checkpoints"


@contextmanager
def _as_oserror() -> Iterator[None]:
    """Convert the errors of any store: each has its own."""
    try:
        yield
    except OSError:
        raise
    except CheckpointError as error:
        raise OSError(str(error)) from error
    except Exception as error:
        raise OSError(repr(error)) from error


class StorageProbe:
    """Checks that the service and a node have the same storage, and that both can write there. Raises OSError."""

    def __init__(self, storage: SharedStorage) -> None:
        self._storage = storage
        self.name, self.content = f"{_PROBE}{secrets.token_hex(8)}", secrets.token_hex(8)
        storage.write(self.name, self.content)

    def check_answer(self, instance: str) -> None:
        """Check what an agent has written after it had read the probe. Raises ValueError when it is not here."""
        name = f"{self.name}.{instance}"
        if self._storage.read(name) is None:
            raise ValueError(
                f"what it writes to the shared storage does not arrive in {self._storage.where}: give all the same"
            )
        self._storage.remove(name)

    def close(self) -> None:
        """Remove the probe; it stays where the storage cannot be reached any more."""
        with contextlib.suppress(OSError):
            self._storage.remove(self.name)


def answer_probe(storage: SharedStorage, name: str, content: str, instance: str) -> None:
    """Read the service's probe and write beside it. Raises ValueError when the storage is another one, and OSError."""
    name = PurePath(name).name
    if storage.read(name) != content:
        raise ValueError(f"{storage.where} here is not the storage that the service has: give all machines the same")
    storage.write(f"{name}.{instance}", content)
