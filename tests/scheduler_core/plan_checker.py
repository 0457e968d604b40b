"""An independent checker of plans: plain arithmetic over the public values, sharing nothing with the planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elasticflow_airflow.scheduler_core.model.values import Job, Plan

EPS_S = 1e-3


def buddy_blocks(node_sizes: Iterable[int]) -> list[int]:
    """Blocks that nodes fall into: binary decomposition; the largest of equal nodes combine, if whole or of four."""
    by_size: dict[int, int] = {}
    for size in node_sizes:
        by_size[size] = by_size.get(size, 0) + 1
    blocks: list[int] = []
    for size, count in by_size.items():
        largest = 1 << size.bit_length() - 1
        joins = largest == size or largest >= 4
        lumps = [largest * count, *([size - largest] * count)] if joins else [size] * count
        for lump in lumps:
            blocks += [1 << bit for bit in range(lump.bit_length()) if lump >> bit & 1]
    return blocks


def placeable(gangs: Iterable[int], blocks: Iterable[int]) -> bool:
    """First fit of the largest first into power-of-two blocks, which is exact for powers of two."""
    free = sorted(blocks, reverse=True)
    for gang in sorted(gangs, reverse=True):
        for place, room in enumerate(free):
            if room >= gang:
                free[place] -= gang
                break
        else:
            return False
        free.sort(reverse=True)
    return True


def check_plan(
    job: Job,
    plan: Plan,
    now: float,
    remaining: float,
    *,
    size_now: int = 0,
    free_from: float | None = None,
    starting: bool = False,
) -> list[str]:
    """Everything wrong with one plan of a job that holds ``size_now`` slots and can step at ``free_from``.

    ``starting``: what it waits for until then is its start-up, not a pause.
    """
    wrong: list[str] = []
    assert job.curve is not None
    most = job.max_workers or 1 << 30
    done, end, size = 0.0, now, size_now
    stalled_until = free_from if free_from is not None else now
    for part in plan.segments:
        if part.workers < job.min_workers or part.workers > most or part.workers & (part.workers - 1):
            wrong.append(f"{part.workers} workers are not a power of two in [{job.min_workers}, {most}]")
        if part.end_s < part.start_s - EPS_S or part.start_s < end - EPS_S:
            wrong.append(f"segments overlap or run backwards at {part.start_s}")
        if part.start_s > end + EPS_S:
            size = 0
        if size == 0 or (starting and size != part.workers and stalled_until > part.start_s + EPS_S):
            due = part.start_s + job.costs.startup_s  # a start-up that is interrupted begins again
            starting = True
        elif size != part.workers:
            due = part.start_s + job.costs.pause_s
            starting = False
        else:
            due = max(part.start_s, stalled_until)
        stalled_until = due
        lost = min(max(0.0, due - part.start_s), part.end_s - part.start_s)
        if part.lost_s < lost - EPS_S:
            wrong.append(f"segment at {part.start_s} loses {part.lost_s} s, but {lost} s are due")
        speeds = [speed for n, speed in job.curve.steps_per_s.items() if n <= part.workers]
        done += max(speeds, default=0.0) * max(0.0, part.end_s - part.start_s - part.lost_s)
        stalled_until = max(stalled_until, part.start_s + part.lost_s)
        end, size = part.end_s, part.workers
    if done < remaining * (1 - 1e-6) - 1e-3:
        wrong.append(f"the plan makes {done} of {remaining} steps")
    if abs(end - plan.finish_s) > EPS_S and plan.segments:
        wrong.append(f"the last segment ends at {end}, the plan says {plan.finish_s}")
    if plan.promised_s < plan.finish_s + job.costs.tail_s - EPS_S:
        wrong.append("the tail is not in the promise")
    if job.deadline_s is not None and plan.promised_s > job.deadline_s + EPS_S:
        wrong.append(f"promised {plan.promised_s} after the deadline {job.deadline_s}")
    return wrong


def check_capacity(plans: Iterable[Plan], blocks: list[int]) -> list[str]:
    """Whether all plans fit together into the blocks at every moment."""
    plans = list(plans)
    times = sorted({part.start_s for plan in plans for part in plan.segments})
    wrong = []
    for when in times:
        gangs = [
            part.workers
            for plan in plans
            for part in plan.segments
            if part.start_s <= when + EPS_S and part.end_s > when + EPS_S
        ]
        if not placeable(gangs, blocks):
            wrong.append(f"at {when}: {sorted(gangs)} do not fit into {sorted(blocks)}")
    return wrong


def check_joint(jobs: Mapping[str, tuple[Job, Plan]], node_sizes: Iterable[int], now: float) -> list[str]:
    """Check plans of jobs that all begin with nothing at ``now``."""
    wrong = [
        f"{job_id}: {problem}"
        for job_id, (job, plan) in jobs.items()
        for problem in check_plan(job, plan, now, job.total_steps or 0.0)
    ]
    return wrong + check_capacity([plan for _, plan in jobs.values()], buddy_blocks(node_sizes))
