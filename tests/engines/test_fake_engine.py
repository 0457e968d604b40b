"""What the fake engine adds to the contract: modelled speed, failures on demand, a world that outlives its process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow_airflow.engines.fake import BEHAVIOUR_ENV, FakeBehaviour, FakeEngine, fake_nodes
from elasticflow_airflow.engines.port import EngineError, GangOutcome, GangState
from elasticflow_airflow.runtime.manifest import CheckpointError, verify_candidate
from elasticflow_airflow.runtime.protocol import Promotion, ReportKind

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
        return FakeEngine(fake_nodes(1, 2), clock=lambda: now_s[0], state_file=tmp_path / "world.json")

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
