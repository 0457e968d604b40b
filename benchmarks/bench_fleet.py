"""What it adds to use a cluster as it is: several types of GPU, and nodes of any number and size.

    python benchmarks/bench_fleet.py [--seeds 5] [--write]

Each cluster beside itself as a scheduler without the improvement would take it, on the same jobs: one that knows of no
types plans with the speed of the slowest; one that counts in powers of two leaves the slots beyond the largest power of
two of each node, and the nodes beyond the largest power of two of them, alone. First come, decided at arrival,
deadlines jittered as in ``bench_ablation.py``. Needs ../shared/data beside the checkout.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from bench_ablation import JITTER, PAUSE_S
from bench_policies import DATA
from bench_types import MIXED, mixed_policy
from results import parser_of, show, table

from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import common_jobs, mixed_cluster
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, prepare
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob, Simulation

SMALL_MIXED = (("a100", 2, 8), ("t4", 2, 4))
TYPED_TRACES = ("195job", "cluster10", "poisson_100job")
FLEETS = {
    "12 x 8": [8] * 12,
    "16 x 6": [6] * 16,
    "6 x 8, 5 x 6, 3 x 3": [8] * 6 + [6] * 5 + [3] * 3,
}


def met(policy: str, nodes: tuple[Node, ...], jobs: list[SimulatedJob]) -> float:
    """Deadlines met. Raises RuntimeError where an admitted job was late: then the comparison is void."""
    found = Simulation(name=policy, policy=mixed_policy(policy, nodes), nodes=nodes, jobs=jobs).run().summary()
    if found["late_though_admitted"]:
        raise RuntimeError(f"{policy}: {found['late_though_admitted']} jobs late though admitted")
    return float(found["met"])


def row(name: str, runs: Sequence[tuple[float, float]]) -> list[str]:
    """A cluster as it is, and without; the difference seed by seed."""
    gains = [with_it - without for with_it, without in runs]
    both = [f"{mean(side):.1f}" for side in zip(*runs, strict=True)]
    return [name, *both, f"{mean(gains):+.1f} ({min(gains):+.0f} to {max(gains):+.0f})"]


def types(seeds: int) -> list[list[str]]:
    """Typed speeds, and the slowest type's for all."""
    tables = {name: read_curves(DATA / "throughput" / name) for name, _, _ in MIXED}
    rows = []
    for fleet in (MIXED, SMALL_MIXED):
        nodes = mixed_cluster(fleet)
        label = " with ".join(f"{count} x {each} {kind.upper()}" for kind, count, each in fleet)
        for name in TYPED_TRACES:
            trace, curves = common_jobs(read_trace(DATA / "traces" / f"{name}.csv"), tables)
            runs = []
            for seed in range(seeds):
                conditions = Conditions(pause_s=PAUSE_S, deadline_jitter=JITTER, seed=seed)
                jobs = prepare(trace, {}, nodes, conditions, curves)
                runs.append((met("elasticflow+types", nodes, jobs), met("elasticflow", nodes, jobs)))
            rows.append(row(f"{name}, {label}", runs))
    return rows


def sizes(seeds: int) -> list[list[str]]:
    """Nodes as they are, and what is left of them in powers of two."""
    trace, curves = read_trace(DATA / "traces" / "195job.csv"), read_curves(DATA / "throughput" / "a100")
    rows = []
    for label, slots in FLEETS.items():
        largest = sorted(slots, reverse=True)[: floor_power_of_two(len(slots))]
        runs = []
        for seed in range(seeds):
            conditions = Conditions(pause_s=PAUSE_S, deadline_jitter=JITTER, seed=seed)
            both = []
            for used in (slots, [floor_power_of_two(size) for size in largest]):
                nodes = tuple(Node(node_id=f"n{number:02}", slots=size) for number, size in enumerate(used))
                both.append(met("elasticflow", nodes, prepare(trace, curves, nodes, conditions)))
            runs.append((both[0], both[1]))
        rows.append(row(f"195job, {label}", runs))
    return rows


def floor_power_of_two(number: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (number.bit_length() - 1)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"skipped: needs the data folder {DATA} beside the checkout")
        return
    typed = table(["types, met", "known", "unknown", "adds"], types(args.seeds))
    sized = table(["nodes, met", "as they are", "powers of two", "adds"], sizes(args.seeds))
    show("fleet", [f"Means of {args.seeds} seeds:", "", *typed, "", *sized], args)


if __name__ == "__main__":
    main()
