"""Several types of GPU, jobs that share one, and batch sizes that a policy chooses: what no single table shows.

    python benchmarks/bench_types.py [--only lengths,...] [--write]

*Types*: those jobs of public traces whose model the tables of A100 and T4 both have, on 8 x 8 A100 with 8 x 4 T4, each
policy beside the bound of that cluster. *Generations*: jobs drawn from Gavel's measurements on three types. *Sharing*:
jobs drawn from the models of its table of pairs on V100s, half of them guaranteed. *Noise*: what the noise scale that
is assumed for Pollux changes. What is assumed stands in ``mixed.py`` and ``colocation.py`` (``simulator/inputs``) and
in ``baselines/pollux.py``. *Lengths*: what it costs ``optimus``, which fits loss curves in its paper, to be told wrong
lengths. Data: ../shared/data beside the checkout.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from bench_policies import DATA
from results import parser_of, show, table

from elasticflow_airflow.scheduler_core import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.decisions import Decision
from elasticflow_airflow.scheduler_core.model.events import Event, JobProgressed, JobSubmitted
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.simulator.baselines.antman import AntMan
from elasticflow_airflow.scheduler_core.simulator.baselines.common.by_type import ByType
from elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant import clairvoyant_bound
from elasticflow_airflow.scheduler_core.simulator.inputs.colocation import read_colocation
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import common_jobs, mixed_cluster, read_typed_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace, TraceJob, read_trace
from elasticflow_airflow.scheduler_core.simulator.outcome import Result
from elasticflow_airflow.scheduler_core.simulator.policies import InspectablePolicy, Policy, make_policy
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob, Simulation

MIXED = (("a100", 8, 8), ("t4", 8, 4))
GENERATIONS = (("v100", 3, 8), ("p100", 3, 8), ("k80", 3, 8))
TYPES = "+types"
MIXED_POLICIES = (
    "elasticflow+types",
    "chronus+size+types",
    "oasis+types",
    "aonline+types",
    "gavel",
    "pollux",
    "optimus",
    "gang-fifo",
)
"""``gavel`` chooses types itself, ``+types`` is one scheduler a type; the others do not know of types, and their gangs
stand wherever there is room."""
ASSUMED_ON = (("195job", (16, 8), "a100"), ("t4_195job", (16, 4), "t4"))
"""Where assumptions are varied: trace, cluster, type of GPU."""
LENGTH_SIGMAS = (0.0, 0.1, 0.3)
LENGTH_SEEDS = 5
REPORT_AFTER_S = 60.0
NOISE = (None, 0.5, 1.0, 2.0, 4.0, 16.0)
PAUSE_S = 30.0
USUAL = SchedulerConfig(objective=Objective.FIRST_COME)


def simulate(name: str, policy: Policy, nodes: tuple[Node, ...], jobs: list[SimulatedJob], **more: Any) -> Result:
    return Simulation(name=name, policy=policy, nodes=nodes, jobs=jobs, **more).run()


def mixed_policy(name: str, nodes: tuple[Node, ...]) -> Policy:
    if not name.endswith(TYPES):
        return make_policy(name, nodes, USUAL)

    def one(config: SchedulerConfig, of_a_type: Iterable[Node]) -> InspectablePolicy:
        return make_policy(name.removesuffix(TYPES), of_a_type, config)

    return ByType(one, USUAL, nodes)


def beside_the_bound(
    jobs: list[SimulatedJob], nodes: tuple[Node, ...], parts: Sequence[tuple[str, int, int]]
) -> list[str]:
    """What the bound is, an empty line, and a table of policies."""
    slots = {kind: count * each for kind, count, each in parts}
    bound = clairvoyant_bound(
        [job.job for job in jobs], slots, curves=lambda job, kind: job.curves[kind], time_limit_s=60.0
    )
    rows = []
    for policy in MIXED_POLICIES:
        found = simulate(policy, mixed_policy(policy, nodes), nodes, jobs).summary()
        cells = [str(found[key]) for key in ("met", "late_though_admitted", "rejected")]
        mean = f"{float(found['completion_mean_s']) / 3600:.2f}"
        share = f"{100 * float(found['met']) / bound.met:.1f} %"
        rows.append([f"`{policy}`", cells[0], share, *cells[1:], mean, str(found["changes"])])
    heads = ["policy", "met", "of bound", "late", "refused", "mean h", "changes"]
    return [f"bound {bound.met}{'' if bound.exact else ' (may be loose)'}", "", *table(heads, rows)]


def types() -> list[str]:
    """A mixed cluster."""
    tables = {name: read_curves(DATA / "throughput" / name) for name, _, _ in MIXED}
    nodes = mixed_cluster(MIXED)
    lines: list[str] = []
    for name in ("195job", "cluster10", "poisson_100job"):
        trace, curves = common_jobs(read_trace(DATA / "traces" / f"{name}.csv"), tables)
        jobs = prepare(trace, {}, nodes, Conditions(pause_s=PAUSE_S), curves)
        found = beside_the_bound(jobs, nodes, MIXED)
        lines += [f"**{name}**, bert and deepspeech2 alone: {len(jobs)} jobs, {found[0]}.", *found[1:], ""]
    return lines[:-1]


def generations(count: int = 200, seed: int = 1) -> list[str]:
    """Three generations of GPUs, by Gavel's own measurements."""
    curves = read_typed_curves(DATA / "throughput" / "gavel" / "curves.csv")
    nodes = mixed_cluster(GENERATIONS)
    chaos, at, rows = random.Random(seed), 0.0, []
    models = sorted(set.intersection(*(set(curves[kind]) for kind, _, _ in GENERATIONS)))
    for number in range(count):
        at += chaos.expovariate(1 / 70.0)
        model, batch = chaos.choice(models)
        speeds = curves["v100"][model, batch].steps_per_s
        length = chaos.lognormvariate(8.0, 0.8)
        rows.append(
            TraceJob(
                job_id=f"j{number:03}",
                submitted_s=at,
                steps=length * speeds[min(chaos.choice((1, 1, 1, 2, 4)), max(speeds))],
                model=model,
                batch_size=batch,
                deadline_s=at + 120.0 + length * chaos.uniform(1.2, 3.0),
            )
        )
    by_type = {kind: curves[kind] for kind, _, _ in GENERATIONS}
    jobs = prepare(Trace(None, tuple(rows)), {}, nodes, Conditions(pause_s=PAUSE_S), by_type)
    cluster_has = ", ".join(f"{nodes_of} x {slots} {kind.upper()}" for kind, nodes_of, slots in GENERATIONS)
    lines = beside_the_bound(jobs, nodes, GENERATIONS)
    return [f"{count} jobs with deadlines on {cluster_has}, {lines[0]}.", *lines[1:]]


def sharing(count: int = 200, seed: int = 1) -> list[str]:
    """Opportunistic jobs beside guaranteed ones."""
    folder = DATA / "throughput" / "gavel"
    curves = read_typed_curves(folder / "curves.csv")["v100"]
    pairs = read_colocation(folder / "colocation.csv", "v100", curves)
    chaos, at, rows = random.Random(seed), 0.0, []
    models = sorted(key for key in curves if any(f"{key[0]}:{key[1]}" in pair for pair in pairs.parts))
    for number in range(count):
        at += chaos.expovariate(1 / 150.0)
        model, batch = chaos.choice(models)
        asks = min(chaos.choice((1, 1, 1, 2, 4)), max(curves[model, batch].steps_per_s))
        length = chaos.lognormvariate(8.0, 0.8)
        rows.append(
            TraceJob(
                job_id=f"j{number:03}",
                submitted_s=at,
                steps=length * curves[model, batch].steps_per_s[asks],
                model=model,
                batch_size=batch,
                deadline_s=1e9 if number % 2 else None,
                workers=asks,
            )
        )
    nodes = cluster(5, 8)
    jobs = prepare(Trace(None, tuple(rows)), curves, nodes, Conditions(pause_s=PAUSE_S))
    guaranteed = [job for job in jobs if job.job.deadline_s is not None]

    def mean_h(result: Result, which: Callable[[float | None], bool]) -> str:
        done = [r.completion_s for r in result.records if which(r.deadline_s) and r.completion_s is not None]
        return f"{sum(done) / len(done) / 3600:.3f}" if done else "-"

    found = []
    for label, listed, left in (
        ("guaranteed jobs alone", guaranteed, None),
        ("all, idle slots only", jobs, None),
        ("all, slots shared", jobs, pairs.leftover),
    ):
        more = {} if left is None else {"leftover": left}
        result = simulate("antman", AntMan(nodes=nodes, leftover=left), nodes, listed, **more)
        last = max(r.finished_s or 0.0 for r in result.records)
        cells = [mean_h(result, lambda d: d is not None), mean_h(result, lambda d: d is None), f"{last / 3600:.2f}"]
        found.append([label, *cells])
    heads = ["`antman`", "guaranteed, mean h", "opportunistic, mean h", "last end h"]
    return [f"{count} jobs on 5 x 8 V100, every other one guaranteed:", "", *table(heads, found)]


def noise() -> list[str]:
    """Pollux under other noise scales."""
    rows = []
    for scale in NOISE:
        cells = []
        for name, shape, kind in ASSUMED_ON:
            nodes = cluster(*shape)
            conditions = replace(Conditions(pause_s=PAUSE_S), noise_batches=scale)
            trace, curves = read_trace(DATA / "traces" / f"{name}.csv"), read_curves(DATA / "throughput" / kind)
            jobs = prepare(trace, curves, nodes, conditions)
            result = simulate("pollux", make_policy("pollux", nodes), nodes, jobs).summary()
            cells += [str(result["met"]), f"{float(result['completion_mean_s']) / 3600:.2f}"]
        rows.append(["batch stays" if scale is None else f"{scale:g}", *cells])
    heads = ["noise scale, in batches of the job", "195job met", "mean h", "t4_195job met", "mean h"]
    return table(heads, rows)


class Misled:
    """A policy that is told lengths, and whatever is left of them, wrong by one log-normal factor a job."""

    def __init__(self, policy: Policy, sigma: float, seed: int) -> None:
        self._policy = policy
        self._sigma = sigma
        self._seed = seed

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Pass the event on, with the steps as a loss curve would have them."""
        match event:
            case JobSubmitted(job) if job.total_steps is not None:
                event = replace(event, job=replace(job, total_steps=job.total_steps * self._factor(job.job_id)))
            case JobProgressed(job_id, left) if left is not None:
                event = replace(event, remaining_steps=left * self._factor(job_id))
            case _:
                pass
        return self._policy.handle(event, now)

    def _factor(self, job_id: str) -> float:
        return random.Random(f"{self._seed} length {job_id}").lognormvariate(0.0, self._sigma)


def lengths() -> list[str]:
    """Optimus under wrong predictions of lengths."""
    rows = []
    for sigma in LENGTH_SIGMAS:
        cells = []
        for name, shape, kind in ASSUMED_ON:
            nodes = cluster(*shape)
            trace, curves = read_trace(DATA / "traces" / f"{name}.csv"), read_curves(DATA / "throughput" / kind)
            jobs = prepare(trace, curves, nodes, Conditions(pause_s=PAUSE_S))
            found = []
            for seed in range(LENGTH_SEEDS if sigma else 1):
                policy = Misled(make_policy("optimus", nodes), sigma, seed)
                simulation = Simulation(
                    name="optimus", policy=policy, nodes=nodes, jobs=jobs, report_after_s=REPORT_AFTER_S
                )
                found.append(simulation.run().summary())
            cells.append(f"{mean(float(one['met']) for one in found):.1f}")
            cells.append(f"{mean(float(one['completion_mean_s']) for one in found) / 3600:.2f}")
        rows.append(["exact" if sigma == 0.0 else f"{sigma:g}", *cells])
    heads = ["lengths wrong by sigma", "195job met", "mean h", "t4_195job met", "mean h"]
    return table(heads, rows)


TABLES = {"types": types, "generations": generations, "sharing": sharing, "noise": noise, "lengths": lengths}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="only these tables (types, sharing, ...), commas between")
    args = parser.parse_args()
    only = {name for name in args.only.split(",") if name}
    if not DATA.is_dir():
        print(f"nothing to do: the traces are not at {DATA}")
        return
    for name, make in TABLES.items():
        if only and name not in only:
            continue
        lines = make()
        show(name, lines, args)


if __name__ == "__main__":
    main()
