"""How long one scheduling decision takes: a newcomer's verdict, re-plan included, beside many running jobs.

    python benchmarks/bench_decision.py [--jobs 100] [--nodes 64] [--slots 8] [--arrivals 200] [--naive 10]
        [--write]

Prints median and p99 of ours and, measured in the same run on the same states, of a textbook implementation: pure
Python, progressive filling second by second from nothing at every arrival. It knows no costs, no placement and no
growth, and says no at the first job that does not fit, with neither reason nor offered deadline: where most are
rejected it does far less than ours. Curves: those of ../shared/data beside the checkout where present, else made up.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import time
from pathlib import Path

from results import parser_of, table, write

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Reject
from elasticflow_airflow.scheduler_core.model.events import JobFinished, JobSubmitted, WakeUp
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Node, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.outcome import quantile

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "throughput" / "a100"


def load_curves() -> tuple[str, list[dict[int, float]]]:
    curves = []
    for path in sorted(DATA.glob("*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                row.pop("global_batch_size")
                curves.append({int(n): float(v) for n, v in row.items() if v and v != "nan" and float(v) > 0})
    if curves:
        return "a100", curves
    return "made up", [{n: n**power for n in (1, 2, 4, 8, 16, 32)} for power in (0.5, 0.7, 0.85)]


def naive_admission(states: tuple[JobState, ...], newcomer: Job, now: float, slots: int, step_s: float = 1.0) -> bool:
    """Algorithm 1 as in the textbook: every job anew, every level, second by second."""
    todo = [(s.job.deadline_s, s.remaining_steps, s.job) for s in states if s.job.deadline_s is not None]
    assert newcomer.deadline_s is not None
    todo.append((newcomer.deadline_s, newcomer.total_steps, newcomer))
    todo.sort(key=lambda item: item[0])
    horizon = int((todo[-1][0] - now) / step_s) + 1
    free = [slots] * horizon
    for deadline, remaining, job in todo:
        assert job.curve is not None
        assert remaining is not None
        speeds = job.curve.usable(1, slots)
        until = int((deadline - now) / step_s)
        for level in speeds:
            done, used = 0.0, []
            for second in range(until):
                size = min(level, 1 << (free[second].bit_length() - 1) if free[second] else 0)
                size = max((n for n in speeds if n <= size), default=0)
                if size:
                    done += speeds[size] * step_s
                used.append(size)
                if done >= remaining:
                    break
            if done >= remaining:
                for second, size in enumerate(used):
                    free[second] -= size
                break
        else:
            return False
    return True


def make_job(number: int, now: float, chaos: random.Random, curves: list[dict[int, float]], tight: float) -> Job:
    curve = chaos.choice(curves)
    length = chaos.lognormvariate(7.5, 0.8)
    size = chaos.choice([n for n in (1, 1, 2, 4, 8, 8, 16) if n in curve])
    return Job(
        job_id=f"job{number:05}",
        submitted_s=now,
        deadline_s=now + 30 + length * chaos.uniform(tight, 3.0),
        total_steps=length * curve[size],
        curve=ScalingCurve(curve),
        costs=RescaleCosts(startup_s=20.0, pause_s=10.0, tail_s=5.0),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=None, help="default: 64, then 16, where most are rejected")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--arrivals", type=int, default=200)
    parser.add_argument("--naive", type=int, default=10, help="how many of the arrivals the naive one decides too")
    parser.add_argument("--tight", type=float, default=1.1, help="lower end of deadline / duration")
    args = parser.parse_args()
    lines: list[str] = []
    for nodes in [64, 16] if args.nodes is None else [args.nodes]:
        found = measure(args, nodes)
        print(*found, "", sep="\n", flush=True)
        lines += [*found, ""]
    write("decision", lines[:-1], args)


def measure(args: argparse.Namespace, nodes: int) -> list[str]:
    name, curves = load_curves()
    chaos = random.Random(7)
    scheduler = Scheduler(nodes=[Node(node_id=f"n{i:04}", slots=args.slots) for i in range(nodes)])
    now, number = 1_000_000.0, 0
    while len(scheduler.states()) < args.jobs and number < 20 * args.jobs:
        scheduler.handle(JobSubmitted(make_job(number, now, chaos, curves, args.tight)), now)
        number += 1
        now += 1.0
    verdicts: dict[str, list[float]] = {"admit": [], "reject": []}
    naive: list[float] = []
    beside: list[float] = []
    for arrival in range(args.arrivals):
        now += chaos.uniform(1.0, 10.0)
        due = [
            s.job.job_id for s in scheduler.states() if (scheduler.projected_finish_s(s.job.job_id) or now + 1) <= now
        ]
        for job_id in due:
            scheduler.handle(JobFinished(job_id), now)
        scheduler.handle(WakeUp(), now)
        job = make_job(number, now, chaos, curves, args.tight)
        number += 1
        states = scheduler.states()
        begin = time.perf_counter()
        decisions = scheduler.handle(JobSubmitted(job), now)
        took = time.perf_counter() - begin
        verdict = next(d for d in decisions if isinstance(d, Admit | Reject))
        verdicts["admit" if isinstance(verdict, Admit) else "reject"].append(took)
        if args.naive and arrival % max(1, args.arrivals // args.naive) == 0:
            beside.append(took)
            begin = time.perf_counter()
            naive_admission(states, job, now, nodes * args.slots)
            naive.append(time.perf_counter() - begin)
        while len(scheduler.states()) > args.jobs:
            victim = chaos.choice(scheduler.states()).job.job_id
            scheduler.handle(JobFinished(victim), now)
    both = verdicts["admit"] + verdicts["reject"]
    rows = [[kind, *milliseconds(values)] for kind, values in [*verdicts.items(), ("all", both)] if values]
    if naive:
        rows += [["all that the textbook decides, too", *milliseconds(beside)], ["the textbook", *milliseconds(naive)]]
    live = len(scheduler.states())
    return [
        f"{live} jobs on {nodes} x {args.slots} slots, {args.arrivals} arrivals, curves: {name}:",
        "",
        *table(["verdict", "decisions", "median ms", "p99 ms", "worst ms"], rows),
    ]


def milliseconds(values: list[float]) -> list[str]:
    figures = (statistics.median(values), quantile(sorted(values), 0.99), max(values))
    return [str(len(values)), *(f"{1e3 * value:.2f}" for value in figures)]


if __name__ == "__main__":
    main()
