"""``python -m …ray_client``: connects to a Ray cluster, keeps an actor on each node, and tells where the agents are.

A process of its own, since Ray may end a process whose head is gone. The first line of its standard input has its
settings, each other what Ray's autoscaler is to be told (``WantedNodes``), or nothing: the service is still there, and
leads. It leaves when that is closed, or nothing comes for a while: another service may lead then. Views
(``ClusterView``) go to standard output, one line each; Ray's words to standard error.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
from ray._private.state import GlobalState
from ray._raylet import GcsClient, GcsClientOptions  # type: ignore[attr-defined]
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elasticflow_airflow import __version__
from elasticflow_airflow.engines.ray.messages import ClientSettings, ClusterView, WantedNodes
from elasticflow_airflow.engines.ray.node_actor import START_LIMIT_S, NodeActor

LOOK_S = 1.0
SILENCE_S = 15.0
"""A service that has said nothing for so long stands still, or does not lead."""
_WAITING_S = 10.0
"""An actor that has not begun for so long waits for resources that others hold."""
_AGAIN_S = 5.0
_KNOCK_LIMIT_S = 5.0
_WHY_LIMIT_S = 20.0
_CALL_LIMIT_S = START_LIMIT_S + 30.0


@dataclass(slots=True)
class _Node:
    """A node of Ray, and what was asked of its actor last."""

    name: str
    slots: int
    has_gpus: bool
    actor: Any = None
    asked: Any = None
    """The answer that is to come."""
    asked_s: float = 0.0
    again_s: float = 0.0
    url: str | None = None
    problem: str | None = None
    is_checked: bool = False
    """Its actor runs this version."""


class RayClient:
    """Keeps the actors; :meth:`look` once a second."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._nodes: dict[str, _Node] = {}
        """By Ray's id."""
        self._heard: dict[str, float] = {}
        self.wanted: WantedNodes | None = None
        """None: the autoscaler is told nothing."""
        self._told: list[dict[str, int]] | None = None
        """What the autoscaler was asked for last: the resources of each node."""
        # Ray tells of draining nodes nowhere else; through its client server (ray://) it tells nothing of its state.
        self._state = GlobalState()  # type: ignore[no-untyped-call]
        self._state._initialize_global_state(
            GcsClientOptions.create(
                ray.get_runtime_context().gcs_address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True
            )
        )

    def look(self) -> ClusterView:
        """Return what is there now. Raises what Ray raises when the cluster cannot be asked."""
        alive = {str(node["NodeID"]): node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        wanted = self.wanted
        problems = self._choose(alive, frozenset() if wanted is None else wanted.released)
        if wanted is not None:
            self._tell_autoscaler(wanted)
        for ray_id, node in self._nodes.items():
            self._ask(ray_id, node)
        if not self._nodes and not problems:
            problems = ["no node of the Ray cluster has GPUs or CPUs: start one with `ray start --address=...`"]
        problems += [f"node {node.name}: {node.problem}" for node in self._nodes.values() if node.problem]
        return ClusterView(
            nodes={node.name: node.url for node in self._nodes.values() if node.url},
            problems=sorted(problems),
            draining={self._nodes[ray_id].name: at for ray_id, at in self._leaving().items() if ray_id in self._nodes},
        )

    def _leaving(self) -> dict[str, float]:
        """Return by Ray's id when draining nodes go away; those of which it is not known, when it was heard of."""
        now_ms = time.time() * 1000
        at_ms = {ray_id: until_ms or now_ms for ray_id, until_ms in self._state.get_draining_nodes().items()}
        self._heard = {ray_id: self._heard.get(ray_id, at / 1000) for ray_id, at in at_ms.items()}
        return self._heard

    def _tell_autoscaler(self, wanted: WantedNodes) -> None:
        """Have Ray's autoscaler keep as many nodes, like those of which there are most."""
        shapes = Counter((node.has_gpus, node.slots) for node in self._nodes.values())
        if not shapes:
            return
        ((has_gpus, slots), _), *_ = shapes.most_common(1)
        asked = [{"GPU" if has_gpus else "CPU": slots}] * wanted.count
        if self._told != asked:
            request_resources(bundles=asked)
            self._told = asked

    def _release(self, ray_id: str) -> None:
        """End the actor of a node, which holds all that makes the node busy in Ray."""
        with suppress(ValueError):  # There is none any more.
            ray.kill(ray.get_actor(_actor_name(ray_id), self._settings.agent.namespace))
        self._nodes.pop(ray_id, None)

    def _choose(self, alive: dict[str, dict[str, Any]], released: frozenset[str]) -> list[str]:
        """Note which nodes are ours to use; return why others are not."""
        for ray_id in self._nodes.keys() - alive.keys():
            del self._nodes[ray_id]
        for ray_id in [ray_id for ray_id, node in alive.items() if _name_of(node) in released]:
            self._release(ray_id)
            del alive[ray_id]
        problems = []
        has_gpus = any(node["Resources"].get("GPU", 0) >= 1 for node in alive.values())
        by_name = defaultdict(list)
        for ray_id, node in alive.items():
            by_name[_name_of(node)].append(ray_id)
        for name, ray_ids in by_name.items():
            first, *others = sorted(ray_ids, key=lambda ray_id: (ray_id not in self._nodes, ray_id))
            if others:
                addresses = ", ".join(sorted(str(alive[ray_id]["NodeManagerAddress"]) for ray_id in ray_ids))
                problems.append(
                    f"{len(ray_ids)} nodes of Ray are named {name} (at {addresses}): one is used; start the others with"
                    " `ray start --node-name`, each with a name of its own"
                )
            found = int(alive[first]["Resources"].get("GPU" if has_gpus else "CPU", 0))
            slots = found if self._settings.slots is None else self._settings.slots
            if found and slots > found:
                kind = "GPUs" if has_gpus else "CPUs"
                problems.append(f"node {name}: {slots} slots are configured, and it has {found} {kind}: it is not used")
                self._nodes.pop(first, None)
            elif found and first not in self._nodes:
                self._nodes[first] = _Node(name, slots, has_gpus)
        return problems

    def _ask(self, ray_id: str, node: _Node) -> None:
        """Take the actor's last answer, if it has come, and ask again."""
        now_s = time.monotonic()
        if node.asked is not None:
            done, _ = ray.wait([node.asked], timeout=0)
            if done:
                answer, node.asked = node.asked, None
                self._take(node, answer)
            elif node.url is None and now_s - node.asked_s > _WAITING_S:
                kind = "GPUs" if node.has_gpus else "CPUs"
                node.problem = f"its {node.slots} {kind} are not free in Ray, or its actor does not start there"
            elif now_s - node.asked_s > _CALL_LIMIT_S:
                node.actor = node.asked = None
        if node.asked is None and now_s >= node.again_s:
            node.asked_s, node.again_s = now_s, now_s + LOOK_S / 2
            try:
                node.actor = node.actor or self._actor(ray_id, node)
                node.asked = self._question(node)
            except (ray.exceptions.RayError, ValueError) as error:
                self._give_up(node, error)

    def _actor(self, ray_id: str, node: _Node) -> Any:
        """Return the node's actor; it may have been there before this process."""
        node.is_checked = False
        options: dict[str, Any] = {"num_gpus": node.slots} if node.has_gpus else {"num_cpus": node.slots}
        return (
            ray.remote(NodeActor)
            .options(
                name=_actor_name(ray_id),
                namespace=self._settings.agent.namespace,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(ray_id, soft=False),
                **{"num_cpus": 0, **options},
            )
            .remote()
        )

    def _question(self, node: _Node) -> Any:
        if not node.is_checked:
            return node.actor.version.remote()
        settings = self._settings.agent.model_copy(update={"node_id": node.name, "slots": node.slots})
        # As an argument of a call it goes straight to the actor; those of its creation would be stored by Ray.
        return node.actor.ensure_agent.remote(settings.model_dump_json())

    def _take(self, node: _Node, answer: Any) -> None:
        try:
            said = str(ray.get(answer))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            node.problem, node.again_s = f"{cause}", time.monotonic() + _AGAIN_S
        except ray.exceptions.RayError as error:
            self._give_up(node, error)
        else:
            if node.is_checked:
                node.url, node.problem = said, None
            elif said == __version__:
                node.is_checked = True
            else:
                # It is of the version that was installed there when it began. The next one may be newer.
                ray.kill(node.actor)
                self._give_up(
                    node, f"elasticflow-airflow {said} runs there, and {__version__} here: install one of both"
                )

    @staticmethod
    def _give_up(node: _Node, why: object) -> None:
        node.actor = node.asked = None
        node.problem = str(why).strip().splitlines()[0] if str(why).strip() else type(why).__name__
        node.again_s = time.monotonic() + (_AGAIN_S if node.url is None else LOOK_S)


def _actor_name(ray_id: str) -> str:
    return f"elasticflow-node-{ray_id}"


def _name_of(node: dict[str, Any]) -> str:
    """Return the name given with ``--node-name``, else the host's; Ray's id changes with each start of a raylet."""
    given, host = str(node["NodeName"]), str(node["NodeManagerHostname"])
    return host if given == node["NodeManagerAddress"] else given


def lets_everybody_in(gcs_address: str) -> bool:
    """Return whether the cluster answers without a token."""
    asked = subprocess.run(
        [sys.executable, "-c", _ASK_FREELY, gcs_address],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=60,
    )
    return asked.returncode == 0


_ASK_FREELY = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_get(b"elasticflow", None, timeout=5)
"""


def _knock(address: str) -> None:
    """Raise OSError when nobody listens there: Ray itself takes a minute to say so."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_LIMIT_S).close()


def connect(settings: ClientSettings) -> str | None:
    """Connect; return why the cluster must not be used, if so. Raises OSError, and what Ray raises."""
    _knock(settings.address)
    ray.init(
        address=settings.address,
        namespace=settings.agent.namespace,
        log_to_driver=False,
        logging_level=logging.WARNING,
        configure_logging=True,
    )
    if settings.allow_insecure or not lets_everybody_in(ray.get_runtime_context().gcs_address):
        return None
    return (
        "the Ray cluster lets everybody in who reaches it, to run any code: start it with RAY_AUTH_MODE=token"
        " (`ray get-auth-token --generate`), or set ELASTICFLOW_RAY_ALLOW_INSECURE=true if its network is closed"
    )


def _reason(error: BaseException, address: str) -> str:
    """Return what went wrong first, where Ray says it: it tells a refused token as a lost connection."""
    said: list[str] = []
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ray.exceptions.AuthenticationError):
            return str(found)
        said += [str(found)] if str(found) and str(found) not in said else []
        found = found.__cause__ or found.__context__
    # As Ray raises it. What a knock at a closed port raises is of a kind of its own, and says enough.
    if type(error) is ConnectionError and ":" in address and not address.startswith("ray://"):
        try:
            GcsClient(address=address).internal_kv_get(b"elasticflow", None, timeout=_WHY_LIMIT_S)
        except ray.exceptions.AuthenticationError as refused:
            return str(refused)
        except Exception as unclear:  # noqa: BLE001  (asked only to explain another error, and told beside it)
            said.append(str(unclear))
    return ": ".join(said) or type(error).__name__


def main() -> int:
    """Run until the service is gone, or Ray is; return the exit status."""
    settings = ClientSettings.model_validate_json(sys.stdin.buffer.readline())
    views = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints what it likes.
    service = Listener()
    threading.Thread(target=service.listen, args=(sys.stdin.buffer,), name="service", daemon=True).start()

    def tell(view: ClusterView) -> None:
        views.write(view.model_dump_json() + "\n")

    try:
        refused = connect(settings)
    except Exception as error:  # noqa: BLE001  (Ray raises errors of many kinds; whatever it is, people need to hear it)
        why = " ".join(_reason(error, settings.address).split())[:500]
        tell(ClusterView(is_usable=False, problems=[f"Ray at {settings.address} cannot be used: {why}"]))
        return 1
    if refused is not None:
        tell(ClusterView(is_usable=False, problems=[refused]))
        return 1
    client, last = RayClient(settings), None
    while not service.is_silent:
        client.wanted = service.wanted or client.wanted
        view = client.look()
        if view != last:
            tell(view)
            last = view
        time.sleep(LOOK_S)
    sys.stderr.write(f"the service has said nothing for {SILENCE_S:g} s: it stands still, or another one leads\n")
    return 0


class Listener:
    """What the service says: ``wanted`` is the last, None before it has said anything."""

    def __init__(self) -> None:
        self.wanted: WantedNodes | None = None
        self._heard_s = time.monotonic()

    @property
    def is_silent(self) -> bool:
        """Whether the service has said nothing for too long."""
        return time.monotonic() - self._heard_s > SILENCE_S

    def listen(self, lines: Iterable[bytes], leave: Callable[[int], object] = os._exit) -> None:
        """Take what the service says, and end with it."""
        for line in lines:
            self._heard_s = time.monotonic()
            if line.strip():
                self.wanted = WantedNodes.model_validate_json(line)
        leave(0)


if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001  (whatever Ray raises when its head is gone: the service starts another client)
        traceback.print_exc()
        status = 1
    os._exit(status)  # At an ordinary end Python would wait for the thread that reads the standard input.
