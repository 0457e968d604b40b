"""What it costs to take over more promises than a cluster can keep, and what each event costs beside them.

    python benchmarks/bench_restore.py [--largest 3000] [--write]

A scheduler starts again and finds 100, 400, 1,000 and 3,000 promised jobs on a cluster that can keep only some of the
promises: narrow, wide and mixed jobs, deadlines that are near, far and both, on 32 and on 512 slots; their plans were
lost, or were made for a cluster that has shrunk since. Processor time of the restore; then that of what comes next: a
report that a running job is slower than planned (the median of several), the end of a running job, a wake-up.
Processor time, not wall-clock time: other work on the machine does not count.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from results import parser_of, show, table

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model.events import Event, JobFinished, JobProgressed, WakeUp
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Node, Phase, RescaleCosts, ScalingCurve

SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Kind:
    """A sort of jobs: how many workers each can have, and what its deadline leaves, in lengths at the smallest size."""

    name: str
    workers: tuple[tuple[int, int], ...]
    leaves: tuple[tuple[float, float], ...]


KINDS = (
    Kind("narrow, near", ((1, 2),), ((1.1, 3.0),)),
    Kind("wide, near", ((4, 16), (8, 16)), ((1.1, 3.0),)),
    Kind("mixed", ((1, 2), (1, 16), (4, 16), (8, 8)), ((0.5, 2.0), (2.0, 100.0))),
)
CLUSTERS = (4, 64)
"""Nodes of 8 slots."""


def make_job(number: int, kind: Kind, chaos: random.Random) -> Job:
    least, most = chaos.choice(kind.workers)
    length = chaos.lognormvariate(8.0, 0.8)
    return Job(
        job_id=f"job{number:06}",
        submitted_s=0.0,
        deadline_s=120.0 + length * chaos.uniform(*chaos.choice(kind.leaves)),
        total_steps=length * least**0.8,
        curve=ScalingCurve({size: size**0.8 for size in SIZES}),
        min_workers=least,
        max_workers=most,
        costs=RescaleCosts(startup_s=30.0, pause_s=10.0, tail_s=5.0),
    )


def promised(jobs: Sequence[Job]) -> list[JobState]:
    """The jobs as they are stored when all were promised, in an order of their own, and none has begun."""
    return [
        JobState(
            job=job,
            phase=Phase.ADMITTED,
            best_effort=False,
            remaining_steps=job.total_steps,
            as_of_s=0.0,
            number=number,
            promise=number,
        )
        for number, job in enumerate(jobs)
    ]


def cluster(nodes: int) -> Scheduler:
    return Scheduler(nodes=[Node(node_id=f"n{i:05}", slots=8) for i in range(nodes)])


def seconds(begin: float) -> float:
    return time.process_time() - begin


def timed(scheduler: Scheduler, event: Event, now: float) -> float:
    begin = time.process_time()
    scheduler.handle(event, now)
    return seconds(begin)


def running(scheduler: Scheduler) -> list[JobState]:
    return [state for state in scheduler.states() if state.placement.workers]


def kept(scheduler: Scheduler) -> int:
    return sum(not state.at_risk for state in scheduler.states())


def one(states: Sequence[JobState], nodes: int, chaos: random.Random, reports: int) -> list[str]:
    """The cells of one row: the promises kept, and the seconds of each step."""
    scheduler = cluster(nodes)
    begin = time.process_time()
    scheduler.restore(states, 1.0)
    cells = [f"{kept(scheduler):,}", f"{seconds(begin):.2f}"]
    now, slower = 100.0, []
    for _ in range(reports):
        now += 1.0
        state = chaos.choice(running(scheduler))
        left, size = state.remaining_steps or 1.0, state.placement.workers
        slower.append(timed(scheduler, JobProgressed(state.job.job_id, left * 0.999, 0.9 * size**0.8), now))
    ended = timed(scheduler, JobFinished(chaos.choice(running(scheduler)).job.job_id), now + 1.0)
    woken = timed(scheduler, WakeUp(), now + 2.0)
    return [*cells, f"{statistics.median(slower):.3f}", f"{max(slower):.3f}", f"{ended:.3f}", f"{woken:.3f}"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--largest", type=int, default=3000)
    parser.add_argument("--smallest", type=int, default=100)
    parser.add_argument("--reports", type=int, default=3)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rows = []
    for kind in KINDS:
        for nodes in CLUSTERS:
            for plans in ("lost", "of a larger cluster"):
                for count in (100, 400, 1000, 3000):
                    if not args.smallest <= count <= args.largest:
                        continue
                    chaos = random.Random(args.seed)
                    states = promised([make_job(number, kind, chaos) for number in range(count)])
                    if plans != "lost":
                        before = cluster(count)
                        before.restore(states, 0.0)
                        states = list(before.states())
                    cells = one(states, nodes, chaos, args.reports)
                    rows.append([f"{kind.name}; {8 * nodes} slots; plans {plans}", f"{count:,}", *cells])
                    print("  ", *rows[-1], sep="  ", file=sys.stderr, flush=True)
    heads = [
        "jobs, slots, plans",
        "promises",
        "kept",
        "restore s",
        "slower report s",
        "slowest s",
        "end s",
        "wake-up s",
    ]
    show("restore", table(heads, rows), args)


if __name__ == "__main__":
    main()
