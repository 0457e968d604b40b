"""What the service, its Ray client and the node actors tell each other."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_serializer

from elasticflow_airflow import __version__


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AgentSettings(_Message):
    """How an agent is to be started on a node; the same for all nodes but for ``node_id`` and ``slots``."""

    token: SecretStr
    """Shared by the service and the agents."""
    folder: Path | None
    """On a local disk of the node; None: one in /var/tmp that belongs to who runs Ray there."""
    namespace: str
    """Of the service; each node has a folder of its own below ``folder/namespace``."""
    shared_dir: str
    """Folder or URL of the checkpoints."""
    port: int = 0
    reserved: bool = False
    """The nodes are ours alone: an agent and its workers outlive their actor."""
    warm_imports: tuple[str, ...] | None = None
    slot_lock_dir: Path | None = None
    notice_file: Path | None = None
    """Announces that the machine goes away (see ``elasticflow node --help``)."""
    owner: str = ""
    """The service that asks, for people: its host and folder."""
    node_id: str = ""
    slots: int = 0
    version: str = __version__

    @field_serializer("token", when_used="json")
    def _open(self, token: SecretStr) -> str:
        return token.get_secret_value()

    @property
    def fingerprint(self) -> str:
        """Tells whether an agent was started with the same settings, without showing the token."""
        settings = self.model_dump_json(exclude={"token", "owner"}).encode()
        return hmac.digest(self.token.get_secret_value().encode(), settings, hashlib.sha256).hex()


class ClientSettings(_Message):
    """What the Ray client needs to know; it reads it from its standard input."""

    address: str
    """Of the Ray cluster, as ``ray.init`` takes it."""
    slots: int | None
    """Slots to use on each node; None: all of its GPUs, or of its CPUs."""
    allow_insecure: bool
    """Use a cluster that lets everybody in."""
    agent: AgentSettings


class WantedNodes(_Message):
    """What Ray's autoscaler is to be told. One line of JSON on the client's standard input whenever it changes."""

    count: int = Field(ge=0)
    """Nodes that there should be, each with all the slots that we use on one."""
    released: frozenset[str] = frozenset()
    """By name, nodes that are not used any more, so that they are idle in Ray."""


class ClusterView(_Message):
    """What the Ray client sees. One line of JSON on its standard output whenever it changes."""

    nodes: dict[str, str] = Field(default_factory=dict)
    """By name, where the agents are."""
    is_usable: bool = True
    """False: the cluster cannot be reached, or must not be used; it is tried again."""
    problems: list[str] = Field(default_factory=list)
    """Why nodes, or the cluster, cannot be used; sentences for people."""
    draining: dict[str, float] = Field(default_factory=dict)
    """By name, the nodes that Ray takes away, and when (UTC seconds)."""
