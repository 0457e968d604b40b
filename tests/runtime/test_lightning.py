"""Lightning trains elastically: the same bits with any number of workers, and while they come, go and die."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gang import Gang
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from elasticflow_airflow.runtime.frameworks import lightning_limits as limits
from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import promote, verify_candidate

if importlib.util.find_spec("lightning") is None:
    pytest.skip("PyTorch Lightning is not installed: pip install lightning", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/support/train_lightning.py"
EPOCHS, STEPS_PER_EPOCH, SAMPLES = 10, 6, 90


class _Later:
    """What is in ``support.lightning_modules``, imported when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything that it collects for such names
            raise AttributeError(name)
        return getattr(importlib.import_module("support.lightning_modules"), name)


modules: Any = _Later()


def make_gang(root: Path, step_s: float = 1.0, name: str = "lightning.pytorch", **env: str) -> Gang:
    """Steps are slow, so that a joiner comes in time, until somebody hurries."""
    env = {"TEST_STEP_S": str(step_s), "TEST_ROOT": str(root / "lightning"), "TEST_LIGHTNING": name, **env}
    (root / "lightning").mkdir(parents=True)
    config = {"epochs": EPOCHS, "global_batch_size": 16, "logical_workers": 8}
    return Gang(root, SCRIPT, env, imports=(name,), **config)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make(**options: Any) -> Gang:
        made.append(make_gang(tmp_path / f"gang{len(made)}", **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


def hurry(run: Gang) -> None:
    (run.folder.parent / "lightning/hurry").touch()


def lines(run: Gang, word: str) -> list[list[str]]:
    return [line.split()[1:] for line in run.output() if line.startswith(word + " ")]


def outcome(run: Gang) -> tuple[str, dict[str, str], dict[int, tuple[str, ...]]]:
    """Weights and best score; the metrics of each epoch; epoch, batch, loss and logged loss of each step.

    The same wherever they were printed.
    """
    ends = {" ".join(words) for words in lines(run, "WEIGHTS")}
    assert len(ends) == 1, run.story()
    epochs: dict[str, set[str]] = {}
    for line in run.output():
        if line.startswith("EPOCH;"):
            _, epoch, values = line.split(";", 2)
            epochs.setdefault(epoch, set()).add(values)
    steps: dict[int, set[tuple[str, ...]]] = {}
    for number, done, *rest in lines(run, "STEP"):
        assert number == done, "Lightning's count of steps and the session's"
        steps.setdefault(int(number), set()).add(tuple(rest[:4]))
    assert all(len(found) == 1 for found in [*epochs.values(), *steps.values()]), (epochs, steps)
    return ends.pop(), {k: v.pop() for k, v in epochs.items()}, {k: v.pop() for k, v in sorted(steps.items())}


def used_once(run: Gang) -> None:
    """Every sample of every epoch was seen exactly once, by one worker."""
    by_epoch: dict[str, list[int]] = {}
    for _, _, epoch, _, _, _, *ids in lines(run, "STEP"):
        by_epoch.setdefault(epoch, []).extend(int(i) for part in ids for i in part.split(","))
    assert sorted(map(int, by_epoch)) == list(range(EPOCHS))
    for epoch, ids in by_epoch.items():
        assert sorted(ids) == list(range(SAMPLES)), f"epoch {epoch}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One worker that nobody disturbs."""
    with make_gang(tmp_path_factory.mktemp("undisturbed"), step_s=0) as one:
        one.plan("alone")
        assert one.finish() == {"alone": 0}, one.story()
        used_once(one)
        return outcome(one)


@pytest.mark.slow
def test_one_two_one_while_it_trains(gang, expected):
    run = gang()
    run.plan("a")
    run.wait(lambda: run.step() > STEPS_PER_EPOCH, "progress")  # the first epoch's checkpoint is there
    run.plan("a", "b")
    run.wait_until_begun()
    began = max(report.step for report in run.reports(ReportKind.STARTED, 2))
    run.wait(lambda: run.step() > began + 2, "progress together")
    run.plan("b")
    run.wait_until_begun()
    hurry(run)
    assert run.finish() == {"a": 0, "b": 0}, run.story()
    found = outcome(run)
    assert found[0] == expected[0]
    assert found[2] == expected[2]
    assert found[1] == expected[1]
    used_once(run)
    switched = [r for r in run.reports(ReportKind.STARTED) if "from_generation" in r.data]
    assert [(r.worker_id, r.generation) for r in switched] == [("a", 2), ("b", 2), ("b", 3)]
    (finished,) = run.reports(ReportKind.FINISHED)
    assert set(finished.data["metrics"]) == {"loss", "loss_step", "loss_epoch", "right", "val_loss"}
    # Who is rank 0 at the end goes on with the first one's checkpoints.
    (best,) = {words[0] for words in lines(run, "BEST")}
    assert Path(best).is_file()
    folder = Path(best).parent
    assert len(list(folder.glob("epoch=*.ckpt"))) == 1
    assert torch.load(folder / "last.ckpt", weights_only=False)["global_step"] == EPOCHS * STEPS_PER_EPOCH


@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_workers_trains_the_same_bits(gang, expected, workers):
    run = gang(step_s=0)
    run.plan(*(f"w{i}" for i in range(workers)))
    assert set(run.finish().values()) == {0}, run.story()
    assert outcome(run) == expected
    used_once(run)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_mixed_precision_and_the_other_name(gang):
    """bfloat16, and the package called pytorch_lightning."""
    results = []
    for workers in (["a"], ["b", "c"]):
        run = gang(step_s=0, TEST_PRECISION="bf16-mixed", name="pytorch_lightning")
        run.plan(*workers)
        assert set(run.finish().values()) == {0}, run.story()
        results.append(outcome(run))
    assert results[0] == results[1]


@pytest.mark.slow
def test_a_worker_is_killed_and_the_other_goes_on(gang, expected):
    run = gang(step_s=0.2)
    run.plan("a", "b")
    run.wait(lambda: run.step() > 8, "progress")
    run.kill("a")
    run.wait(lambda: run.processes["a"].poll() is not None, "its death")
    run.plan("b", lost=["a"])
    run.wait_until_begun()
    assert run.finish() == {"a": -9, "b": 0}, run.story()
    assert outcome(run)[0] == expected[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stop_save_and_restart_in_the_middle_of_an_epoch(gang, expected):
    run = gang(step_s=0.2)
    run.plan("a", "b")
    run.wait(lambda: run.step() > 8, "progress")
    run.plan(mode=RescaleMode.RESTART)
    assert run.finish() == {"a": 0, "b": 0}, run.story()
    (saved,) = run.reports(ReportKind.CHECKPOINT)
    promote(run.folder / "checkpoints", verify_candidate(run.folder / "checkpoints" / saved.data["path"]))
    run.plan("c", mode=RescaleMode.RESTART)
    assert run.finish() == {"a": 0, "b": 0, "c": 0}, run.story()
    assert outcome(run) == expected
    used_once(run)


def dataset() -> TensorDataset:
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs[:, :2] * 2)


@pytest.fixture
def fit(session_globals: None) -> Callable[..., Any]:
    """Fit, here and alone; keyword arguments go to the Trainer."""
    from elasticflow_airflow.runtime.lightning import ElasticStrategy

    def run(
        module: Any = None,
        loader: Any = None,
        ckpt_path: str | None = None,
        logical_workers: int | None = None,
        lengths: Any = None,
        **options: Any,
    ) -> Any:
        strategy = ElasticStrategy(logical_workers=logical_workers, lengths=lengths)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        settings = {"max_epochs": 2, "accelerator": "cpu", "enable_checkpointing": False, **quiet, **options}
        module = module or modules.Small()
        trainer = modules.pl.Trainer(strategy=strategy, **settings)
        trainer.fit(module, loader or DataLoader(dataset(), batch_size=4, shuffle=True), ckpt_path=ckpt_path)
        return trainer

    return run


REFUSED = {
    "manual optimization": lambda fit: fit(modules.manual()),
    "several optimizers": lambda fit: fit(modules.changed(optimizers_wanted=2)),
    "no optimizer": lambda fit: fit(modules.changed(configure_optimizers=lambda self: None)),
    "LBFGS": lambda fit: fit(modules.changed(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))),
    r"backward\(\) of its own": lambda fit: fit(modules.changed(backward=lambda self, loss: loss.backward())),
    "accumulate_grad_batches=2": lambda fit: fit(accumulate_grad_batches=2),
    "num_nodes=2": lambda fit: fit(num_nodes=2),
    "devices=2": lambda fit: fit(devices=2),
    "limit_train_batches": lambda fit: fit(limit_train_batches=3),
    "fast_dev_run": lambda fit: fit(fast_dev_run=True),
    "WeightAveraging": lambda fit: fit(callbacks=[modules.pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1)]),
    "FSDPPrecision": lambda fit: fit(plugins=[modules.pl.plugins.FSDPPrecision("bf16-true")]),
    "DeepSpeedPrecision": lambda fit: fit(plugins=[modules.pl.plugins.DeepSpeedPrecision("32-true")]),
    "WeightedRandomSampler": lambda fit: fit(
        loader=DataLoader(dataset(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 20))
    ),
    r"batch_sampler, or without batch_size.*ElasticStrategy\(lengths=": lambda fit: fit(
        loader=DataLoader(dataset(), batch_sampler=[[0, 1], [2, 3]])
    ),
    "makes batches of shuffled samples": lambda fit: fit(lengths=range(20), loader=DataLoader(dataset(), batch_size=4)),
    "how long to train": lambda fit: fit(max_epochs=-1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_elastic_is_refused_before_training(fit, message, capsys):
    with pytest.raises(ValueError, match=message):
        REFUSED[message](fit)
    assert "elasticflow: started" not in capsys.readouterr().out


def test_a_second_start_finds_that_all_is_done_and_a_longer_one_goes_on(fit, capsys, monkeypatch):
    assert fit().global_step == 10
    first = capsys.readouterr().out
    assert "elasticflow: finished step=10" in first
    trainer = fit()
    assert trainer.strategy.session.steps_done == 10
    second = capsys.readouterr().out
    assert "resumed_from=g000000/step-000000000010" in second
    assert "window_steps" not in second
    longer = fit(max_epochs=3)
    assert (longer.global_step, longer.current_epoch, longer.strategy.session.steps_done) == (15, 3, 15)


def test_lightnings_own_checkpoints_hold_weights_not_the_place_in_training(fit, tmp_path):
    trainer = fit()
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert torch.load(tmp_path / "own.ckpt", weights_only=False)["global_step"] == 10
    with pytest.raises(ValueError, match=r"fit\(ckpt_path=...\)"):
        fit(ckpt_path=str(tmp_path / "own.ckpt"))


def test_a_metric_object_in_the_training_step_is_refused(fit):
    from torchmetrics import MeanMetric

    class Metered(modules.Small):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.mean(loss)
            self.log("mean", self.mean)
            return loss

    with pytest.raises(TypeError, match="of this worker's samples only"):
        fit(Metered())


def test_the_user_hooks_see_each_share_and_the_sum(fit):
    seen: dict[str, list[Any]] = {"shares": [], "gradients": [], "before": []}

    class Hooked(modules.Small):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen["shares"].append(len(batch[0]))
            return batch

        def on_after_backward(self) -> None:
            seen["gradients"].append(float(self.model.weight.grad.norm()))

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen["before"].append(float(self.model.weight.grad.norm()))

    fit(Hooked(), max_steps=3, max_epochs=None)
    assert seen["shares"] == [1] * 12  # batches of 4 in 4 logical workers
    assert len(seen["gradients"]) == 3
    assert min(seen["gradients"]) > 0
    assert seen["gradients"] == seen["before"]


def weights(module: Any) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).tolist()


def test_one_logical_worker_is_what_lightning_does_without_us(fit):
    results = []
    for elastic in (True, False):
        module, hooks = modules.logged(val_dataloader=lambda self: DataLoader(dataset(), batch_size=5)), modules.Hooks()
        options: dict[str, Any] = {"callbacks": [hooks], "max_epochs": 3, "gradient_clip_val": 0.5}
        loader = DataLoader(dataset(), batch_size=6)
        if elastic:
            trainer = fit(module, loader, logical_workers=1, **options)
        else:
            trainer = modules.pl.Trainer(
                accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options
            )
            trainer.fit(module, loader)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        results.append((hooks.calls, weights(module), metrics, trainer.global_step, trainer.current_epoch))
    ours, theirs = results
    assert ours == theirs


def test_a_seed_decides_on_weights_and_order(session_globals, monkeypatch, tmp_path):
    from elasticflow_airflow.runtime.lightning import ElasticStrategy

    def trained(seed: int | None) -> torch.Tensor:
        monkeypatch.setenv("ELASTICFLOW_CHECKPOINT_DIR", str(tmp_path / f"seed-{seed}-{len(list(tmp_path.iterdir()))}"))
        strategy = ElasticStrategy(seed=seed)
        assert strategy.session.seed == (seed or 0)
        module = modules.Small()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = modules.pl.Trainer(
            strategy=strategy, max_epochs=1, accelerator="cpu", enable_checkpointing=False, **quiet
        )
        trainer.fit(module, DataLoader(dataset(), batch_size=4, shuffle=True))
        return module.model.weight.detach().clone()

    usual, seeded = trained(None), trained(7)
    assert torch.equal(usual, trained(0))
    assert torch.equal(seeded, trained(7))
    assert not torch.equal(usual, seeded)


def test_messages_of_the_session_name_nothing_that_a_user_of_lightning_does_not_write(session_globals, monkeypatch):
    """It is the strategy that makes the session: ``runtime.init`` is not in his script."""
    from elasticflow_airflow.runtime.lightning import ElasticStrategy

    session = ElasticStrategy().session
    session.dataloader(dataset(), global_batch_size=4)
    for ask in (lambda: session.total_steps, session._core.start):
        with pytest.raises(ValueError, match=r"length|how long") as refused:
            ask()
        assert "runtime.init" not in str(refused.value)


def test_an_epoch_without_its_short_last_batch_is_what_lightning_makes_of_it(fit, capsys):
    results = []
    for elastic in (True, False):
        module = modules.logged()
        loader = DataLoader(dataset(), batch_size=6, drop_last=True)
        if elastic:
            trainer = fit(module, loader, logical_workers=1)
        else:
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = modules.pl.Trainer(accelerator="cpu", max_epochs=2, **quiet)
            trainer.fit(module, loader)
        results.append((weights(module), trainer.global_step, trainer.current_epoch, trainer.num_training_batches))
    assert results[0] == results[1]
    assert results[0][1:] == (6, 2, 3)
    assert "samples=20 steps=6" in capsys.readouterr().out


def test_samples_of_similar_length_share_a_batch(fit):
    lengths = [(3 * number) % 20 for number in range(20)]
    seen: list[list[int]] = []

    class Look(modules.pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append([lengths[index] for index in batch.batch.indices])

    fit(lengths=lengths, callbacks=[Look()])
    assert len(seen) == 10
    assert all(found == sorted(found, reverse=True) for found in seen)
    assert 19 in seen[0]
    assert 19 in seen[5]


def test_sigterm_saves_at_the_next_step_and_the_next_start_goes_on(fit, tmp_path, monkeypatch):
    class Terminate(modules.pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    for name in ("undisturbed", "stopped"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "undisturbed")
    undisturbed = fit(modules.logged())
    monkeypatch.chdir(tmp_path / "stopped")
    with pytest.raises(SystemExit) as left:
        fit(modules.logged(), callbacks=[Terminate()])
    assert left.value.code == 0
    module = modules.logged()
    trainer = fit(module)
    assert weights(module) == weights(undisturbed.lightning_module)
    assert trainer.callback_metrics == undisturbed.callback_metrics  # the epoch's mean, too


def test_an_early_end_is_told_as_one_that_is_meant(fit, capsys):
    class Stop(modules.pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

    fit(callbacks=[Stop()])
    assert "finished step=3" in (out := capsys.readouterr().out)
    assert "early=the Trainer was told to stop" in out


def test_the_page_is_true(session_globals, monkeypatch, capsys):
    page = (ROOT / "docs/how-to/lightning.md").read_text()
    (snippet,) = re.findall(r"^```python\n(import lightning.*?)^```", page, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    assert scope["trainer"].global_step == 21
    assert "elasticflow: finished step=21 metrics={'loss'" in capsys.readouterr().out
    assert len(re.findall(r"# \d$", snippet, re.MULTILINE)) == 2
    for name in limits._CALLBACKS:
        assert f"`{name}`" in page
    for name in inspect.signature(scope["ElasticStrategy"]).parameters:
        assert f"`{name}`" in page


@pytest.mark.slow
def test_the_example_learns_alone(tmp_path):
    command = [sys.executable, str(ROOT / "docs/examples/train_lightning.py")]
    options: dict[str, Any] = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, **options, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    (finished,) = [line for line in done.stdout.splitlines() if "elasticflow: finished step=114" in line]
    accuracy = float(finished.split("'validation_accuracy': ")[1].split(",")[0].rstrip("}").split("}")[0])
    assert accuracy > 0.9
