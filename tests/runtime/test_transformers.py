"""Hugging Face's Trainer, elastically: one callback, and the same bits for every number of workers. Real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forking import TRANSFORMERS
from support.gang import Gang, random_life

from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import promote, verify_candidate

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install accelerate")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/support/train_transformers.py"
EPOCHS, STEPS_PER_EPOCH = 4, 5
LIFE_EPOCHS = 40
EVALUATE = {
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 4,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
}


def make_gang(root: Path, arguments: dict[str, Any] | None = None, step_s: float = 0.3, **options: Any) -> Gang:
    (root / "trainer").mkdir(parents=True)
    env = {"TEST_STEP_S": str(step_s), "TEST_ROOT": str(root / "trainer"), "HF_HUB_OFFLINE": "1"}
    env["TEST_ARGUMENTS"] = json.dumps(arguments or {})
    env |= {name: options.pop(name) for name in list(options) if name.startswith("TEST_")}
    options = {"epochs": EPOCHS, "global_batch_size": 16, "logical_workers": 8, **options}
    return Gang(root, SCRIPT, env, imports=TRANSFORMERS, **options)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make(*arguments: Any, **options: Any) -> Gang:
        made.append(make_gang(tmp_path / f"gang{len(made)}", *arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


def hurry(run: Gang) -> None:
    (run.folder.parent / "trainer/hurry").touch()


def join(run: Gang, *members: str) -> None:
    """Plan these members; nobody trains on while those that are new warm up, however long it takes them."""
    folder = run.folder.parent / "trainer"
    new = [member for member in members if member not in run.processes]
    (folder / "hold").touch()
    run.plan(*members)
    run.wait(lambda: all((folder / f"warm-{member}").exists() for member in new), "the joiners' rehearsals")
    (folder / "hold").unlink()
    run.wait_until_begun()


def outcome(run: Gang) -> list[str]:
    """Digest of the weights, steps, mean loss, and digest of all that was logged: the same on every worker."""
    ends = {line for line in run.output() if line.startswith("END ")}
    assert len(ends) == 1, run.story()
    return ends.pop().split()[1:]


def undisturbed(run: Gang, *workers: str) -> list[str]:
    hurry(run)
    run.plan(*workers)
    assert set(run.finish().values()) == {0}, run.story()
    return outcome(run)


def progressed(run: Gang, by: int = 1) -> None:
    step = run.step()
    run.wait(lambda: run.step() >= step + by, "progress")


@pytest.mark.slow
def test_the_same_for_one_worker_and_while_a_second_comes_and_the_first_goes(gang):
    expected = undisturbed(gang(EVALUATE), "alone")
    run = gang(EVALUATE)
    run.plan("a")
    progressed(run)
    join(run, "a", "b")
    progressed(run)
    join(run, "b")
    hurry(run)
    assert run.finish() == {"a": 0, "b": 0}, run.story()
    assert outcome(run) == expected
    assert expected[1] == str(EPOCHS * STEPS_PER_EPOCH)
    (end,) = [report for report in run.reports(ReportKind.FINISHED) if report.worker_id == "b"]
    assert end.data["metrics"]["eval_loss"] > 0
    saved = sorted(path.name for path in (run.folder.parent / "trainer/out").iterdir())
    assert len(saved) == 2, "save_total_limit, though two workers have saved in turn"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("classify", marks=pytest.mark.slow),
        pytest.param("mask", marks=pytest.mark.soak),
        pytest.param("gpt2", marks=pytest.mark.soak),
    ],
)
def test_the_same_for_any_number_of_workers(gang, kind):
    # Joiners meet the training at an epoch of theirs: there must be some left for those who leave.
    given = {"TEST_KIND": kind, "epochs": 2 * EPOCHS}
    expected = undisturbed(gang(**given), "alone")
    assert undisturbed(gang(**given), "a", "b") == expected
    assert undisturbed(gang({"dataloader_num_workers": 2}, **given), "a", "b", "c", "d") == expected
    run = gang(**given)
    run.plan("a")
    for members in (("a", "b"), ("a", "b", "c", "d"), ("a", "c"), ("c",)):
        progressed(run)
        join(run, *members)
    hurry(run)
    assert set(run.finish().values()) == {0}, run.story()
    assert outcome(run) == expected


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_same_for_eight_workers(gang):
    expected = undisturbed(gang(EVALUATE), "alone")
    assert undisturbed(gang(EVALUATE), *(f"w{i}" for i in range(8))) == expected
    run = gang(EVALUATE)
    run.plan("a")
    progressed(run)
    join(run, *"abcdefgh")
    progressed(run)
    run.kill("a")
    run.plan(*"bcde", lost=["a"])
    run.wait_until_begun()
    hurry(run)
    assert set(run.finish().values()) == {0, -9}, run.story()
    assert outcome(run) == expected


LIFE = {"eval_strategy": "steps", "eval_steps": 25}


@pytest.fixture(scope="module")
def expected_of_life(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with make_gang(tmp_path_factory.mktemp("undisturbed"), LIFE, epochs=LIFE_EPOCHS) as one:
        return undisturbed(one, "alone")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_random_lives_end_with_the_same_bits(gang, expected_of_life, seed):
    """Workers join, leave, are killed and stopped at random; evaluation, and all that is logged, included."""
    run = gang(LIFE, epochs=LIFE_EPOCHS)
    random_life(run, seed, LIFE_EPOCHS * STEPS_PER_EPOCH)
    assert outcome(run) == expected_of_life


@pytest.mark.slow
def test_the_same_when_workers_are_killed(gang):
    expected = undisturbed(gang(EVALUATE), "alone")
    run = gang(EVALUATE)
    run.plan("a", "b")
    run.wait(lambda: run.step() > 2, "progress")
    run.kill("a")  # the one that prints and saves
    run.plan("b", lost=["a"])
    run.wait_until_begun()
    join(run, "c", "b")
    run.kill("b")
    run.plan("c", lost=["b"])
    run.wait_until_begun()
    hurry(run)
    assert run.finish() == {"a": -9, "b": -9, "c": 0}, run.story()
    assert outcome(run) == expected


@pytest.mark.slow
@pytest.mark.parametrize("torn", ["model.safetensors", pytest.param("trainer_state.json", marks=pytest.mark.soak)])
def test_the_best_model_is_not_lost_with_who_was_writing_it(gang, torn):
    """The first worker dies over the checkpoint of the last step, which is the best one."""
    last = EPOCHS * STEPS_PER_EPOCH
    best_is_last = {**EVALUATE, "eval_steps": last, "save_steps": last}
    whole, run = gang(best_is_last), gang(best_is_last, step_s=0.0, TEST_DIE_AT=str(last), TEST_TORN=torn)
    expected = undisturbed(whole, "alone")
    run.plan("a", "b")
    run.wait(lambda: run.processes["a"].poll() is not None, "its death")
    run.plan("b", lost=["a"])
    assert run.finish() == {"a": -9, "b": 0}, run.story()
    assert outcome(run) == expected
    (end,) = run.reports(ReportKind.FINISHED)
    assert (end.worker_id, end.step) == ("b", last)
    there, here = (one.folder.parent / f"trainer/out/checkpoint-{last}" for one in (whole, run))
    assert sorted(path.name for path in here.iterdir()) == sorted(path.name for path in there.iterdir())
    assert (here / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
    json.loads((here / "trainer_state.json").read_text())


@pytest.mark.slow
def test_stops_early_at_the_same_step_and_resumes_after_a_stop(gang):
    stops = {**EVALUATE, "learning_rate": 0.1, "eval_steps": 2, "save_steps": 2}
    expected = undisturbed(gang(stops, TEST_STOP="2"), "alone")
    assert int(expected[1]) < EPOCHS * STEPS_PER_EPOCH
    assert undisturbed(gang(stops, TEST_STOP="2"), "a", "b") == expected
    run = gang(stops, TEST_STOP="2", step_s=0.3)
    run.plan("a", "b")
    run.wait(lambda: run.step() > 2, "progress")
    run.plan(mode=RescaleMode.RESTART)
    assert run.finish() == {"a": 0, "b": 0}, run.story()
    (saved,) = run.reports(ReportKind.CHECKPOINT)
    checkpoints = run.folder / "checkpoints"
    promote(checkpoints, verify_candidate(checkpoints / saved.data["path"]))
    hurry(run)
    run.plan("c", mode=RescaleMode.RESTART)
    assert run.finish()["c"] == 0, run.story()
    assert outcome(run) == expected
    (finished,) = run.reports(ReportKind.FINISHED)
    assert finished.data["early"] == "the Trainer's callbacks have stopped it"


def alone(root: Path, *command: str, **env: str) -> list[str]:
    (root / "trainer").mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_ROOT": str(root / "trainer"), "HF_HUB_OFFLINE": "1", **env}
    done = subprocess.run(
        [*(command or (sys.executable,)), str(SCRIPT)], env=variables, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    (end,) = {line for line in done.stdout.splitlines() if line.startswith("END ")}
    return end.split()[1:]


@pytest.mark.slow
def test_the_same_alone_and_under_a_bare_torchrun(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert alone(tmp_path / "two", *torchrun) == alone(tmp_path / "one")


@pytest.mark.slow
def test_goes_on_from_a_checkpoint_of_the_trainers(tmp_path):
    saving = json.dumps({"save_strategy": "steps", "save_steps": 7})
    whole = alone(tmp_path / "whole", TEST_ARGUMENTS=saving)
    resumed = alone(
        tmp_path / "rest",
        TEST_ARGUMENTS=saving,
        TEST_RESUME=str(tmp_path / "whole/trainer/out/checkpoint-7"),
    )
    assert resumed[:2] == whole[:2]
