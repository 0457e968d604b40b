"""How the cost of an event grows with the number of concurrent jobs, and what a filling of all of them costs.

    python benchmarks/bench_scale.py [--largest 10000] [--samples 24] [--write]

For 10, 100, 1,000 and 10,000 jobs that run at once on as many slots, in nodes of 8, and for 100 on 512 and 1,000 on
4,096, where jobs use more than they need: the processor time of an arrival that is admitted, of one that is refused
since it could not be in time even alone, of an end (each with its re-plan), of an arrival that is refused since all
slots are promised until after its deadline (other orders of filling are tried for it, in vain; up to 1,000 jobs), and
of one progressive filling of all jobs from nothing (ElasticFlow's Algorithm 1); and the memory of this process.
Processor time, not wall-clock time: other work on the machine does not count.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from dataclasses import replace

from results import parser_of, show, table

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Decision, Reject, WakeMeAt
from elasticflow_airflow.scheduler_core.model.events import Event, JobFinished, JobSubmitted
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Node, Phase, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.model.work import Work
from elasticflow_airflow.scheduler_core.planning.minimum_share import fill

CURVE = ScalingCurve({size: size**0.8 for size in (1, 2, 4, 8, 16)})


CASES = ((10, 8), (100, 96), (100, 512), (1_000, 1_000), (1_000, 4_096), (10_000, 10_000))
"""Jobs, and slots: as many (in whole nodes), or more than promises need."""
EASY, HOPELESS = (1.2, 3.0), (0.05, 0.09)
"""Ends of what deadlines leave, in lengths on one slot. The hopeless ones need more than the fastest size gives; a
refusal then looks for the earliest deadline to offer."""
MOST_FULL = 1000
"""Beside how many jobs slots are all promised: to make so many of 10,000 promises takes longer than all the rest."""
FULL_S = 10_000.0
"""How long all slots are promised, where they are."""


def make_job(number: int, now: float, chaos: random.Random, leaves: tuple[float, float]) -> Job:
    length = chaos.lognormvariate(9.0, 0.6)
    return Job(
        job_id=f"job{number:06}",
        submitted_s=now,
        deadline_s=now + 60.0 + length * chaos.uniform(*leaves),
        total_steps=length,
        curve=CURVE,
        costs=RescaleCosts(startup_s=20.0, pause_s=10.0),
    )


def timed(scheduler: Scheduler, event: Event, now: float) -> tuple[list[Decision], float]:
    begin = time.process_time()
    decisions = scheduler.handle(event, now)
    return decisions, 1e3 * (time.process_time() - begin)


def running(jobs: list[Job], slots: int) -> Scheduler:
    """A scheduler that has promised all of them at time 0."""
    scheduler = Scheduler(nodes=[Node(node_id=f"n{i:05}", slots=8) for i in range(slots // 8)])
    scheduler.restore(
        [
            JobState(
                job=job,
                phase=Phase.ADMITTED,
                best_effort=False,
                remaining_steps=job.total_steps,
                as_of_s=0.0,
                number=i,
                promise=i,
            )
            for i, job in enumerate(jobs)
        ],
        0.0,
    )
    return scheduler


def events(count: int, slots: int, chaos: random.Random, samples: int) -> dict[str, list[float]]:
    """Milliseconds by kind of event beside ``count`` running jobs on ``slots``."""
    took: dict[str, list[float]] = {"admitted": [], "refused": [], "ended": []}
    number = count
    scheduler = running([make_job(i, 0.0, chaos, EASY) for i in range(count)], max(16, slots))
    now = 60.0
    for sample in range(samples):
        now += 1.0
        job = make_job(number, now, chaos, EASY if sample % 2 == 0 else HOPELESS)
        number += 1
        decisions, ms = timed(scheduler, JobSubmitted(job), now)
        admitted = any(isinstance(decision, Admit) for decision in decisions)
        took["admitted" if admitted else "refused"].append(ms)
        if not admitted:
            continue
        victim = chaos.choice(scheduler.states()).job.job_id  # as many run as before
        ended, ms = timed(scheduler, JobFinished(victim), now)
        took["ended"].append(ms)
        assert not ended or any(isinstance(d, WakeMeAt) for d in ended)
    return took


def refused_beside_full_promises(count: int, chaos: random.Random, samples: int) -> list[float]:
    """Milliseconds of refusals where each slot is promised to a job that needs it until after the newcomer's deadline.

    Alone, each newcomer would be in time.
    """
    slots = 8 * max(1, count // 8)
    spare_s = 25.0  # a start and less than a pause: nobody can give way
    promised = []
    for number in range(slots):
        length = FULL_S * chaos.uniform(0.999, 1.0)
        promised.append(replace(make_job(number, 0.0, chaos, EASY), total_steps=length, deadline_s=length + spare_s))
    scheduler = running(promised, slots)
    took = []
    for sample in range(samples):
        now = 60.0 + sample
        newcomer = make_job(slots + sample, now, chaos, EASY)
        length = 0.2 * FULL_S * chaos.uniform(0.5, 1.0)
        leaves = min(length * chaos.uniform(*EASY), 0.9 * FULL_S - now)
        newcomer = replace(newcomer, total_steps=length, deadline_s=now + spare_s + leaves)
        decisions, ms = timed(scheduler, JobSubmitted(newcomer), now)
        assert any(isinstance(decision, Reject) for decision in decisions)
        took.append(ms)
    return took


def filling(count: int, chaos: random.Random) -> float:
    """Seconds to fill ``count`` jobs on ``count`` slots from nothing."""
    layout = Layout([Node(node_id=f"n{i:05}", slots=8) for i in range(max(1, count // 8))])
    speeds = {size: size**0.8 for size in (1, 2, 4, 8, 16, 32, 64)}
    works = []
    for number in range(count):
        length = chaos.lognormvariate(7.5, 0.8)
        steps = 0.3 * length * speeds[chaos.choice([1, 2, 4, 8, 16, 32])]
        limit = 40.0 + length * chaos.uniform(1.05, 4.0)
        works.append(Work(f"j{number:05}", steps, 0.0, 0, 0, 0.0, False, tuple(speeds), speeds, 30.0, 30.0, 0.0, limit))
    works.sort(key=lambda work: work.limit_s)
    begin = time.process_time()
    fill(FreeCapacity(layout, 0.0, 64), works, 0.0, {})
    return time.process_time() - begin


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--largest", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=24)
    args = parser.parse_args()
    rows = []
    for count, slots in CASES:
        if count > args.largest:
            break
        samples = args.samples if count < 10_000 else max(2, args.samples // 2)
        took = events(count, slots, random.Random(7), samples)
        worst = f"{max(took['admitted']):.2f}"
        alike = slots == 8 * (count // 8)
        full = alike and count <= MOST_FULL
        took["full"] = refused_beside_full_promises(count, random.Random(7), samples) if full else []
        admitted, *cells = [f"{statistics.median(values):.2f}" if values else "-" for values in took.values()]
        seconds = f"{filling(count, random.Random(7)):.3f}" if alike else "-"
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append([f"{count:,}", f"{slots:,}", admitted, worst, *cells, seconds, f"{memory:.0f}"])
        print("  ", *rows[-1], file=sys.stderr, flush=True)
    heads = ["jobs", "slots", "admitted ms", "worst ms", "refused ms", "ended ms", "refused beside full promises ms"]
    heads += ["a filling of all s", "memory MiB"]
    lines = table(heads, rows)
    show("scale", lines, args)


if __name__ == "__main__":
    main()
