"""What it costs that machines come by Ray: until a machine that joins is used, and from a start to the first step.

    python benchmarks/bench_ray.py [--joins 3] [--starts 2] [--write]

The machines are network and PID namespaces of this one (needs root), each with a raylet; the head, without slots, is
beside the service. A join runs from `ray start`, and from the moment at which Ray knows the node, until the engine
offers it. A start is that of a job with one worker, cold (torch is imported), on the local engine and on the engine
over Ray, side by side in one call; it ends with the first step.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bench_nodes import SCRIPT, Job
from pydantic import SecretStr
from results import parser_of, show, table
from support.gang import install
from support.node_agents import TOKEN
from support.ray_machines import RayMachines

from elasticflow_airflow.engines.local import LocalEngine, detect_nodes
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.engines.ray.messages import AgentSettings, ClientSettings
from elasticflow_airflow.engines.ray.ray_engine import open_ray_engine
from elasticflow_airflow.scheduler_core.model.values import Slot

_KNOWN = """
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("ready", flush=True)
known = set()
while True:
    for node in ray.nodes():
        if node["Alive"] and node["NodeID"] not in known:
            known.add(node["NodeID"])
            print(node["NodeName"], time.time(), flush=True)
    time.sleep(0.05)
"""


def offered(engine: TorchrunEngine) -> set[str]:
    return {node.node_id for node in engine.inventory()}


def first_step_s(engine: TorchrunEngine, base: Path, name: str, slot: Slot) -> float:
    """Return the seconds from the order to the first step of a job with one worker."""
    job = Job(engine, base, name)
    begun_s = time.time()
    job.change(slot)
    took_s = job.next_step() - begun_s
    engine.stop(name, 1.0)
    job.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "it leaves")
    return took_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--joins", type=int, default=3)
    parser.add_argument("--starts", type=int, default=2)
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for folder in ("code", "shared", "locks"):
            (base / folder).mkdir()
        install(SCRIPT, base / "code")
        machines = RayMachines(2, own_folder=base / "locks")
        os.environ.update(machines.ray_env)
        watching = None
        try:
            machines.start_head()
            machines.start_node(0)
            agent = AgentSettings(
                token=SecretStr(TOKEN), folder=base, namespace="nodes", shared_dir=str(base / "shared"), reserved=True
            )
            client = ClientSettings(address=machines.address, slots=None, allow_insecure=False, agent=agent)
            engine = open_ray_engine(base / "state", client)
            watching = subprocess.Popen(
                [sys.executable, "-c", _KNOWN, machines.address], stdout=subprocess.PIPE, text=True, env=os.environ
            )
            assert watching.stdout is not None
            for line in watching.stdout:
                if line.startswith("node0"):
                    break

            joins: list[tuple[float, float]] = []
            for number in range(options.joins):
                begun_s = time.time()
                machines.start_node(1, f"join{number}")
                while f"join{number}" not in offered(engine):
                    time.sleep(0.02)
                used_s = time.time()
                known_s = next(float(line.split()[1]) for line in watching.stdout if line.startswith(f"join{number} "))
                joins.append((used_s - begun_s, used_s - known_s))
                machines.cut_power(1)
                while f"join{number}" in offered(engine):
                    time.sleep(0.1)
                machines.heal(1)

            (layout,) = detect_nodes(slots=1)
            local = LocalEngine(base / "local", [layout], base / "locks-local")
            starts: dict[str, list[float]] = {"local": [], "ray": []}
            for number in range(options.starts):
                starts["local"].append(first_step_s(local, base, f"local{number}", Slot(layout.node_id, 0)))
                starts["ray"].append(first_step_s(engine, base, f"ray{number}", Slot("node0", 0)))
            local.close()
            engine.close()
        finally:
            if watching is not None:
                watching.kill()
            machines.close()
    rows = [
        [f"from `ray start` until the node is used, {options.joins} joins", *spread([whole for whole, _ in joins])],
        ["from when Ray knows it until it is used", *spread([ours for _, ours in joins])],
        [f"start to first step, cold, local engine, {options.starts} starts", *spread(starts["local"])],
        ["the same on the engine over Ray", *spread(starts["ray"])],
    ]
    show("ray", table(["seconds", "median", "longest"], rows), options)


def spread(values: list[float]) -> list[str]:
    return [f"{statistics.median(values):.1f}", f"{max(values):.1f}"]


if __name__ == "__main__":
    main()
