"""A provider of machines for Ray's autoscaler: the test starts and ends them (``RayMachines``) as it is told here.

Ray's head imports this module (``provider: {type: external}``). A file for each machine that there should be, in a
folder that head and test share, holds its tags.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

_HEAD = "head"
_COMMANDS = (
    *("cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands"),
    *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
)


class FileProvider(NodeProvider):
    """``provider_config``: ``folder``, and ``addresses`` of the machines that can be had; ``head`` is always there."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self._folder, self._addresses = Path(provider_config["folder"]), provider_config["addresses"]

    @staticmethod
    def config(folder: Path, head: str, addresses: list[str], least: int) -> dict[str, Any]:
        """Return the configuration of an autoscaler over machines with a CPU each, of which it keeps ``least``."""
        worker = {"resources": {"CPU": 1}, "node_config": {}, "min_workers": least, "max_workers": len(addresses)}
        return {
            "cluster_name": "tests",
            "max_workers": len(addresses),
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",
                "module": "support.ray_provider.FileProvider",
                "disable_node_updaters": True,
                "folder": str(folder),
                "head": head,
                "addresses": addresses,
            },
            "available_node_types": {
                "head": {"resources": {}, "node_config": {}, "max_workers": 0},
                "worker": worker,
            },
            "head_node_type": "head",
            # What `ray up` would fill in.
            "upscaling_speed": 1.0,
            **{part: {} for part in ("auth", "docker", "file_mounts")},
            **{part: [] for part in _COMMANDS},
        }

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        """Return the machines with these tags."""
        there = [_HEAD, *sorted(path.stem for path in self._folder.glob("*.json"))]
        return [node for node in there if tag_filters.items() <= self.node_tags(node).items()]

    def is_running(self, node_id: str) -> bool:
        """Return whether a machine is there."""
        return node_id == _HEAD or (self._folder / f"{node_id}.json").exists()

    def is_terminated(self, node_id: str) -> bool:
        """Return whether it is not."""
        return not self.is_running(node_id)

    def node_tags(self, node_id: str) -> dict[str, str]:
        """Return its tags."""
        if node_id == _HEAD:
            return {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: "head"}
        found: dict[str, str] = json.loads((self._folder / f"{node_id}.json").read_text())
        return found

    def internal_ip(self, node_id: str) -> str:
        """Return its address."""
        return str(self.provider_config["head"] if node_id == _HEAD else self._addresses[int(node_id)])

    def external_ip(self, node_id: str) -> str:
        """Return its address."""
        return self.internal_ip(node_id)

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
        """Have machines started, as far as there are any."""
        free = [index for index in range(len(self._addresses)) if not self.is_running(str(index))]
        for index in free[:count]:
            self._write(str(index), tags)

    def set_node_tags(self, node_id: str, tags: dict[str, str]) -> None:
        """Add tags."""
        if node_id != _HEAD:
            self._write(node_id, {**self.node_tags(node_id), **tags})

    def terminate_node(self, node_id: str) -> None:
        """Have a machine ended."""
        (self._folder / f"{node_id}.json").unlink(missing_ok=True)

    def _write(self, node_id: str, tags: dict[str, str]) -> None:
        new = self._folder / f"{node_id}.new"
        new.write_text(json.dumps(tags))
        new.rename(self._folder / f"{node_id}.json")
