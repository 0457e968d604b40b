"""What the fake engine adds to the contract: modelled speed, failures on demand, a world that outlives its process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV, FakeBehaviour, FakeEngine, fake_nodes
from elasticflow_airflow.engines.port import EngineError, GangOutcome, GangSpec, GangState
from elasticflow_airflow.runtime.protocol import Promotion, Report, ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import CheckpointError, verify_candidate
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import FakeBench


def behaving(bench: FakeBench, **changes: Any) -> FakeEngine:
    assert isinstance(bench.engine, FakeEngine)
    bench.engine.world.behaviour = bench.engine.world.behaviour.changed(changes)
    return bench.engine


def test_speed_follows_the_curve(fake_bench: FakeBench) -> None:
    engine = behaving(fake_bench, steps_per_s={1: 10.0, 2: 18.0}, startup_s=1.0)
    engine.apply(fake_bench.spec(1, workers=2, session={"steps": 90}))
    begin_s = fake_bench.now_s[0]
    fake_bench.wait_state(1, GangState.ENDED)
    (finished,) = [r for r in fake_bench.reports["job", 1] if r.kind is ReportKind.FINISHED]
    assert finished.at_s - begin_s == pytest.approx(1.0 + 90 / 18.0)
    windows = [r.data for r in fake_bench.reports["job", 1] if r.kind is ReportKind.PROGRESS]
    assert all(w["window_steps"] / w["window_s"] == pytest.approx(18.0) for w in windows[1:-1])


def test_candidates_are_real_and_resume_from_the_promoted(fake_bench: FakeBench) -> None:
    engine = behaving(fake_bench)
    spec = fake_bench.spec(1, session={"checkpoint_interval_s": 2.0})
    spec.incarnation_dir.mkdir(parents=True)
    engine.apply(spec)
    fake_bench.wait(lambda _: "checkpoint" in fake_bench.kinds(1), "a checkpoint")
    report = next(r for r in fake_bench.reports["job", 1] if r.kind is ReportKind.CHECKPOINT)
    info = verify_candidate(spec.session.checkpoint_dir / report.data["path"])
    assert (info.digest, info.step) == (report.data["digest"], report.step)
    Promotion(path=report.data["path"], generation=1, step=info.step, digest=info.digest).write(spec.incarnation_dir)
    engine.stop("job", 1.0)
    fake_bench.wait_state(1, GangState.ENDED)
    engine.apply(replace(spec, generation=2, cleared_generation=1))
    fake_bench.wait_state(2, GangState.RUNNING)
    assert fake_bench.reports["job", 2][0].step == info.step
    assert fake_bench.reports["job", 2][0].data["resumed_from"] == report.data["path"]


def test_damaged_candidates_are_damaged(fake_bench: FakeBench) -> None:
    engine = behaving(fake_bench, damaged_checkpoints=True)
    spec = fake_bench.spec(1, session={"checkpoint_interval_s": 1.0})
    spec.incarnation_dir.mkdir(parents=True)
    engine.apply(spec)
    fake_bench.wait(lambda _: "checkpoint" in fake_bench.kinds(1), "a checkpoint")
    report = next(r for r in fake_bench.reports["job", 1] if r.kind is ReportKind.CHECKPOINT)
    with pytest.raises(CheckpointError):
        verify_candidate(spec.session.checkpoint_dir / report.data["path"])


@pytest.mark.parametrize(
    ("changes", "outcome", "last", "words"),
    [
        ({"fail_at_step": 7}, GangOutcome.FAILED, "failed", "injected failure"),
        ({"nan_loss_at_step": 7}, GangOutcome.FAILED, "failed", "not a number"),
        ({"exit_at_step": 7}, GangOutcome.FAILED, "progress", "status 0 before"),
        ({"out_of_memory_above": 4}, GangOutcome.FAILED, "out_of_memory", "micro-batch of 16"),
        ({"exit_at_step": 7, "reports": False}, GangOutcome.FINISHED, None, None),
    ],
)
def test_scripts_go_wrong_on_demand(
    fake_bench: FakeBench, changes: dict[str, Any], outcome: GangOutcome, last: str | None, words: str | None
) -> None:
    env = {BEHAVIOUR_ENV: json.dumps({**changes, "report_interval_s": 0.25})}
    fake_bench.engine.apply(fake_bench.spec(1, env=env, session={"global_batch_size": 16}))
    ended = fake_bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is outcome
    assert (fake_bench.kinds(1) or [None])[-1] == last
    assert (words is None and ended.failure is None) or (words or "") in (ended.failure or "")


def test_a_gang_that_hangs_is_killed_in_the_end(fake_bench: FakeBench) -> None:
    engine = behaving(fake_bench, hang_at_step=5)
    engine.apply(fake_bench.spec(1))
    fake_bench.wait(lambda gangs: fake_bench.now_s[0] > 1030, "a long time")
    assert fake_bench.look()[1].state is GangState.RUNNING
    assert max(report.step for report in fake_bench.reports["job", 1]) <= 5
    engine.stop("job", 10.0)
    ended = fake_bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.STOPPED
    assert [worker.exit_code for worker in ended.workers] == [-9]


def test_the_world_outlives_the_process(tmp_path: Path, fake_bench: FakeBench) -> None:
    now_s = [50.0]

    def start() -> FakeEngine:
        return FakeEngine(
            fake_nodes(1, 2), tmp_path / "jobs", clock=lambda: now_s[0], state_file=tmp_path / "world.json"
        )

    fake_bench.nodes = ("node0",)
    first = start()
    first.apply(fake_bench.spec(1, secret_env={"TOKEN": "hunter2"}))
    now_s[0] = 55.0
    seen = first.observe()[0].reports
    assert seen
    assert "hunter2" not in (tmp_path / "world.json").read_text()
    now_s[0] = 60.0
    again = start().observe()[0]
    assert again.state is GangState.RUNNING
    assert again.reports[: len(seen)] == seen
    assert len(again.reports) > len(seen)


def test_what_happens_to_a_gang_costs_one_line_and_a_torn_one_did_not_happen(
    tmp_path: Path, fake_bench: FakeBench
) -> None:
    file = tmp_path / "world.json"

    def start() -> FakeEngine:
        return FakeEngine(fake_nodes(1, 8), tmp_path / "jobs", clock=lambda: fake_bench.now_s[0], state_file=file)

    first = start()
    fake_bench.nodes = ("node0",)
    specs = [replace(fake_bench.spec(1), job_id=f"job{n}", placement=(Slot("node0", n),)) for n in range(4)]
    for spec in specs:
        first.apply(spec)
    before = file.read_text()
    first.stop("job1", 10.0)
    first.forget("job1")
    said = file.read_text()
    assert said.startswith(before)
    assert {json.loads(line)["job_id"] for line in said[len(before) :].splitlines()} == {"job1"}
    with file.open("a") as torn:
        torn.write('{"job_id": "job2", "gang": nu')
    again = start()
    assert list(again.world.gangs) == list(first.world.gangs)
    fake_bench.now_s[0] += 5.0
    assert {gang.job_id for gang in again.observe()} == {"job0", "job2", "job3"}
    assert {gang.job_id for gang in start().observe()} == {"job0", "job2", "job3"}


def test_the_file_of_a_world_is_made_short_again(tmp_path: Path, fake_bench: FakeBench) -> None:
    file = tmp_path / "world.json"
    behaviour = FakeBehaviour(report_interval_s=1.0, steps_per_s={1: 0.001})
    engine = FakeEngine(
        fake_nodes(1, 1), tmp_path / "jobs", clock=lambda: fake_bench.now_s[0], state_file=file, behaviour=behaviour
    )
    fake_bench.nodes = ("node0",)
    engine.apply(replace(fake_bench.spec(1), placement=(Slot("node0", 0),)))
    for _ in range(1500):
        fake_bench.now_s[0] += 5.0
        engine.renew("job")
        engine.observe()
    assert len(file.read_text().splitlines()) < 1200
    (gang,) = FakeEngine(fake_nodes(1, 1), tmp_path / "jobs", state_file=file).world.gangs.values()
    assert [report.to_line() for report in gang.reports] == [
        report.to_line() for report in engine.world.gangs["job", 1].reports
    ]


def test_a_file_of_an_older_service_is_read(tmp_path: Path, fake_bench: FakeBench) -> None:
    file, new = tmp_path / "world.json", tmp_path / "new.json"
    fake_bench.nodes = ("node0",)
    engine = FakeEngine(fake_nodes(1, 1), tmp_path / "jobs", clock=lambda: fake_bench.now_s[0], state_file=new)
    engine.apply(replace(fake_bench.spec(1), placement=(Slot("node0", 0),)))
    gang = json.loads(new.read_text())["gang"]
    file.write_text(json.dumps({"gangs": [json.dumps({**gang, "reports": []})]}, indent=1))
    read = FakeEngine(fake_nodes(1, 1), tmp_path / "jobs", clock=lambda: fake_bench.now_s[0], state_file=file)
    assert read.observe()[0].state is engine.observe()[0].state


def test_every_call_can_crash_before_and_after(fake_bench: FakeBench) -> None:
    class Killed(Exception):
        pass

    calls: list[tuple[str, str, str]] = []

    def crash(*call: str) -> None:
        calls.append(call)  # type: ignore[arg-type]  # always three words
        if call == ("apply", "job", "after"):
            raise Killed

    assert isinstance(fake_bench.engine, FakeEngine)
    fake_bench.engine.on_call = crash
    with pytest.raises(Killed):
        fake_bench.engine.apply(fake_bench.spec(1))
    assert calls == [("apply", "job", "before"), ("apply", "job", "after")]
    assert fake_bench.engine.observe()[0].state is GangState.STARTING


def test_errors_and_nodes_come_and_go(fake_bench: FakeBench) -> None:
    assert isinstance(fake_bench.engine, FakeEngine)
    engine = fake_bench.engine
    engine.fail_next("apply", "the disk is full")
    with pytest.raises(EngineError, match="disk is full"):
        engine.apply(fake_bench.spec(1))
    engine.apply(fake_bench.spec(1))
    fake_bench.wait_state(1, GangState.RUNNING)
    engine.remove_node("node0")
    assert [node.node_id for node in engine.inventory()] == ["node1"]
    assert fake_bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.LOST
    with pytest.raises(ValueError, match="unknown fake behaviour"):
        FakeBehaviour().changed({"sped": 1})


# -- changes in place --------------------------------------------------------------------------------------------

A, B, C, D = Slot("node0", 0), Slot("node0", 1), Slot("node1", 0), Slot("node1", 1)


def in_place(bench: FakeBench, generation: int, *slots: Slot, **changes: Any) -> GangSpec:
    """The specification of a generation that others go on in (the first one starts in the ordinary way)."""
    mode = RescaleMode.RESTART if generation == 1 else RescaleMode.IN_PLACE
    return bench.spec(generation, placement=slots, **{"mode": mode, "lease_s": 1e6, **changes})


def train(bench: FakeBench, *slots: Slot, **behaviour: Any) -> FakeEngine:
    """Have a first generation train on some slots for a while."""
    engine = behaving(bench, **{"in_place": True, "save_s": 0.5, "report_interval_s": 0.1, **behaviour})
    engine.apply(in_place(bench, 1, *slots, session={"global_batch_size": 8}))
    bench.wait(lambda _: "progress" in bench.kinds(1), "it trains")
    return engine


def take_over(bench: FakeBench, spec: GangSpec) -> None:
    bench.engine.apply(spec)
    bench.wait_state(spec.generation, GangState.RUNNING)


def reports(bench: FakeBench, generation: int, kind: ReportKind) -> list[Report]:
    return [report for report in bench.reports["job", generation] if report.kind is kind]


def states(bench: FakeBench) -> list[GangState]:
    return [gang.state for gang in bench.look().values()]


def workers(bench: FakeBench, generation: int) -> dict[str, int | None]:
    return {worker.worker_id: worker.exit_code for worker in bench.look()[generation].workers}


def last_step(bench: FakeBench, generation: int) -> int:
    bench.look()
    return max(report.step for report in bench.reports["job", generation])


def test_a_gang_trains_on_until_the_joiners_are_there(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, join_s=2.0, in_place_pause_s=0.5, steps_per_s={1: 10.0, 2: 20.0})
    begin_s = bench.now_s[0]
    step = last_step(bench, 1)
    for _ in range(2):
        engine.apply(in_place(bench, 2, A, C, session={"global_batch_size": 8}))
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    assert workers(bench, 2) == {"g000001-r000": None, "g000002-r001": None}
    bench.now_s[0] = begin_s + 2.4  # in the middle of the pause
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    assert last_step(bench, 1) == pytest.approx(step + 20, abs=2)
    bench.now_s[0] = begin_s + 2.6
    assert states(bench) == [GangState.ENDED, GangState.RUNNING]
    assert bench.look()[1].outcome is GangOutcome.STOPPED
    assert workers(bench, 1) == {"g000001-r000": None}, "it lives on"
    assert bench.kinds(1).count("stopped") == 0
    first, second = reports(bench, 2, ReportKind.STARTED)
    assert (first.rank, first.worker_id, second.rank, second.worker_id) == (0, "g000001-r000", 1, "g000002-r001")
    assert first.at_s == second.at_s == pytest.approx(begin_s + 2.5)
    assert first.step == second.step == pytest.approx(last_step(bench, 1), abs=1)
    common = {"in_place": True, "pause_s": 0.5, "state_bytes": 44_000_000, "recovered": False}
    assert common.items() <= first.data.items()
    assert common.items() <= second.data.items()
    assert (first.data["from_generation"], second.data["from_generation"]) == (1, 0)
    assert first.data["micro_batch_size"] == 4
    bench.now_s[0] += 5.0
    assert last_step(bench, 2) - first.step == pytest.approx(20.0 * 5.1, abs=3)


def test_leavers_say_so_and_free_their_slots(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, B)
    begin_s = bench.now_s[0]
    engine.apply(in_place(bench, 2, B))  # nobody joins: at once
    bench.now_s[0] = begin_s + 0.2
    assert states(bench) == [GangState.LEAVING, GangState.RUNNING]
    with pytest.raises(EngineError, match="node0:0 is held by job job"):
        engine.apply(bench.spec(1, job_id="other", placement=(A,)))
    bench.now_s[0] = begin_s + 0.7
    assert states(bench) == [GangState.ENDED, GangState.RUNNING]
    assert workers(bench, 1) == {"g000001-r000": 0, "g000001-r001": None}
    (stopped,) = reports(bench, 1, ReportKind.STOPPED)
    (started,) = reports(bench, 2, ReportKind.STARTED)
    assert (stopped.worker_id, stopped.step) == ("g000001-r000", started.step)
    engine.apply(bench.spec(1, job_id="other", placement=(A,)))
    text = engine.read_log("job", 1, "g000001-r001", 0, 1 << 20)
    assert text.data.count(b"started") == 2, "one log for all generations of a worker"
    assert not text.end_of_file
    assert engine.read_log("job", 1, "g000001-r000", 0, 1 << 20).end_of_file


@pytest.mark.parametrize("worker", [1, "g000001-r001"])
def test_survivors_of_a_killed_worker_go_on_from_memory(fake_bench: FakeBench, worker: str | int) -> None:
    bench = fake_bench
    engine = train(bench, A, B)
    engine.kill_worker("job", worker)
    step = last_step(bench, 1)
    bench.now_s[0] += 30.0
    assert states(bench) == [GangState.RUNNING]
    assert workers(bench, 1) == {"g000001-r000": None, "g000001-r001": -9}
    assert last_step(bench, 1) == step
    engine.apply(bench.spec(1, job_id="other", placement=(B,)))  # the slot of the dead is free
    engine.stop("other", 1.0)
    take_over(bench, in_place(bench, 2, A, lost=("g000001-r001",)))
    (started,) = reports(bench, 2, ReportKind.STARTED)
    assert started.data["recovered"]
    assert started.step == pytest.approx(step, abs=2)
    assert workers(bench, 1) == {"g000001-r000": None, "g000001-r001": -9}
    take_over(bench, in_place(bench, 3, A, B))
    assert list(workers(bench, 3)) == ["g000001-r000", "g000003-r001"]
    assert not reports(bench, 3, ReportKind.STARTED)[0].data["recovered"]


def test_survivors_without_a_plan_give_up(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, B)
    engine.kill_worker("job", 0)
    engine.apply(in_place(bench, 2, B))  # it does not know of the death
    bench.now_s[0] += 59.0
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    bench.now_s[0] += 2.0
    ended = bench.look()[1]
    assert (ended.state, ended.outcome) == (GangState.ENDED, GangOutcome.FAILED)
    assert workers(bench, 1) == {"g000001-r000": -9, "g000001-r001": 75}
    (failed,) = reports(bench, 1, ReportKind.FAILED)
    assert failed.worker_id == "g000001-r001"
    with pytest.raises(EngineError, match="no gang is there that could go on in place"):
        engine.apply(in_place(bench, 3, B))


def test_without_survivors_or_by_its_own_fault_a_gang_fails(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, B)
    engine.kill_worker("job", 0)
    engine.kill_worker("job", 1)
    ended = bench.look()[1]
    assert (ended.outcome, [w.exit_code for w in ended.workers]) == (GangOutcome.FAILED, [-9, -9])
    engine.forget("job")
    engine.apply(in_place(bench, 4, A, B, mode=RescaleMode.RESTART))
    bench.wait_state(4, GangState.RUNNING)
    engine.fail_worker("job", 1, exit_code=1, message="ValueError")
    ended = bench.look()[4]
    assert (ended.outcome, ended.failed_rank) == (GangOutcome.FAILED, 1)
    with pytest.raises(KeyError):
        engine.kill_worker("job", 0)


def test_a_hung_worker_is_killed_when_it_is_given_up(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, B, C, D)
    engine.hang_worker("job", 2)
    step = last_step(bench, 1)
    engine.apply(in_place(bench, 2, A, B))  # who hangs does not come to the switch
    bench.now_s[0] += 100.0
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    assert set(workers(bench, 1).values()) == {None}
    assert last_step(bench, 1) == step
    with pytest.raises(EngineError, match="no worker is left"):
        engine.apply(in_place(bench, 3, A, lost=tuple(workers(bench, 1))))
    engine.apply(in_place(bench, 3, A, B, lost=("g000001-r002",)))
    assert workers(bench, 1)["g000001-r002"] == -9
    bench.wait_state(3, GangState.RUNNING)
    assert reports(bench, 3, ReportKind.STARTED)[0].data["recovered"]
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
    assert list(workers(bench, 1).values()) == [None, None, -9, 0]
    bench.now_s[0] += 5.0
    assert last_step(bench, 3) > step + 20


@pytest.mark.parametrize("how", ["behaviour", "hook", "in the middle of the switch"])
def test_a_joiner_that_dies_delays_nobody(fake_bench: FakeBench, how: str) -> None:
    bench = fake_bench
    engine = train(bench, A, joiner_dies=1 if how == "behaviour" else 0, in_place_pause_s=1.0)
    begin_s = bench.now_s[0]
    engine.apply(in_place(bench, 2, A, B))
    if how == "behaviour":
        assert workers(bench, 2)["g000002-r001"] is None, "it is not up yet"
    bench.now_s[0] = begin_s + (0.1 if how == "hook" else 0.7)
    if how != "behaviour":
        engine.kill_worker("job", "g000002-r001")
    assert workers(bench, 2) == {"g000001-r000": None, "g000002-r001": -9}
    bench.now_s[0] = begin_s + 10.0
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    step = last_step(bench, 1)
    assert step > 80, "the others train on"
    engine.apply(in_place(bench, 3, A, C, lost=("g000002-r001",)))
    assert states(bench) == [GangState.RUNNING, GangState.ENDED, GangState.STARTING]
    assert bench.look()[2].outcome is GangOutcome.STOPPED
    bench.wait_state(3, GangState.RUNNING)
    assert reports(bench, 3, ReportKind.STARTED)[0].step > step
    assert not reports(bench, 3, ReportKind.STARTED)[0].data["recovered"]


def test_a_worker_that_dies_in_the_middle_of_a_switch(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, B, in_place_pause_s=5.0)
    engine.apply(in_place(bench, 2, A, B, C))
    bench.now_s[0] += 2.0
    engine.kill_worker("job", 1)
    bench.now_s[0] += 20.0
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    assert workers(bench, 2) == {"g000001-r000": None, "g000001-r001": -9, "g000002-r002": None}
    step = last_step(bench, 1)
    engine.apply(in_place(bench, 3, A, lost=("g000001-r001",)))
    bench.now_s[0] += 1.0  # in the switch that heals it: now another plan comes
    engine.apply(in_place(bench, 4, A, lost=("g000001-r001",)))
    bench.wait_state(4, GangState.RUNNING)
    (started,) = reports(bench, 4, ReportKind.STARTED)
    assert (started.step, started.data["recovered"]) == (pytest.approx(step, abs=2), True)


def test_a_change_that_never_comes_about_is_followed_by_a_restart(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = train(bench, A, never_switches=True)
    engine.apply(in_place(bench, 2, A, B))
    bench.now_s[0] += 300.0
    assert states(bench) == [GangState.RUNNING, GangState.STARTING]
    restart = in_place(bench, 3, A, B, mode=RescaleMode.RESTART)
    engine.apply(restart)
    bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "it saves and leaves")
    assert states(bench) == [GangState.ENDED, GangState.ENDED, GangState.PENDING]
    assert bench.kinds(1)[-2:] == ["checkpoint", "stopped"]
    assert bench.kinds(2) == []
    engine.apply(replace(restart, cleared_generation=1))
    assert bench.look()[3].state is GangState.PENDING, "the second one was there, too"
    engine.apply(replace(restart, cleared_generation=2))
    bench.wait_state(3, GangState.RUNNING)


PHASES = {"joining": 0.2, "switching": 0.7, "thinning": 1.7, "running": 5.0}
"""When after a change has begun it is in which phase; with 0.5 s to join, 1 s to switch and 0.5 s to leave."""


@pytest.mark.parametrize("phase", PHASES)
def test_restart_after_a_change_in_place_saves_once(fake_bench: FakeBench, phase: str) -> None:
    bench = fake_bench
    engine = train(bench, A, B, in_place_pause_s=1.0)
    begin_s = bench.now_s[0]
    engine.apply(in_place(bench, 2, B, C))
    bench.now_s[0] = begin_s + PHASES[phase]
    restart = in_place(bench, 3, A, mode=RescaleMode.RESTART)
    engine.apply(restart)
    gangs = bench.wait(lambda gangs: all(gangs[g].state is GangState.ENDED for g in (1, 2)), "all leave")
    assert [gangs[g].outcome for g in (1, 2)] == [GangOutcome.STOPPED, GangOutcome.STOPPED]
    assert [*bench.kinds(1), *bench.kinds(2)].count("checkpoint") == 1
    assert gangs[3].state is GangState.PENDING
    engine.apply(replace(restart, cleared_generation=2))
    bench.wait_state(3, GangState.RUNNING)


@pytest.mark.parametrize("phase", PHASES)
def test_a_change_in_place_outlives_the_service_in_every_phase(fake_bench: FakeBench, phase: str) -> None:
    """One world is kept in a file and read again in the phase, another is left alone: both end up the same."""
    bench, file = fake_bench, fake_bench.base / "world.json"

    def make() -> FakeEngine:
        behaviour = FakeBehaviour(in_place=True, in_place_pause_s=1.0, startup_s=0.5, save_s=0.5)
        return FakeEngine(
            fake_nodes(2, 2), file.parent / "jobs", clock=lambda: bench.now_s[0], behaviour=behaviour, state_file=file
        )

    first = bench.engine = make()
    first.apply(in_place(bench, 1, A, B))
    bench.wait_state(1, GangState.RUNNING)
    begin_s = bench.now_s[0]
    first.apply(in_place(bench, 2, B, C))
    bench.now_s[0] = begin_s + PHASES[phase]
    seen = first.observe()
    again = make()
    told = [replace(gang, reports=()) for gang in again.observe()]
    assert told == [replace(gang, reports=()) for gang in seen]
    first.world.journal = None
    again.renew("job")
    first.renew("job")
    bench.now_s[0] = begin_s + 10.0
    for engine in (first, again):
        engine.apply(in_place(bench, 2, B, C))
    assert again.restarted().observe() == first.restarted().observe()
    assert [gang.state for gang in again.observe()] == [GangState.ENDED, GangState.RUNNING]


@pytest.mark.parametrize("by", ["stop", "lease"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_stop_or_an_expired_lease_ends_a_change_in_every_phase(fake_bench: FakeBench, phase: str, by: str) -> None:
    bench = fake_bench
    engine = train(bench, A, B, in_place_pause_s=1.0)
    begin_s = bench.now_s[0]
    lease_s = PHASES[phase] if by == "lease" else 1e6
    engine.apply(in_place(bench, 1, A, B, lease_s=lease_s))
    engine.world.of("job")[0].spec = replace(engine.world.of("job")[0].spec, lease_s=lease_s)
    engine.apply(in_place(bench, 2, B, C, lease_s=lease_s))
    bench.now_s[0] = begin_s + PHASES[phase]
    if by == "stop":
        engine.stop("job", 10.0, "enough")
        engine.stop("job", 10.0, "enough")
    gangs = bench.wait(lambda gangs: all(g.state is GangState.ENDED for g in gangs.values()), "all leave")
    assert [gang.outcome for gang in gangs.values()] == [GangOutcome.STOPPED, GangOutcome.STOPPED]
    assert [*bench.kinds(1), *bench.kinds(2)].count("checkpoint") == 1
    engine.forget("job")
    assert engine.observe() == ()


def test_there_must_be_somebody_to_go_on(fake_bench: FakeBench) -> None:
    bench = fake_bench
    engine = behaving(bench, in_place=True)
    with pytest.raises(EngineError, match="no gang is there that could go on in place"):
        engine.apply(in_place(bench, 2, A))
    assert engine.observe() == ()
    engine.apply(in_place(bench, 1, A))
    with pytest.raises(EngineError, match="no gang is there"):
        engine.apply(in_place(bench, 2, A, B))
    bench.wait_state(1, GangState.RUNNING)
    engine.set_busy("node0", 1, "somebody else")
    engine.apply(in_place(bench, 2, A, C))
    with pytest.raises(EngineError, match="held by somebody else"):
        engine.apply(in_place(bench, 3, A, B))
    bench.wait_state(2, GangState.RUNNING)  # what could not be tried has changed nothing
