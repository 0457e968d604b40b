"""Workers come, go and die while they train, and the weights stay the same, bit for bit. Real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gang import Gang, random_life

from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import promote, verify_candidate

SCRIPT = Path(__file__).parents[1] / "support" / "train_small.py"
EPOCHS = 40
STEPS = EPOCHS * 6


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make(model: str = "convolution", step_s: float = 0.01, **config: Any) -> Gang:
        env = {"TEST_MODEL": model, "TEST_STEP_S": str(step_s)}
        options = {"epochs": EPOCHS, "global_batch_size": 16, "logical_workers": 8, **config}
        made.append(Gang(tmp_path / f"gang{len(made)}", SCRIPT, env, **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


def trained(gang: Gang) -> tuple[str, list[str]]:
    """Digest of the weights and the loss of each step, the same wherever they were printed."""
    digests = {line.split()[1] for line in gang.output() if line.startswith("WEIGHTS")}
    assert len(digests) == 1, gang.story()
    losses: dict[int, set[str]] = {}
    for line in gang.output():
        if line.startswith("STEP"):
            _, step, _, loss, _ = line.split()
            losses.setdefault(int(step), set()).add(loss)
    # A joiner's rehearsals print as well: at the step where it stood.
    return digests.pop(), [min(losses[step]) for step in sorted(losses)]


def undisturbed(gang: Callable[..., Gang], *workers: str, **options: Any) -> str:
    one = gang(**{"step_s": 0.0, **options})
    one.plan(*(workers or ("alone",)))
    codes = one.finish()
    assert set(codes.values()) == {0}, one.story()
    return trained(one)[0]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of one worker that nobody disturbs."""
    with Gang(
        tmp_path_factory.mktemp("undisturbed"),
        SCRIPT,
        {"TEST_STEP_S": "0"},
        epochs=EPOCHS,
        global_batch_size=16,
        logical_workers=8,
    ) as one:
        one.plan("alone")
        assert one.finish() == {"alone": 0}, one.story()
        return trained(one)[0]


@pytest.mark.slow
def test_grow_shrink_and_move_while_it_trains(gang, expected):
    run = gang(step_s=0.1)
    run.plan("a")
    run.wait(lambda: run.step() > 5, "progress")
    run.plan("a", "b")
    run.wait_until_begun()
    run.plan("b")
    run.wait_until_begun()
    run.hurry()
    assert run.finish() == {"a": 0, "b": 0}, run.story()
    assert trained(run)[0] == expected
    switched = [r for r in run.reports(ReportKind.STARTED) if "from_generation" in r.data]
    assert [(r.worker_id, r.generation) for r in switched] == [("a", 2), ("b", 2), ("b", 3)]
    assert all(r.data["pause_s"] >= 0 and not r.data["recovered"] for r in switched)
    assert switched[1].data["state_bytes"] > 0
    (left,) = run.reports(ReportKind.STOPPED)
    assert (left.worker_id, left.generation) == ("a", 2)


def test_a_worker_is_killed_and_the_other_goes_on_from_memory(gang, expected):
    run = gang()
    run.plan("a", "b")
    run.wait(lambda: run.step() > 20, "progress")
    run.kill("a")
    run.wait(lambda: run.processes["a"].poll() is not None, "its death")
    run.plan("b", lost=["a"])
    run.wait_until_begun()
    assert run.finish() == {"a": -9, "b": 0}, run.story()
    assert trained(run)[0] == expected
    (recovered,) = list(run.reports(ReportKind.STARTED, 2))
    assert recovered.data["recovered"]
    assert recovered.step >= 20
    # No step was lost: none was done twice.
    steps = [
        int(line.split()[1]) for line in (run.folder / "logs" / "b.log").read_text().splitlines() if "STEP" in line
    ]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up(gang, expected):
    run = gang()
    run.plan("a", "b")
    run.wait(lambda: run.step() > 20, "progress")
    run.kill("b", signal.SIGSTOP)
    run.plan("a", lost=["b"])
    run.wait_until_begun()
    run.kill("b")
    assert run.finish() == {"a": 0, "b": -9}, run.story()
    assert trained(run)[0] == expected


@pytest.mark.slow
def test_a_joiner_that_dies_delays_nobody(gang, expected):
    run = gang(step_s=0.1)
    run.plan("a")
    run.wait(lambda: run.step() > 5, "progress")
    run.plan("a", "b")
    run.wait(lambda: any(p.name == "b.json" for p in run.folder.glob("heartbeats/*")), "the joiner's first sign")
    run.kill("b")
    before = run.step()
    run.wait(lambda: run.step() > before + 10, "progress in spite of it")
    run.plan("a", lost=["b"])
    run.wait_until_begun()
    run.hurry()
    assert run.finish() == {"a": 0, "b": -9}, run.story()
    assert trained(run)[0] == expected


@pytest.mark.slow
def test_everybody_leaves_and_others_come(gang, expected):
    run = gang(step_s=0.3)
    run.plan("a", "b")
    run.wait(lambda: run.step() > 5, "progress")
    run.plan("c", "d")
    run.wait_until_begun()
    run.hurry()
    assert set(run.finish().values()) == {0}, run.story()
    assert trained(run)[0] == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_worker_becomes_two_four_and_eight_and_one_again(gang, expected):
    run = gang(step_s=0.5)
    run.plan("a")
    run.wait(lambda: run.step() > 5, "progress")
    for workers in ("ab", "abcd", "abcdefgh", "h"):
        run.plan(*workers)
        run.wait_until_begun()
    run.hurry()
    assert run.finish() == dict.fromkeys("abcdefgh", 0), run.story()
    assert trained(run)[0] == expected
    begun = {(r.generation, r.rank) for r in run.reports(ReportKind.STARTED) if "from_generation" in r.data}
    assert begun == {(2, 0), (2, 1), *((3, r) for r in range(4)), *((4, r) for r in range(8)), (5, 0)}


@pytest.mark.slow
def test_stop_save_and_restart_after_a_change_in_place(gang, expected):
    run = gang(step_s=0.3)
    run.plan("a")
    run.wait(lambda: run.step() > 5, "progress")
    run.plan("a", "b")
    run.wait_until_begun()
    run.plan(mode=RescaleMode.RESTART)
    run.hurry()
    assert run.finish() == {"a": 0, "b": 0}, run.story()
    (saved,) = run.reports(ReportKind.CHECKPOINT)
    promote(run.folder / "checkpoints", verify_candidate(run.folder / "checkpoints" / saved.data["path"]))
    run.plan("c", "d", mode=RescaleMode.RESTART)
    assert run.finish() == {"a": 0, "b": 0, "c": 0, "d": 0}, run.story()
    assert trained(run)[0] == expected


@pytest.mark.slow
def test_a_stop_after_a_death_loses_no_step(gang, expected):
    """The first rank is the one that died; no plan without it comes, but one that stops all."""
    run = gang(step_s=0.05)
    run.plan("a", "b")
    run.wait(lambda: run.step() > 20, "progress")
    run.kill("a")
    run.wait(lambda: run.processes["a"].poll() is not None, "its death")
    run.wait(lambda: bool(run.reports(ReportKind.WARNING)), "the news of it")
    run.plan(mode=RescaleMode.RESTART)
    assert run.finish() == {"a": -9, "b": 0}, run.story()
    (saved,) = run.reports(ReportKind.CHECKPOINT)
    steps = [line.split()[1] for line in (run.folder / "logs" / "b.log").read_text().splitlines() if "STEP" in line]
    assert (saved.worker_id, saved.step) == ("b", int(steps[-1]))
    promote(run.folder / "checkpoints", verify_candidate(run.folder / "checkpoints" / saved.data["path"]))
    run.hurry()
    run.plan("c", mode=RescaleMode.RESTART)
    assert run.finish() == {"a": -9, "b": 0, "c": 0}, run.story()
    assert trained(run)[0] == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["convolution", "bert", "bfloat16", "float16"])
def test_four_workers_train_the_same_bits_as_one(gang, model):
    same_bits(gang, model, 2, 1, 4)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["convolution", "bert", "bfloat16", "float16"])
def test_any_number_of_workers_trains_the_same_bits(gang, model):
    same_bits(gang, model, 5, 1, 2, 4, 8)


def same_bits(gang: Callable[..., Gang], model: str, epochs: int, *sizes: int) -> None:
    digests = {w: undisturbed(gang, *(f"w{i}" for i in range(w)), model=model, epochs=epochs) for w in sizes}
    assert len(set(digests.values())) == 1, digests


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_random_life_ends_with_the_same_bits(gang, expected):
    run = gang(step_s=0.12)
    random_life(run, 1, STEPS)
    assert trained(run)[0] == expected


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("model", ["convolution", "bert", "bfloat16", "float16"])
def test_many_random_lives_end_with_the_same_bits(gang, model, seed):
    run = gang(model, step_s=0.12)
    random_life(run, seed, STEPS)
    assert trained(run)[0] == undisturbed(gang, model=model)
