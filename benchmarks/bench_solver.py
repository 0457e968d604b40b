"""Whether a solver would find room where the scheduler finds none: an upper bound of what it could add as a rescue.

    python benchmarks/bench_solver.py [--write]

At every refusal HiGHS decides a relaxation of the question: whether the promises so far and the newcomer fit the
cluster when jobs may mix sizes and split slots at will, and nobody but the newcomer pays for a start or a change. Where
not even that fits, no plan exists, and no solver can find one. Where it fits, a solver might find a plan, or there is
none because sizes are whole and changes cost: this counts for the solver. First come, decided at arrival, exact curves.
Needs ../shared/data beside the checkout, and scipy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from bench_contended import TOO_SMALL
from bench_policies import DATA, OWN_SIZE, Case, setting_of
from results import parser_of, show, table

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.decisions import Decision, Reject
from elasticflow_airflow.scheduler_core.model.events import Event, JobSubmitted
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Node
from elasticflow_airflow.scheduler_core.simulator.bound.costs import Candidates
from elasticflow_airflow.scheduler_core.simulator.bound.fluid import FluidRelaxation, require_scipy
from elasticflow_airflow.scheduler_core.simulator.prepare import prepare
from elasticflow_airflow.scheduler_core.simulator.run import Simulation

PAUSE_S = 30.0
LIMIT_S = 60.0
MOST_COLUMNS = 200_000


class Asked:
    """The scheduler, and what the relaxation says of each of its refusals."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._scheduler = Scheduler(SchedulerConfig(objective=Objective.FIRST_COME), nodes)
        self._slots = sum(node.slots for node in nodes)
        self.found: Counter[str] = Counter()

    def handle(self, event: Event, now: float) -> list[Decision]:
        """Pass the event on; ask about a newcomer that is refused."""
        before = self._scheduler.states() if isinstance(event, JobSubmitted) else ()
        decisions = self._scheduler.handle(event, now)
        if isinstance(event, JobSubmitted) and any(isinstance(decision, Reject) for decision in decisions):
            self.found[self._ask(before, event.job, now)] += 1
        return decisions

    def _ask(self, states: Sequence[JobState], newcomer: Job, now: float) -> str:
        asked = [(state.job, left_of(state, now), 0.0) for state in states if not state.best_effort]
        asked.append((newcomer, newcomer.total_steps or 0.0, newcomer.costs.startup_s))
        alone = least_time_s(newcomer, self._slots) > (newcomer.deadline_s or 0.0) - now
        if alone:
            return "hopeless alone"
        relaxation = FluidRelaxation(candidates(asked, self._slots, now), MOST_COLUMNS)
        if (relaxation.feasible < 1.0 - 1e-9).any():
            return "no plan exists"
        prices = relaxation.overload(np.ones(len(asked)), LIMIT_S)
        if prices is None:
            return "not known in time"
        return "no plan exists" if prices.any() else "a solver might"


def left_of(state: JobState, now: float) -> float:
    """Steps left at ``now``."""
    left = state.remaining_steps or 0.0
    size = len(state.placement.slots)
    if size and state.job.curve is not None:
        since_s = max(state.as_of_s, state.no_progress_until_s)
        left -= state.job.curve.steps_per_s.get(size, 0.0) * max(0.0, now - since_s)
    return max(left, 1e-6)


def least_time_s(job: Job, slots: int) -> float:
    """From nothing to the result with the cluster to itself."""
    speeds = job.curve.usable(job.min_workers, slots) if job.curve is not None else {}
    return job.costs.startup_s + (job.total_steps or 0.0) / max(speeds.values(), default=1e-9) + job.costs.tail_s


def candidates(asked: Sequence[tuple[Job, float, float]], slots: int, now: float) -> Candidates:
    """Jobs, what is left of each, and the start that it has to pay, as the relaxation takes them."""
    options = [sorted(job.curve.usable(job.min_workers, slots).items()) for job, _, _ in asked if job.curve is not None]
    most = max(map(len, options))
    grid = np.array([[*one, *[one[-1]] * (most - len(one))] for one in options], dtype=float)
    return Candidates(
        ids=tuple(job.job_id for job, _, _ in asked),
        pool_slots=np.array([float(slots)]),
        begin_s=np.full(len(asked), now),
        end_s=np.array([(job.deadline_s or 0.0) - job.costs.tail_s for job, _, _ in asked]),
        steps=np.array([left for _, left, _ in asked]),
        startup_s=np.array([startup_s for _, _, startup_s in asked]),
        pause_s=np.zeros(len(asked)),
        pool=np.zeros((len(asked), most), dtype=np.intp),
        size=grid[:, :, 0],
        speed=grid[:, :, 1],
    )


def row(case: Case) -> list[str]:
    """One trace on one cluster: refusals, and what the relaxation says of them."""
    setting = setting_of(case, PAUSE_S, exact=True)
    policy = Asked(setting.nodes)
    jobs = prepare(setting.trace, setting.curves, setting.nodes, setting.conditions)
    result = Simulation(name="elasticflow", policy=policy, nodes=setting.nodes, jobs=jobs).run()
    kinds = ("hopeless alone", "no plan exists", "a solver might", "not known in time")
    return [case.label, str(result.summary()["met"]), str(policy.found.total()), *(str(policy.found[k]) for k in kinds)]


def main() -> None:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    if not DATA.is_dir():
        print(f"skipped: needs the data folder {DATA} beside the checkout")
        return
    require_scipy()
    rows = [row(case) for case in (*OWN_SIZE, *TOO_SMALL)]
    heads = ["", "met", "refused", "hopeless alone", "no plan exists", "a solver might", "not known in time"]
    show("solver", table(heads, rows), args)


if __name__ == "__main__":
    main()
