"""Messages between the service and a node agent (HTTP, JSON)."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from pydantic import BaseModel, ConfigDict

from elasticflow_airflow.engines.local.node_facts import NodeFacts

VERSION = 1
"""Version of these messages; both sides must have the same."""


class Message(BaseModel):
    """A message. Unknown fields are refused: both sides have the same version."""

    model_config = ConfigDict(extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class SupervisorState(StrEnum):
    """What the machine knows of a supervisor that has not written its final status."""

    COMING = "coming"
    """Started; it has not written a status yet."""
    ALIVE = "alive"
    DYING = "dying"
    """The supervisor is dead, and processes of its workers were still there."""
    DEAD = "dead"
    """It is not running, nor are its workers."""

    @property
    def is_running(self) -> bool:
        """Whether the supervisor's process is there, or being started."""
        return self in (SupervisorState.COMING, SupervisorState.ALIVE)


class Introduction(Message):
    """What an agent says about itself when the service connects."""

    version: int
    instance: str
    """Changes whenever the agent starts: what it was sent before may be lost."""
    machine_id: str
    epoch: int
    """The highest that it has seen."""
    now_s: float
    shared_dir: str
    facts: NodeFacts
    torch: str | None = None
    """Version of torch in the agent's environment; None when it has none, or does not say."""


def introduction_of(raw: Mapping[str, Any]) -> Introduction:
    """Check and read an introduction. Raises ValueError when the agent is of another version."""
    if raw.get("version") != VERSION:
        raise ValueError(
            f"its agent speaks version {raw.get('version')} of the messages, this service {VERSION}: install the"
            " same version of this package on both sides"
        )
    return Introduction.model_validate(raw)


class Probe(Message):
    """A request to read ``<name>`` in the shared folder, and to write ``<name>.<instance>`` there."""

    name: str
    content: str


class FilePart(Message):
    """A file, or with ``offset`` a part of one that grows. ``path`` is relative to the state directory."""

    path: str
    data: bytes
    offset: int | None = None


class SupervisorStart(Message):
    """A supervisor to start, by its folder. ``sealed_env`` holds the job's secrets (see :class:`Seal`)."""

    path: str
    sealed_env: str


class Push(Message):
    """What a node is to have. Lower epochs, and lower numbers within one, are refused once a higher one was seen."""

    epoch: int
    number: int
    files: list[FilePart] = []
    renewed: list[str] = []
    """Folders of supervisors whose lease is renewed."""
    starts: list[SupervisorStart] = []
    renewed_jobs: list[str] = []
    """Jobs of which nothing but the id is known: all their supervisors' leases are renewed."""
    leaving_jobs: list[str] = []
    """Such jobs whose supervisors shall save and leave."""
    discarded: list[str] = []
    """Incarnations whose files are no longer needed, except their checkpoints."""


class PushAnswer(Message):
    """What was not done, by path: ``refused`` of files, leases and deletions, ``failures`` of starts, with the reason.

    ``lacking``: by supervisor, the folder with its code, to be sent first. ``waiting``: those to be asked for again.
    """

    instance: str
    refused: dict[str, str] = {}
    failures: dict[str, str] = {}
    lacking: dict[str, str] = {}
    waiting: list[str] = []


class Pull(Message):
    """A request for what has changed since ``version`` (0: everything); answered at once, or after ``wait_s``.

    ``sizes``: how much the service has of growing files, for those in the last answer.
    """

    epoch: int
    version: int
    sizes: dict[str, int] = {}
    wait_s: float = 0.0


class PullAnswer(Message):
    """What has changed. To be applied in order: files, then states.

    ``supervisors``: every supervisor without a final status, by folder. ``holders``: by node, each slot's holder.
    """

    instance: str
    version: int
    now_s: float
    files: list[FilePart] = []
    supervisors: dict[str, SupervisorState] = {}
    holders: dict[str, list[dict[str, Any] | None]] = {}
    leaving_at: float | None = None
    """When the machine goes away, by its clock (UTC seconds), if that was announced."""


class Recall(Message):
    """A request of a service that leads from now on: what the node has of the incarnations after this one, by name."""

    epoch: int
    after: str = ""


class RecallAnswer(Message):
    """What the node has (see ``recall.py``), up to the incarnation ``last``; None: there is no more.

    ``copies``: what workers of other nodes have said, as far as it was sent here. ``ended``: incarnations that have
    ended lately. They are told of by pulling, as is everything that changes after ``version``.
    """

    instance: str
    version: int
    ended: list[str] = []
    files: list[FilePart] = []
    copies: list[FilePart] = []
    last: str | None = None


class StacksRequest(Message):
    """``trainers``: by worker id, the process (pid, start, boot; None before it starts) and the file for the stacks."""

    trainers: dict[str, tuple[dict[str, Any] | None, str]]


class EnvironmentRequest(Message):
    """Packages that are to be there beside those of ``python`` (None: the agent's own interpreter)."""

    python: str | None
    requirements: tuple[str, ...]


class EnvironmentAnswer(Message):
    """Whether the environment is there; ``failure``: why it could not be built."""

    ready: bool = False
    failure: str | None = None


class Seal:
    """Encrypts what must not be read on the way, with a key derived from the token that both sides have."""

    def __init__(self, token: str) -> None:
        key = hashlib.sha256(b"elasticflow node secrets\0" + token.encode()).digest()
        self._fernet = Fernet(base64.urlsafe_b64encode(key))

    def close(self, env: Mapping[str, str]) -> str:
        """Encrypt environment variables."""
        return self._fernet.encrypt(json.dumps(dict(env)).encode()).decode()

    def open(self, sealed: str) -> dict[str, str]:
        """Decrypt them. Raises ValueError when another token was used."""
        try:
            found: dict[str, str] = json.loads(self._fernet.decrypt(sealed.encode()))
        except InvalidToken:
            raise ValueError("the secrets were sealed with another token") from None
        return found
