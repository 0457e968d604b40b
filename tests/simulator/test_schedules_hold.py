"""Whatever arrives on whatever cluster: schedules are possible on real machines, and exact curves break no promise.

The count is that of the independent checker, which reads the exported file and shares nothing with the simulator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.schedule_checker import CheckedJob, Report, check

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, Placement, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles, disturbances
from elasticflow_airflow.scheduler_core.simulator.outcome import Result
from elasticflow_airflow.scheduler_core.simulator.outputs.export import write_schedule
from elasticflow_airflow.scheduler_core.simulator.run import Change, Disturbance, SimulatedJob, Simulation

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(max_examples=2000, deadline=None, derandomize=False, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Story:
    """A small world: nodes, jobs in order of arrival, and the costs that are the same for all of them."""

    nodes: tuple[Node, ...]
    jobs: tuple[SimulatedJob, ...]
    costs: RescaleCosts


@st.composite
def curves(draw: st.DrawFn, largest: int) -> dict[int, float]:
    """Speeds at powers of two, also where more workers are slower, or where few do not run."""
    sizes = [1 << level for level in range(5) if 1 << level <= max(largest, 1)]
    first = draw(st.sampled_from([0, 0, 0, len(sizes) - 1]))
    speed, found = draw(st.floats(0.2, 5.0)), {}
    for size in sizes[first:]:
        found[size] = speed
        speed *= draw(st.floats(0.8, 2.1))
    return found


@st.composite
def stories(draw: st.DrawFn, *, most_jobs: int = 9, roomy: bool = False) -> Story:
    """``roomy``: nobody is best effort, and deadlines leave time to start again with one worker, twice."""
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    nodes = tuple(Node(node_id=f"n{i}", slots=size) for i, size in enumerate(sizes))
    largest = 1 << (Layout(nodes).levels - 1)
    pause_s = draw(st.sampled_from([0.0, 1.0, 30.0, 60.0]) | st.floats(0.0, 60.0))
    costs = RescaleCosts(
        startup_s=draw(st.sampled_from([pause_s, 0.0, 20.0])), pause_s=pause_s, tail_s=draw(st.sampled_from([0.0, 5.0]))
    )
    arrival, jobs = 1000.0, []
    for number in range(draw(st.integers(1, most_jobs))):
        arrival += draw(st.just(0.0) | st.floats(0.0, 200.0))
        speeds = {1: draw(st.floats(0.2, 5.0))} if roomy else draw(curves(largest))
        length_s = draw(st.floats(1.0, 400.0))
        steps = length_s * min(speeds.values())
        slack = draw(st.floats(0.3, 4.0))
        deadline: float | None = arrival + costs.startup_s + costs.tail_s + length_s * slack
        if roomy:
            deadline = arrival + 3.0 * (costs.startup_s + length_s + costs.tail_s) + 60.0
        elif draw(st.integers(0, 5)) == 0:
            deadline = None
        job = Job(
            job_id=f"j{number}",
            submitted_s=arrival,
            deadline_s=deadline,
            total_steps=steps,
            curve=ScalingCurve(speeds),
            costs=costs,
            explore=False,
            on_reject=draw(st.sampled_from([OnReject.FAIL, OnReject.FAIL, OnReject.WAIT])),
        )
        jobs.append(SimulatedJob(job=job, truth=speeds, arrives_s=arrival))
    return Story(nodes, tuple(jobs), costs)


class Listening(Scheduler):
    """Our scheduler, with what it was told and what it said of each job, by time."""

    def __init__(self, config: SchedulerConfig | None, nodes: Sequence[Node]) -> None:
        super().__init__(config, nodes)
        self.told: dict[str, list[tuple[float, ev.Event | ev.CalendarEvent | de.Decision]]] = {}
        self.places: dict[str, Placement] = {}

    def handle(self, event: ev.Event | ev.CalendarEvent, now: float) -> list[de.Decision]:
        decided = super().handle(event, now)
        lost = []
        if isinstance(event, ev.NodeLost):
            gone = event.node_id
            lost = [job_id for job_id, held in self.places.items() if any(s.node_id == gone for s in held.slots)]
        for one in (event, *(ev.GangLost(job_id) for job_id in lost), *decided):
            job_id = getattr(one, "job_id", None)
            if job_id is not None:
                self.told.setdefault(job_id, []).append((now, one))
            if isinstance(one, de.Resize):
                self.places[one.job_id] = one.placement
            elif isinstance(one, de.Suspend | ev.GangLost):
                self.places.pop(one.job_id, None)
        return decided

    def could_tell(self, job_id: str, deadline_s: float, tail_s: float) -> str:
        """Why it should have said by the deadline that the job will be late; empty: it did, or could not know.

        It knows when the job stands still, and when the last report since it got its slots says so.
        """
        warned, held, ends_s = False, False, 0.0
        for at_s, one in self.told.get(job_id, ()):
            if at_s >= deadline_s:
                break
            match one:
                case de.AtRisk() | de.OnTrack():
                    warned = isinstance(one, de.AtRisk)
                case de.Resize():
                    held, ends_s = True, 0.0
                case de.Suspend() | ev.GangLost():
                    held = False
                case ev.JobProgressed(remaining_steps=left, steps_per_s=speed) if (
                    left and speed
                ):  # in its tail it does not say since when
                    ends_s = at_s + left / speed + tail_s
        if warned or (held and ends_s <= deadline_s + 1e-3):
            return ""
        return f"{job_id} was to end at {ends_s} by its last report" if held else f"{job_id} held nothing"


def play(
    story: Story,
    config: SchedulerConfig | None = None,
    trouble: Sequence[Disturbance] = (),
    policy: Scheduler | None = None,
    **options: object,
) -> tuple[Result, list[Change]]:
    log: list[Change] = []
    simulation = Simulation(
        name="elasticflow",
        policy=policy or Scheduler(config, story.nodes),
        nodes=story.nodes,
        jobs=story.jobs,
        disturbances=trouble,
        on_change=log.append,
        **options,  # type: ignore[arg-type]  # options by name
    )
    return simulation.run(), log


def counted(story: Story, log: Sequence[Change], *, blocks: bool = True) -> Report:
    """The independent count of the exported schedule, at the speeds that jobs really had."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.jsonl"
        write_schedule(path, story.nodes, log)
        lines = path.read_text(encoding="utf-8").splitlines()
    jobs: Mapping[str, CheckedJob] = {
        one.job.job_id: CheckedJob(one.arrives_s, one.job.deadline_s, one.job.total_steps or 0.0, dict(one.truth))
        for one in story.jobs
    }
    sizes = [node.slots for node in story.nodes]
    return check(lines, jobs, sizes, story.costs.pause_s, startup_s=story.costs.startup_s, blocks=blocks)


def late(result: Result) -> list[str]:
    return [
        f"{r.job_id}: promised {r.promised_deadline_s}, ended {r.finished_s}"
        for r in result.records
        if r.late_though_admitted
    ]


def _holds(story: Story, **options: object) -> None:
    result, log = play(story, **options)  # type: ignore[arg-type]  # options by name
    assert late(result) == []
    assert [r.job_id for r in result.records if r.at_risk_s is not None] == []
    report = counted(story, log)
    assert report.violations == []
    summary = result.summary()
    assert report.met == summary["met"]
    assert (report.rejected, report.finished) == (summary["rejected"], len(story.jobs) - report.rejected)
    assert (report.changes, report.migrations) == (summary["changes"], summary["migrations"])
    assert report.slot_s / 3600.0 == pytest.approx(summary["slot_hours"])
    event(f"{report.met} met, {report.rejected} rejected")


@QUICK
@given(story=stories())
def test_exact_curves_break_no_promise_and_schedules_are_possible(story: Story) -> None:
    _holds(story)


@QUICK
@given(story=stories(), after_s=st.floats(1.0, 100.0))
def test_nor_do_they_when_all_that_is_reported_is_as_expected(story: Story, after_s: float) -> None:
    _holds(story, report_after_s=after_s, report_every_s=50.0)


@QUICK
@given(story=stories())
def test_nor_when_jobs_are_admitted_by_their_value(story: Story) -> None:
    _holds(story, config=SchedulerConfig(objective="value"))


@pytest.mark.soak
@LONG
@given(story=stories(most_jobs=14))
def test_exact_curves_break_no_promise_at_length(story: Story) -> None:
    _holds(story)


@QUICK
@given(story=stories(), seed=st.integers(0, 5))
def test_the_same_again_gives_the_same_schedule_also_in_trouble(story: Story, seed: int) -> None:
    trouble = disturbances(story.nodes, Troubles(seed=seed, mtbf_h=0.3, repair_h=0.05), 1000.0, 2500.0)
    first, again = play(story, None, trouble), play(story, None, trouble)
    assert first[1] == again[1]


@QUICK
@given(story=stories(), factors=st.lists(st.floats(0.7, 1.4), min_size=20, max_size=20))
def test_wrong_curves_make_no_impossible_schedule(story: Story, factors: list[float]) -> None:
    jobs = tuple(
        replace(one, truth={n: v * factors[(5 * i + n) % 20] for n, v in one.truth.items()})
        for i, one in enumerate(story.jobs)
    )
    story = replace(story, jobs=jobs)
    config = SchedulerConfig(speed_sigma=0.1, speed_shared=0.0)
    _, log = play(story, config, report_after_s=5.0, report_every_s=60.0)
    assert counted(story, log).violations == []


@QUICK
@given(story=stories(), factors=st.lists(st.floats(0.88, 1.5), min_size=20, max_size=20), after_s=st.floats(1.0, 100.0))
def test_what_is_no_slower_than_its_margin_allows_breaks_no_promise(
    story: Story, factors: list[float], after_s: float
) -> None:
    """exp(-0.1 z) is 0.8797 at nine in ten: sizes that are measured lose their margin, and yet nobody is late."""
    jobs = tuple(
        replace(one, truth={n: v * factors[(5 * i + n) % 20] for n, v in one.truth.items()})
        for i, one in enumerate(story.jobs)
    )
    story = replace(story, jobs=jobs)
    config = SchedulerConfig(speed_sigma=0.1, speed_shared=0.0, speed_confidence=0.9)
    result, log = play(story, config, report_after_s=after_s, report_every_s=60.0)
    assert late(result) == []
    assert counted(story, log).violations == []


drains = st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1500.0), st.none() | st.floats(1.0, 500.0)), max_size=4)


@QUICK
@given(story=stories(), plans=drains)
def test_drains_that_were_known_before_break_no_promise(story: Story, plans: list) -> None:
    """Nodes go away at dates that were told before the first job came; some come back."""
    trouble: list[Disturbance] = []
    absent: dict[str, tuple[float, float]] = {}
    for number, in_s, away_s in plans:
        node = story.nodes[number % len(story.nodes)]
        if node.node_id in absent:
            continue
        until = 1000.0 + in_s
        trouble.append(Disturbance(999.0, ev.NodeDraining(node.node_id, until)))
        trouble.append(Disturbance(until, ev.NodeLost(node.node_id)))
        absent[node.node_id] = (until, float("inf"))
        if away_s is not None:
            trouble.append(Disturbance(until + away_s, ev.NodeJoined(node)))
            absent[node.node_id] = (until, until + away_s)
    result, log = play(story, None, trouble)
    assert late(result) == []
    assert [r.job_id for r in result.records if r.at_risk_s is not None] == []
    for change in log:
        for slot in change.slots:
            gone, back = absent.get(slot.node_id, (float("inf"), float("inf")))
            assert not gone <= change.at_s < back, f"{change} on a node that is away from {gone} to {back}"
    kinds = set(counted(story, log, blocks=False).kinds())
    assert kinds <= {"forgotten"}  # best effort may have nowhere to run any more


@QUICK
@given(story=stories(roomy=True, most_jobs=6), which=st.integers(0, 4), at_s=st.floats(1000.0, 1400.0))
def test_a_lost_node_breaks_no_promise_that_can_still_be_kept(story: Story, which: int, at_s: float) -> None:
    """Each job could start again with one worker on a slot of its own, and be in time."""
    lost = story.nodes[which % len(story.nodes)]
    left = sum(node.slots for node in story.nodes if node is not lost)
    if left < len(story.jobs):
        story = replace(story, jobs=story.jobs[:left])
    if not story.jobs:
        return
    result, log = play(story, None, [Disturbance(at_s, ev.NodeLost(lost.node_id))], checkpoint_s=1e9)
    assert late(result) == []
    assert not [c for c in log if c.at_s >= at_s and any(slot.node_id == lost.node_id for slot in c.slots)]


@QUICK
@given(
    story=stories(),
    seed=st.integers(0, 1000),
    kinds=st.sets(st.sampled_from(["mtbf_h", "drain_every_h", "straggler_every_h"]), min_size=1),
)
def test_in_any_trouble_no_slot_is_given_twice_and_late_ones_were_announced(
    story: Story, seed: int, kinds: set[str]
) -> None:
    hours: Mapping[str, float] = dict.fromkeys(kinds, 0.2)
    troubles = Troubles(
        seed=seed, repair_h=0.05, drain_notice_h=0.05, drain_away_h=0.05, straggler_h=0.1, **hours  # type: ignore[arg-type]  # by name
    )  # fmt: skip
    trouble = disturbances(story.nodes, troubles, 1000.0, 3000.0)
    listening = Listening(SchedulerConfig(), story.nodes)
    result, log = play(story, None, trouble, listening, report_after_s=5.0, report_every_s=60.0, straggler_after_s=15.0)
    kinds_wrong = counted(story, log, blocks=False).kinds()
    assert not set(kinds_wrong) & {"double", "slots", "form", "order", "early", "ended", "size"}
    for record in result.records:
        if record.late_though_admitted:
            assert record.finished_s is not None or record.at_risk_s is not None
            assert record.promised_deadline_s is not None
            unsaid = listening.could_tell(record.job_id, record.promised_deadline_s, story.costs.tail_s)
            assert not unsaid, unsaid
            event("late, and announced before" if record.at_risk_s is not None else "late, and nobody could know")
