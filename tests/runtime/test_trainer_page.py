"""The page and the example about Hugging Face's Trainer are true, and its datasets train as any other."""

from __future__ import annotations

import ast
import inspect
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forking import TRANSFORMERS
from support.gang import Gang
from torch import nn

from elasticflow_airflow.runtime.protocol import Promotion

accelerate = pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate: pip install accelerate")
transformers = pytest.importorskip("transformers", reason="pip install 'elasticflow-airflow[transformers]'")
datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed: pip install datasets")

from elasticflow_airflow.runtime import transformers as elastic  # noqa: E402
from elasticflow_airflow.runtime.frameworks import trainer_limits  # noqa: E402  (after the skips)

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/train_trainer.py"
PAGE = (ROOT / "docs/how-to/transformers-trainer.md").read_text()
REFUSED_ON_PAGE = PAGE[PAGE.index("## What is refused") :]


class Line(nn.Module):
    """As much of a model as a Trainer needs; draws nothing at random."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predictions = self.line(x).squeeze(1)
        return {"loss": nn.functional.mse_loss(predictions, labels), "logits": predictions}


def samples(count: int = 21) -> Any:
    """A dataset of Hugging Face's, with a column that the model does not take."""
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(5))
    columns = {"x": inputs.tolist(), "labels": inputs.sum(1).tolist(), "text": [f"row {i}" for i in range(count)]}
    return datasets.Dataset.from_dict(columns)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads for matrices as small as these only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make(session_globals: None, tmp_path: Path) -> Callable[..., Any]:
    """A Trainer with our callback; keyword arguments are those of TrainingArguments, but for those named here."""

    def build(
        cls: type = transformers.Trainer,
        callbacks: Any = None,
        dataset: Any = None,
        model: Any = None,
        more: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        settings = {
            "output_dir": str(tmp_path / "out"),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.05,
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "use_cpu": True,
            "report_to": [],
            **arguments,
        }
        return cls(
            model=model or Line(),
            args=transformers.TrainingArguments(**settings),
            train_dataset=samples() if dataset is None else dataset,
            callbacks=[elastic.ElasticCallback()] if callbacks is None else callbacks,
            **(more or {}),
        )

    return build


def logged(trainer: Any) -> list[dict[str, Any]]:
    timing = ("runtime", "per_second", "total_flos")
    return [{k: v for k, v in line.items() if not any(t in k for t in timing)} for line in trainer.state.log_history]


def weights(trainer: Any) -> list[float]:
    return torch.cat([value.detach().reshape(-1) for value in trainer.model.state_dict().values()]).tolist()


# -- what is on the page ------------------------------------------------------------------------------------------


def test_the_snippet_trains(session_globals, capsys):
    (snippet,) = re.findall(r"^```python\n(import torch\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    scope: dict[str, Any] = {}
    exec(snippet, scope)
    assert scope["trainer"].state.global_step == 20
    assert "elasticflow: finished step=20 metrics={'train_runtime'" in capsys.readouterr().out
    assert len(re.findall(r"# \d$", snippet, re.MULTILINE)) == 2
    for name in inspect.signature(elastic.ElasticCallback).parameters:
        assert f"`{name}`" in PAGE


class StopsEpoch(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = True


class OwnLoader(transformers.Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


def trained_twice(make: Callable[..., Any]) -> None:
    trainer = make()
    trainer.train()
    trainer.train()


def added_late(make: Callable[..., Any]) -> None:
    trainer = make(callbacks=[])
    trainer.add_callback(elastic.ElasticCallback())
    trainer.train()


def spread_model() -> Any:
    """As ``from_pretrained(device_map="auto")`` returns it on a machine with two devices."""
    model: Any = Line()
    model.hf_device_map = {"line": 0, "rest": 1}
    return model


def two_gpus(make: Callable[..., Any]) -> None:
    trainer = make(callbacks=[])
    trainer.args._n_gpu = 2  # this machine need not have them
    trainer_limits.refuse_unsupported(trainer, ours=elastic.ElasticMixin)


REFUSED: dict[str, Callable[[Any], object]] = {
    "deepspeed": lambda make: make(deepspeed="config.json"),
    "fsdp": lambda make: make(fsdp=True),
    "parallelism_config": lambda make: make(parallelism_config=accelerate.ParallelismConfig(tp_size=2)),
    "device_map": lambda make: make(model=spread_model()),
    "CUDA_VISIBLE_DEVICES": two_gpus,
    "streaming": lambda make: make(dataset=samples().to_iterable_dataset(), max_steps=3),
    "train_sampling_strategy": lambda make: make(train_sampling_strategy="batch_rebalance"),
    "length_column_name": lambda make: make(train_sampling_strategy="group_by_length").train(),
    "auto_find_batch_size": lambda make: make(auto_find_batch_size=True),
    "enable_jit_checkpoint": lambda make: make(enable_jit_checkpoint=True),
    "optim": lambda make: make(optim="galore_adamw_layerwise", optim_target_modules=["line"]),
    "get_train_dataloader": lambda make: make(OwnLoader),
    "hyperparameter_search": lambda make: make()._init_training_state(1, 1, 1, None, object()),
    r"second `?train": trained_twice,
    "add_callback|added to a Trainer": added_late,
    "should_epoch_stop": lambda make: make(callbacks=[elastic.ElasticCallback(), StopsEpoch()]).train(),
}
"""Found both in a row of the page's table and in the message."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_page_says_is_refused_is(make, name):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=name):
        REFUSED[name](make)


SHARDED = """
import sys
from transformers import TrainingArguments
from elasticflow_airflow.runtime.transformers import ElasticCallback
arguments = TrainingArguments("out", report_to=[], fsdp=sys.argv[1:] == ["--fsdp"])
sys.exit("the arguments were taken")
"""
"""Made by torchrun's worker or alone; the Trainer, with its callback, would come next."""
WHOLE = "elastic workers have the whole model each"


@pytest.mark.parametrize("cls", [transformers.Trainer, elastic.ElasticTrainer])
@pytest.mark.parametrize("value", [True, "full_shard", ["full_shard", "offload"]])
def test_sharding_is_refused_where_the_arguments_are_made(make, cls, value):
    """Before the Trainer says that it needs several processes, which it never sees, and before deepspeed is missed."""
    for asked in ({"fsdp": value}, {"deepspeed": {"stage": 2}, "use_cpu": False}):
        with pytest.raises(ValueError, match=WHOLE) as refused:
            make(cls, **asked)
        assert str(refused.value).startswith(f"{min(asked)}=: ")
    assert make(cls, deepspeed=None, fsdp=None).args.fsdp is None


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "PARALLELISM_CONFIG"])
def test_sharding_that_accelerate_launch_asks_for_is_refused(make, monkeypatch, kind):
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(ValueError, match=f"ACCELERATE_USE_{kind}.*{WHOLE}"):
        make()


@pytest.mark.slow
def test_workers_of_torchrun_are_refused_sharding(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SHARDED)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects=3"]
    done = subprocess.run([*torchrun, *logs, str(script), "--fsdp"], cwd=tmp_path, capture_output=True, timeout=250)
    assert done.returncode == 1
    said = [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stderr.log")]
    # Who is second to fail may be ended by torchrun before it can say so.
    assert any(f"ValueError: fsdp=: {WHOLE}" in text for text in said), said
    assert not any("the arguments were taken" in text for text in said)


def test_the_page_names_all_that_is_refused_and_nothing_else():
    rows = [row for row in REFUSED_ON_PAGE.splitlines() if row.startswith("| ")][1:]
    for row in rows:
        assert any(re.search(name, row) for name in REFUSED), f"no test refuses {row}"
    for name in REFUSED:
        assert any(re.search(name, row) for row in rows), f"the page does not say that {name} is refused"
    for name in trainer_limits._OURS:
        assert f"`{name}`" in REFUSED_ON_PAGE
    # Every raise in the code has a test above: the table has no fewer kinds than the code.
    raised = [
        node
        for module in (trainer_limits, elastic)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Raise)
    ]
    internal = (
        5  # too old a transformers; no train_dataset; backward, _run before train(); a callback without a Trainer
    )
    together = 2  # deepspeed, fsdp and parallelism_config are one
    assert len(raised) - internal + together == len(REFUSED)


# -- what the page guarantees -------------------------------------------------------------------------------------


def test_one_logical_worker_is_what_the_trainer_does_without_us(make):
    """With a dataset of Hugging Face's: weights, losses, gradient norms and rates, bit for bit."""
    ours = make(callbacks=[elastic.ElasticCallback(logical_workers=1)], train_sampling_strategy="sequential")
    theirs = make(callbacks=[], train_sampling_strategy="sequential")
    outputs = [trainer.train() for trainer in (ours, theirs)]
    assert weights(ours) == weights(theirs)
    assert logged(ours) == logged(theirs)
    assert outputs[0].training_loss == outputs[1].training_loss
    assert len(logged(ours)) == 12 + 1


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_epoch_without_its_short_last_batch(make, accumulation, capsys):
    """21 samples in global batches of 4 or 8; where gradients accumulate, none is made of fewer micro-batches."""
    options = {"dataloader_drop_last": True, "gradient_accumulation_steps": accumulation}
    trainer = make(**options)
    trainer.train()
    per_epoch = 5 // accumulation
    assert trainer.state.global_step == trainer.state.max_steps == 2 * per_epoch
    assert (trainer.state.epoch, trainer.state.num_train_epochs) == (2.0, 2)
    assert f"samples=21 steps={2 * per_epoch}" in capsys.readouterr().out


def test_with_whole_batches_only_one_logical_worker_is_what_the_trainer_does(make):
    options = {"dataloader_drop_last": True, "train_sampling_strategy": "sequential"}
    ours = make(callbacks=[elastic.ElasticCallback(logical_workers=1)], **options)
    theirs = make(callbacks=[], **options)
    for trainer in (ours, theirs):
        trainer.train()
    assert weights(ours) == weights(theirs)
    assert logged(ours) == logged(theirs)


class Tokens(nn.Module):
    """As much of a language model as a Trainer needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.values = nn.Embedding(10, 1)
        self.widths: list[int] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.widths.append(input_ids.shape[1])
        predictions = self.values(input_ids).mean(dim=(1, 2))
        return {"loss": nn.functional.mse_loss(predictions, labels), "logits": predictions}


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tokens = [torch.as_tensor(row["input_ids"]) for row in rows]
    labels = torch.tensor([float(row["labels"]) for row in rows])
    return {"input_ids": nn.utils.rnn.pad_sequence(tokens, batch_first=True), "labels": labels}


@pytest.mark.parametrize("kind", ["counted", "column"])
def test_samples_of_similar_length_share_a_batch(make, monkeypatch, tmp_path, kind):
    lengths = [1 + (7 * number) % 40 for number in range(40)]
    rows = datasets.Dataset.from_dict(
        {"input_ids": [[1] * length for length in lengths], "labels": [1.0] * 40, "tokens": lengths}
    )
    found = {}
    for strategy in ("group_by_length", "random"):
        (tmp_path / strategy).mkdir()
        monkeypatch.chdir(tmp_path / strategy)
        trainer = make(
            dataset=rows,
            model=Tokens(),
            callbacks=[elastic.ElasticCallback(logical_workers=1)],
            more={"data_collator": padded},
            train_sampling_strategy=strategy,
            length_column_name="tokens" if kind == "column" else "length",
        )
        trainer.train()
        plan = trainer._elastic.data.loader.plan
        assert plan.lengths is None or plan.lengths.values.tolist() == lengths
        found[strategy] = sum(trainer.model.widths)
        assert trainer.state.global_step == 20
    assert found["group_by_length"] < 0.9 * found["random"]


class Own(elastic.ElasticTrainer):
    """A class of a user's own."""


def test_an_elastic_trainer_trains_what_the_trainer_does(make):
    options = {"elastic": elastic.ElasticOptions(logical_workers=1)}
    ours = make(Own, callbacks=[], more=options, train_sampling_strategy="sequential")
    theirs = make(callbacks=[], train_sampling_strategy="sequential")
    outputs = [trainer.train() for trainer in (ours, theirs)]
    assert weights(ours) == weights(theirs)
    assert outputs[0].training_loss == outputs[1].training_loss
    assert ours._elastic.session.logical_workers == 1


def test_the_options_of_an_elastic_trainer_reach_the_session(make):
    trainer = make(Own, callbacks=[], more={"elastic": elastic.ElasticOptions(logical_workers=3)})
    with pytest.raises(ValueError, match="logical_workers=3: it must be a power of two"):
        trainer.train()


def test_a_dataset_of_hugging_face_is_one_as_any_other(make, monkeypatch, tmp_path):
    """The same bits as from a list of its rows, shuffled, also with loader processes and a transform on the fly."""
    rows = [{"x": torch.tensor(row["x"]), "labels": row["labels"]} for row in samples()]
    on_the_fly = samples().with_transform(lambda batch: {"x": batch["x"], "labels": batch["labels"]})
    found = []
    for number, (dataset, options) in enumerate(
        (
            (rows, {}),
            (samples(), {}),
            (samples().with_format("torch"), {"dataloader_num_workers": 2}),
            (on_the_fly, {"remove_unused_columns": False}),
        )
    ):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        trainer = make(dataset=dataset, **options)
        trainer.train()
        found.append((weights(trainer), logged(trainer)))
    assert found == found[:1] * len(found)
    assert len(found[0][1]) == 12 + 1


def test_stops_early_with_the_best_model_and_a_second_start_knows_it(make, tmp_path):
    options: dict[str, Any] = {
        "optim": "sgd",
        "learning_rate": 0.9,  # too large: it gets worse and worse
        "lr_scheduler_type": "constant",
        "num_train_epochs": 5,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }

    def train() -> Any:
        callbacks = [elastic.ElasticCallback(), transformers.EarlyStoppingCallback(2)]
        trainer = make(callbacks=callbacks, more={"eval_dataset": samples(8)}, **options)
        trainer.train()
        return trainer

    first = train()
    assert first.state.global_step == 3 * 6
    assert first.state.best_global_step == 6
    assert first.state.best_model_checkpoint == str(tmp_path / "out/checkpoint-6")
    best = make(callbacks=[], model=first._load_best_model() or first.model)
    assert weights(best) == weights(first)
    second = train()
    assert (second.state.global_step, second.state.best_global_step) == (18, 6)
    assert weights(second) == weights(first)


@pytest.mark.parametrize("left", ["torn", "nothing"])
def test_a_start_completes_the_checkpoint_that_the_last_one_left_torn(make, tmp_path, left):
    """All were told to stop while it was being written: the session's checkpoint is of the same step."""

    def train() -> Any:
        options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
        trainer = make(more={"eval_dataset": samples(8)}, **options)
        trainer.train()
        return trainer

    first = train()
    best = tmp_path / "out/checkpoint-12"
    assert first.state.best_model_checkpoint == str(best)
    model = (best / "model.safetensors").read_bytes()
    if left == "torn":
        (best / "model.safetensors").write_bytes(model[: len(model) // 2])
        (best / "trainer_state.json").write_text('{"epoch": ')
    else:
        shutil.rmtree(best)
    second = train()
    assert (weights(second), second.state.best_global_step) == (weights(first), 12)
    assert (best / "model.safetensors").read_bytes() == model


def test_a_checkpoint_of_the_trainers_is_where_to_start_until_there_is_one_of_the_sessions(
    make, tmp_path, monkeypatch, capsys
):
    whole = make(save_strategy="steps", save_steps=5)
    whole.train()
    saved = str(tmp_path / "out/checkpoint-5")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    for resumed_from in ("", "resumed_from=g000000/step-000000000012"):
        rest = make()
        rest.train(resume_from_checkpoint=saved)
        assert (weights(rest), rest.state.global_step) == (weights(whole), 12)
        output = capsys.readouterr().out
        assert resumed_from in output
        assert ("started step=5 " in output) == (not resumed_from)


# -- the example --------------------------------------------------------------------------------------------------


class Terminate(transformers.TrainerCallback):
    """Somebody types ``kill PID`` after 50 steps of a process."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        if self.steps == 50:
            os.kill(os.getpid(), signal.SIGTERM)


def run_example(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    return (folder / "best/model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_example_learns_and_resumes_after_a_kill(session_globals, tmp_path, monkeypatch, capsys):
    expected = run_example(tmp_path / "undisturbed", monkeypatch)
    output = capsys.readouterr().out
    (finished,) = [line for line in output.splitlines() if "elasticflow: finished step=114" in line]
    accuracy = re.search(r"'eval_accuracy': ([\d.]+)", finished)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9

    with monkeypatch.context() as patched:
        defaults = transformers.trainer.DEFAULT_CALLBACKS
        patched.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*defaults, Terminate])
        with pytest.raises(SystemExit) as left:
            run_example(tmp_path / "killed", patched)
    assert left.value.code == 0
    stopped = Promotion.read(tmp_path / "killed/elasticflow-checkpoints")
    assert stopped is not None
    assert 50 <= stopped.step <= 51
    capsys.readouterr()
    assert run_example(tmp_path / "killed", monkeypatch) == expected
    assert f"resumed_from=g000000/step-{stopped.step:012d}" in capsys.readouterr().out


@pytest.mark.slow
def test_two_workers_train_the_examples_bits(tmp_path):
    found = []
    for members in (["a"], ["a", "b"]):
        folder = tmp_path / str(len(members))
        folder.mkdir()
        config = {"epochs": 3, "global_batch_size": 16, "logical_workers": 8, "working_dir": str(folder)}
        with Gang(folder / "gang", EXAMPLE, {"HF_HUB_OFFLINE": "1"}, imports=TRANSFORMERS, **config) as gang:
            gang.plan(*members)
            assert set(gang.finish().values()) == {0}, gang.story()
        found.append((folder / "best/model.safetensors").read_bytes())
    assert found[0] == found[1]
