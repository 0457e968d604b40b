"""``gavel``: max-min fair shares of several GPU types, realised in rounds (Gavel, OSDI 2020).

The paper: a policy is an optimisation over the fractions of time ``X`` that each job spends on each GPU type. Max-min
fairness (section 4.1, heterogeneity-aware LAS) maximises the smallest throughput of a job, relative to its throughput
with an equal share of every type, weighted and multiplied by its number of GPUs; so a job runs where it gains most.
Rounds of six minutes realise ``X``: in each, jobs and types are taken in order of ``X`` divided by the rounds received
so far (section 5). Sizes are those that users request. It does not consider deadlines.

This policy decides which type each job's gang runs on, and in which rounds.

Differences from the paper, and reasons:

- With one type the program has a closed form (equal slot-time for every job; what a job cannot use goes to the others),
  so no solver is needed. With several types it is a linear program (HiGHS through scipy, an optional dependency).
- The program is repeated for jobs that could still get more when others cannot (water filling, which the paper names as
  the refinement of max-min), so that no share is left unused.
- A gang never spans two types, and a move from one type to another costs its pause.
- Gangs are capped at the knee of their curve by default; ``gavel+plain`` uses the requested size.
- Waiting jobs may use idle slots within a round.
- Space sharing (section 3.1) is not implemented. In the paper, pairs of jobs that share a GPU are further columns of
  the program, a job's time over all its columns is at most 1, and rounds place pairs like jobs. It could be simulated,
  since the simulator can place two jobs on a slot and pairs were measured (see ``gandiva`` and ``antman``), but only on
  K80, P100 and V100, for which no trace with deadlines has curves. In the service a slot has one worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Node
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room, seat

ROUND_S = 360.0
"""Length of a round in the paper (section 5)."""
_FILLINGS = 8
"""Maximum number of times the program is solved, each time for the jobs that can still get more."""
_HAD, _COUNTED = "had ", "counted_s"


@dataclass(frozen=True, slots=True)
class GavelJob:
    """A job as the program sees it: its gang size, and its steps/s at that size on each usable type."""

    job_id: str
    size: int
    speeds: Mapping[str, float]
    weight: float = 1.0


class Gavel(GangPolicy):
    """Gavel: max-min fairness over GPU types. Deterministic."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        round_s: float = ROUND_S,
        at_knee: bool = True,
    ) -> None:
        super().__init__(config, nodes)
        if round_s <= 0.0:
            raise ValueError(f"round_s is {round_s!r}; it must be above 0")
        self._round_s = round_s
        self._at_knee = at_knee
        self._last_s = float("-inf")
        self._solved: tuple[tuple[GavelJob, ...], tuple[tuple[str, int], ...]] | None = None
        self._shares: dict[tuple[str, str], float] = {}
        self._chosen: dict[str, str] = {}
        """The GPU type on which each job runs or will run."""

    # -- rounds ----------------------------------------------------------------------------------------------------

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of a round, choose jobs and types by priority; else keep running gangs and fill idle slots."""
        jobs, now = scene.jobs, scene.now
        if not jobs:
            return Wanted([])
        for job in jobs:
            self._count(job.job, now)
        due = self._last_s + self._round_s
        rooms = {name: Room(self.layout, scene_free) for name, scene_free in self._free_by_type(scene).items()}
        chosen: dict[str, str] = {}
        if now < due - TOLERANCE_S:
            for job in jobs:
                if job.size:
                    name = self.layout.type_of(job.job.mask)
                    chosen[job.job_id] = name
                    rooms[name].take(job.size)
        else:
            self._last_s, due = now, now + self._round_s
        contenders = {job.job_id: self._contender(job) for job in jobs}
        shares = self._solve(tuple(contenders.values()), rooms)
        running = {job.job_id: self.layout.type_of(job.job.mask) for job in jobs if job.size}

        def priority(pair: tuple[str, str]) -> tuple[float, bool, int]:
            job_id, name = pair
            job = self.jobs[job_id]
            age = max(now - job.job.submitted_s, self._round_s)
            had = job.memory.get(_HAD + name, 0.0) / age
            share = shares.get(pair, 0.0)
            return -(share / had if had > 0.0 else share * 1e9), running.get(job_id) != name, job.number

        pairs = [pair for pair in shares if shares[pair] > 1e-6 and pair[0] not in chosen]
        spare = [
            (job_id, name)
            for job_id, c in contenders.items()
            for name in _fastest_first(c)
            if (job_id, name) not in pairs
        ]
        for job_id, name in [*sorted(pairs, key=priority), *spare]:
            size = contenders[job_id].size
            if job_id not in chosen and name in rooms and rooms[name].fits(size):
                rooms[name].take(size)
                chosen[job_id] = name
        self._chosen = chosen
        claims = [
            Claim(job_id, (contenders[job_id].size,), f"its share of {name or 'the cluster'}")
            for job_id, name in chosen.items()
        ]
        return Wanted(claims, due if len(chosen) < len(jobs) or len(rooms) > 1 else None)

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Place each gang within its GPU type."""
        seats: dict[str, int] = {}
        reasons: dict[str, str] = {}
        for name, members in self.layout.of_type.items():
            claims = [claim for claim in wanted.claims if self._chosen.get(claim.job_id) == name]
            grants, why = self._grant(Wanted(claims), Room(self.layout, free & members))
            held = {job_id: self.jobs[job_id].mask & members for job_id, _ in grants}
            seats.update(seat(self.layout, free & members, grants, held))
            reasons.update(why)
        return seats, reasons

    def _free_by_type(self, scene: Scene) -> dict[str, int]:
        kept = 0
        here = {job.job_id for job in scene.jobs}
        for job in self.jobs.values():
            kept |= job.mask if job.job_id not in here else 0
        usable = self.usable(scene.now) & ~kept
        return {name: usable & members for name, members in self.layout.of_type.items()}

    def _count(self, job: GangJob, now: float) -> None:
        """Add the time since the last count to the job's time on its present GPU type."""
        since = job.memory.get(_COUNTED, now)
        job.memory[_COUNTED] = now
        if job.mask and self._chosen.get(job.job_id) is not None:
            key = _HAD + self._chosen[job.job_id]
            job.memory[key] = job.memory.get(key, 0.0) + now - since

    def _contender(self, job: JobView) -> GavelJob:
        spec = job.job.job
        size = job.requested_within_knee if self._at_knee else job.requested
        if job.size:
            size = job.size if job.size in job.speeds else size
        speeds = {}
        for name in self.layout.of_type:
            curve = spec.curves.get(name)
            speed = curve.steps_per_s.get(size) if curve is not None else job.speeds.get(size)
            if speed is not None and (curve is not None or not spec.curves):
                speeds[name] = speed
        return GavelJob(job.job_id, size, speeds, max(spec.value, 1e-6))

    def _solve(self, contenders: tuple[GavelJob, ...], rooms: Mapping[str, Room]) -> dict[tuple[str, str], float]:
        slots = tuple((name, self.layout.of_type[name].bit_count()) for name in sorted(rooms))
        if self._solved != (contenders, slots):
            self._solved = (contenders, slots)
            self._shares = max_min_shares(contenders, dict(slots))
        return self._shares


def max_min_shares(contenders: Sequence[GavelJob], slots: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Return fractions of time by job and type that maximise the smallest normalised throughput, then the next, ….

    Raises:
        ImportError: there are several types, and scipy is not installed.
    """
    usable = [c for c in contenders if any(speed > 0.0 for name, speed in c.speeds.items() if name in slots)]
    if len(slots) == 1:
        name = next(iter(slots))
        return {(c.job_id, name): share for c, share in zip(usable, _one_type(usable, slots[name]), strict=True)}
    return _several_types(usable, slots)


def _one_type(contenders: Sequence[GavelJob], slots: int) -> list[float]:
    """Return equal shares of slot-time by weight; what a job cannot use (a share is at most 1) goes to the others."""
    shares = [0.0] * len(contenders)
    left = float(slots)
    order = sorted(range(len(contenders)), key=lambda i: contenders[i].size / contenders[i].weight)
    weights = sum(c.weight for c in contenders)
    for i in order:
        contender = contenders[i]
        fair = left * contender.weight / weights if weights > 0.0 else left
        used = min(float(contender.size), fair)
        shares[i] = used / contender.size
        left -= used
        weights -= contender.weight
    return shares


def _several_types(contenders: Sequence[GavelJob], slots: Mapping[str, int]) -> dict[tuple[str, str], float]:
    from scipy import optimize, sparse

    names = [name for name, count in slots.items() if count > 0]
    total = sum(slots[name] for name in names)
    keys = [(i, name) for i, c in enumerate(contenders) for name in names if c.speeds.get(name, 0.0) > 0.0]
    if not keys:
        return {}
    values = []
    for i, name in keys:
        c = contenders[i]
        equal = sum(c.speeds.get(other, 0.0) * slots[other] / total for other in names)
        values.append(c.speeds[name] / equal * c.size / c.weight)
    fixed: dict[int, float] = {}
    best = np.zeros(len(keys))
    for filling in range(_FILLINGS):
        entries: list[tuple[int, int, float]] = []
        limits: list[float] = []
        for i in range(len(contenders)):  # a job runs at most all of the time
            entries.extend((len(limits), k, 1.0) for k, key in enumerate(keys) if key[0] == i)
            limits.append(1.0)
        for name in names:  # a type has no more slots than exist
            entries.extend(
                (len(limits), k, float(contenders[i].size)) for k, (i, other) in enumerate(keys) if other == name
            )
            limits.append(float(slots[name]))
        for i in range(len(contenders)):  # at least the common level, or the level at which the job was fixed
            entries.extend((len(limits), k, -values[k]) for k, key in enumerate(keys) if key[0] == i)
            if i not in fixed:
                entries.append((len(limits), len(keys), 1.0))
            limits.append(-fixed[i] * (1.0 - 1e-7) if i in fixed else 0.0)
        rows, columns, data = zip(*entries, strict=True)
        matrix = sparse.csr_array((data, (rows, columns)), shape=(len(limits), len(keys) + 1))
        goal = np.array([*(-1e-6 * value for value in values), -1.0])
        answer = optimize.linprog(goal, A_ub=matrix, b_ub=limits, bounds=(0, None), method="highs")
        if answer.x is None:
            break
        best = answer.x[:-1]
        reached = [0.0] * len(contenders)
        for k, (i, _) in enumerate(keys):
            reached[i] += values[k] * best[k]
        prices = -answer.ineqlin.marginals[len(contenders) + len(names) :]
        tight = [i for i in range(len(contenders)) if i not in fixed and prices[i] > 1e-9]
        if not tight or filling == _FILLINGS - 1:
            break
        for i in tight:
            fixed[i] = reached[i]
    return {(contenders[i].job_id, name): float(share) for (i, name), share in zip(keys, best, strict=True)}


def _fastest_first(contender: GavelJob) -> list[str]:
    return sorted(contender.speeds, key=lambda name: (-contender.speeds[name], name))
