"""``kill -9`` of the service, at every commit and every engine call: nothing is lost, doubled or left without an owner.

Each life of the service is a forked process that a real SIGKILL ends in mid-flight; time is modelled, and goes on in
the next life. The database, the checkpoints and the modelled machines are files, as they would be.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elasticflow_airflow.api import AmendRequest
from elasticflow_airflow.engines.fake.engine import FakeEngine, fake_nodes
from elasticflow_airflow.runtime.protocol import Promotion, checkpoint_dir
from elasticflow_airflow.runtime.stores.manifest import verify_candidate
from elasticflow_airflow.service import crashpoints
from elasticflow_airflow.service.refusal import Refusal

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
POINTS = {
    "before inventory",
    "before observe",
    "after observe",
    "before commit",
    "after commit",
    "before apply",
    "after apply",
    "after promotion",
    "before stop",
    "after stop",
    "before renew",
    "after renew",
    "before forget",
    "after forget",
}
"""Every kind of moment at which these tests have killed the service."""


@dataclass(slots=True)
class Task:
    """What the owner of a job does: submits (again until answered), maybe amends or cancels, acknowledges."""

    at_s: float
    given: dict[str, object]
    ends: str = "succeeded"
    cancel_at_s: float | None = None
    amend_at_s: float | None = None
    new_deadline_at: float | None = None
    worker_dies_at_s: float | None = None
    """One of its workers is killed as soon as it has two and trains in place; at the same age, one that is joining."""
    joiner_dies_at_s: float | None = None


@dataclass
class Lives:
    """One service with many lives."""

    base: Path
    world_class: type
    tasks: list[Task]
    nodes: tuple[int, int] = (1, 4)
    pace_s: float = 0.5
    limit_s: float = 400.0
    kills: int = 0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.base.mkdir()
        self.log = self.base / "crashes"
        # What survives a life apart from files: the time, and what the owners of the jobs know.
        self.memory = memoryview(mmap.mmap(-1, 4096)).cast("d")

    @property
    def elapsed_s(self) -> float:
        return self.memory[0]

    def live(self, crash_at: int) -> bool:
        """One life, that ends at its ``crash_at``-th crash point (0: never); True when it saw all jobs to their end."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                crashpoints._crash_log = str(self.log)
                crashpoints.arm(crash_at)
                self._serve()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            self.kills += 1
            return False
        assert os.waitstatus_to_exitcode(status) == 0, "the service failed; see the output of the child"
        return True

    def open(self):
        engine = FakeEngine(
            fake_nodes(*self.nodes),
            self.base / "state" / "jobs",
            clock=lambda: START_S + self.elapsed_s,
            state_file=self.base / "machines.json",
        )
        url = f"sqlite:///{self.base / 'jobs.db'}"
        return self.world_class(self.base, {}, url, engine, START_S + self.elapsed_s, self.elapsed_s)

    def _serve(self) -> None:
        world = self.open()
        while self.elapsed_s < self.limit_s:
            done = [self._own(world, number, task) for number, task in enumerate(self.tasks)]
            if all(done):
                world.stop()
                return
            self.memory[0] += self.pace_s
            world.step(self.pace_s)
            self._look_at_machines(world)
            for number, task in enumerate(self.tasks):
                self._kill_workers(world, number, task)
        raise AssertionError("not all jobs have come to their end:\n" + "\n".join(world.story()))

    @staticmethod
    def _look_at_machines(world) -> None:
        """What the machines themselves say, whatever the service believes."""
        holding = [gang for gang in world.engine.world.gangs.values() if gang.started and gang.phase != "ended"]
        holders = {(slot, gang.spec.job_id) for gang in holding for slot in gang.spec.placement}
        assert len(holders) == len({slot for slot, _ in holders}), f"a slot was given to two jobs: {holders}"
        jobs = [gang.spec.job_id for gang in holding]
        alone = [gang.spec.job_id for gang in holding if gang.continues is None]
        assert len(alone) == len(set(alone)), f"two generations of a job hold slots: {jobs}"
        with world.store.read() as reader:
            owned = {row.job_id for _, row in reader.undrained()}
        assert set(jobs) <= owned, f"a gang runs for no job: {set(jobs) - owned}"

    def _kill_workers(self, world, number: int, task: Task) -> None:
        """What machines do to workers: each once (or again, when the service is killed before that is noted)."""
        gangs = [g for g in world.engine.world.gangs.values() if f"-task{number}-" in g.spec.job_id]
        phases = {gang.phase: gang for gang in gangs}
        trains = phases.get("running")
        died, unborn = 301 + number, 401 + number
        due = task.worker_dies_at_s is not None and self.elapsed_s >= task.worker_dies_at_s
        if due and not self.memory[died] and trains is not None and trains.workers > 1:
            self.memory[died] = 1.0
            world.engine.fail_worker(trains.spec.job_id, rank=1)
        due = task.joiner_dies_at_s is not None and self.elapsed_s >= task.joiner_dies_at_s
        if due and not self.memory[unborn] and "joining" in phases:
            change = phases["joining"]
            if any(name.startswith(f"g{change.spec.generation:06d}-") for name in change.members):
                self.memory[unborn] = 1.0
                world.engine.fail_joiner(change.spec.job_id)

    def _own(self, world, number: int, task: Task) -> bool:
        """What the owner of a job does at this moment; True when there is nothing left to do."""
        claim = 1 + number  # where the owner keeps its claim: 0 before the submission was answered
        if self.elapsed_s < task.at_s:
            return False
        done = 101 + number
        if self.memory[done]:
            return True
        submission = world.submission(task=f"task{number}", **task.given)
        job_id = submission.identity.job_id
        if not self.memory[claim]:
            self.memory[claim] = world.job_service.submit(job_id, submission).claim
        status = world.job_service.renew(job_id, int(self.memory[claim]))
        amended = 201 + number
        if task.amend_at_s is not None and self.elapsed_s >= task.amend_at_s and not self.memory[amended]:
            request = AmendRequest(claim=int(self.memory[claim]), deadline_at=task.new_deadline_at)
            assert world.amend(job_id, request).accepted
            self.memory[amended] = 1.0
        if task.cancel_at_s is not None and self.elapsed_s >= task.cancel_at_s and not status.state.terminal:
            world.job_service.cancel(job_id, int(self.memory[claim]), "no longer needed")
        if not status.state.terminal:
            return False
        if status.state == "succeeded" and not status.acknowledged:
            world.job_service.acknowledge(job_id, int(self.memory[claim]))
            return False
        with world.store.read() as reader:
            self.memory[done] = float(reader.current(job_id)[1].drained)
        return bool(self.memory[done])

    def points(self) -> Counter[str]:
        """Where the service was killed, and how often."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return Counter(line.split(" ", 1)[1] for line in lines)

    def story_of_changes(self) -> Counter[str]:
        """Which kinds of events there were, and how often."""
        world = self.open()
        try:
            return Counter(event.kind for event in world.events())
        finally:
            world.stop()

    def check(self) -> None:
        """Every job came to its end exactly once; no generation was doubled; no slot was given to two gangs."""
        world = self.open()
        try:
            held: list[tuple[str, int, float, float, str]] = []
            for number, task in enumerate(self.tasks):
                job_id = world.submission(task=f"task{number}", **task.given).identity.job_id
                with world.store.read() as reader:
                    job, row = reader.current(job_id)
                    generations = reader.generations(job_id, row.incarnation)
                    events = reader.events(0, job_id, 10_000)
                story = "\n".join(line for line in world.story() if job_id in line)
                assert row.state == task.ends, story
                if task.ends == "rejected":
                    continue  # An owner who did not get to hear it asks again, and is refused again.
                assert row.incarnation == 1, story
                assert row.drained, story
                kinds = Counter(event.kind for event in events)
                assert sum(kinds[kind] for kind in ("succeeded", "failed", "cancelled", "rejected")) == 1, story
                assert kinds["submitted"] == 1, story
                assert not kinds["not_started"], story
                assert not kinds["restarting"], story
                assert not kinds["warning"], story
                assert [g.generation for g in generations] == list(range(1, job.generation + 1)), story
                ordered = [e.data["generation"] for e in events if "slots" in e.data and "generation" in e.data]
                assert ordered == [g.generation for g in generations], story
                started = [e.data["generation"] for e in events if e.kind in ("started", "rescaled")]
                assert len(started) == len(set(started)), story
                assert all(g.handled for g in generations), story
                claim = int(self.memory[1 + number])
                assert claim == job.claim, story
                assert world.job_service.renew(job_id, claim).state == task.ends
                with pytest.raises(Refusal, match="claim"):
                    world.job_service.cancel(job_id, claim - 1, "too late")
                # No step is trained twice, and none is left out.
                trained = [g for g in generations if g.first_step is not None]
                for before, after in pairwise(trained):
                    assert before.last_step is None or before.last_step <= after.first_step, story
                assert task.new_deadline_at is None or row.deadline_at == task.new_deadline_at, story
                if task.ends == "succeeded":
                    assert row.step == row.total_steps == task.given["steps"], story
                    checkpoints = checkpoint_dir(world.settings.state_dir / "jobs" / job_id / "i000001")
                    promotion = Promotion.read(checkpoints)
                    assert promotion is not None, story
                    assert promotion == row.promoted, story
                    assert promotion.step == row.total_steps, story
                    assert verify_candidate(checkpoints / promotion.path).digest == row.result.checkpoint_digest
                    assert row.acknowledged, story
                    assert kinds["acknowledged"] == 1, story
                for g in generations:
                    if g.holding_at is not None:
                        held += [(node, index, g.holding_at, g.ended_at, job_id) for node, index in g.placement]
            for i, (node, index, since, until, who) in enumerate(held):
                for other_node, other_index, other_since, other_until, other in held[i + 1 :]:
                    if (node, index) == (other_node, other_index) and who != other:  # its own may go on in place
                        assert until <= other_since or other_until <= since, f"{node}:{index} had {who} and {other}"
            assert not world.engine.world.gangs, "a gang was left behind"
        finally:
            world.stop()


START_S = 1_800_000_000.0


@pytest.fixture
def make_lives(tmp_path: Path, world_class: type) -> Iterator[Callable[..., Lives]]:
    # In memory where that is possible: thousands of commits need not reach a disk to survive a kill.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as base:
        numbers = iter(range(10_000))

        def make(tasks: list[Task], **given) -> Lives:
            return Lives(Path(base) / f"lives{next(numbers)}", world_class, tasks, **given)

        yield make


def deadline(after_s: float) -> float:
    return START_S + after_s


def seeds(fast: int, *, slow: int, soak: int) -> list[Any]:
    """Seeds of random kills: some for each commit, some for the slow tests, and the others for the long ones."""
    marked = [pytest.mark.slow] * slow + [pytest.mark.soak] * soak
    return [*range(fast), *(pytest.param(seed, marks=mark) for seed, mark in enumerate(marked, fast))]


def busy_day() -> list[Task]:
    """Profiling, a known curve, a rescale that follows, best effort, a cancel, a hopeless deadline, an amendment."""
    return [
        Task(0.0, {"steps": 400, "deadline_at": deadline(300)}, amend_at_s=18.0, new_deadline_at=deadline(250)),
        Task(5.0, {"steps": 300, "best_effort": True}),
        Task(12.0, {"steps": 320, "deadline_at": deadline(80), "scaling_curve": CURVE}),
        Task(15.0, {"steps": 5000, "best_effort": True}, ends="cancelled", cancel_at_s=60.0),
        Task(16.0, {"steps": 50_000, "deadline_at": deadline(90), "scaling_curve": CURVE}, ends="rejected"),
    ]


@pytest.mark.parametrize("seed", seeds(0, slow=1, soak=4))
def test_a_day_of_jobs_survives_a_service_that_is_killed_again_and_again(make_lives, seed):
    lives = make_lives(busy_day())
    chance = random.Random(seed)
    while not lives.live(chance.randint(1, 30) if lives.kills < 40 else 0):
        pass
    lives.check()
    assert lives.kills == 40


STRIDE = 20
"""Of the points of a change in place, the slow tests take each so many-th; the long ones take the others."""
IN_PLACE = {"in_place": True, "startup_s": 2.0, "join_s": 4.0}


def day_in_place() -> list[Task]:
    """Jobs that are measured, grow, shrink and make room without a restart, of which workers die now and then."""
    return [
        Task(0.0, {"steps": 700, "deadline_at": deadline(300), "fake": IN_PLACE}, joiner_dies_at_s=1.0),
        Task(4.0, {"steps": 500, "best_effort": True, "scaling_curve": CURVE, "fake": IN_PLACE}, worker_dies_at_s=12.0),
        Task(14.0, {"steps": 320, "deadline_at": deadline(80), "scaling_curve": CURVE, "fake": IN_PLACE}),
        Task(15.0, {"steps": 5000, "best_effort": True, "fake": IN_PLACE}, ends="cancelled", cancel_at_s=60.0),
        Task(
            30.0, {"steps": 900, "best_effort": True, "scaling_curve": CURVE, "fake": IN_PLACE}, worker_dies_at_s=70.0
        ),
    ]


@pytest.mark.parametrize("seed", seeds(0, slow=2, soak=5))
def test_changes_in_place_survive_a_service_that_is_killed_again_and_again(make_lives, seed):
    lives = make_lives(day_in_place())
    chance = random.Random(seed)
    while not lives.live(chance.randint(1, 30) if lives.kills < 40 else 0):
        pass
    lives.check()
    assert lives.kills == 40
    changes = lives.story_of_changes()
    assert changes["rescaled"] >= 3, changes
    assert changes["worker_lost"], changes


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", [1, *(pytest.param(first, marks=pytest.mark.soak) for first in range(2, STRIDE + 1))])
def test_one_change_in_place_survives_a_kill_at_each_single_point(make_lives, first):
    """A job grows when another ends, loses a worker, goes on and grows again: killed at each twentieth point."""

    def tasks() -> list[Task]:
        first = {"steps": 60, "best_effort": True, "scaling_curve": {1: 10.0}, "max_workers": 1, "fake": IN_PLACE}
        grows = {"steps": 500, "best_effort": True, "scaling_curve": {1: 10.0, 2: 18.0}, "fake": IN_PLACE}
        return [Task(0.0, first), Task(0.0, grows, worker_dies_at_s=20.0)]

    crash_at = first - STRIDE
    done = False
    while not done:
        crash_at += STRIDE
        lives = make_lives(tasks(), nodes=(1, 2), pace_s=1.0)
        done = lives.live(crash_at)
        if not done:
            assert lives.live(0)
        lives.check()
        changes = lives.story_of_changes()
        assert changes["worker_lost"] == 1, (crash_at, changes)
        assert changes["rescaled"] >= 2, (crash_at, changes)
        shutil.rmtree(lives.base)
    assert crash_at > 100


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.soak)])
def test_one_job_survives_a_kill_at_each_single_point_of_its_life(make_lives, stride):
    """A run for each (or each eighth) commit and engine call of a whole job, killed there and nowhere else."""

    def tasks() -> list[Task]:
        return [
            Task(0.0, {"steps": 80, "deadline_at": deadline(200), "scaling_curve": {1: 10.0, 2: 18.0}}),
            Task(2.0, {"steps": 500, "best_effort": True}, ends="cancelled", cancel_at_s=18.0),
        ]

    points: Counter[str] = Counter()
    crash_at = 0
    done = False
    while not done:
        crash_at += stride
        lives = make_lives(tasks(), nodes=(1, 2), pace_s=1.0)
        done = lives.live(crash_at)
        if not done:
            assert lives.live(0)
        lives.check()
        points += lives.points()
        shutil.rmtree(lives.base)
    assert sum(points.values()) == crash_at // stride - 1 >= 120 // stride, points
    assert set(points) <= POINTS, f"unknown: {set(points) - POINTS}"
    assert stride > 1 or set(points) == POINTS, f"never killed at {POINTS - set(points)}"
