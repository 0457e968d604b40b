"""A script run alone: the session promotes its own checkpoints and resumes from them."""

# What raises here is the end of a step: the with statement and what is in it belong together.
# ruff: noqa: PT012, SIM117

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.cases import slow
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.protocol import Promotion
from elasticflow_airflow.runtime.stepping.optimizer_step import micro_batches
from elasticflow_airflow.runtime.stores.manifest import list_candidates, promoted

HERE = Path("elasticflow-checkpoints")


def regression() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 2, generator=generator))


def terminate_at(step: int):
    def before_step(done: int) -> None:
        if done == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return before_step


def interrupted(build, step: int, **arguments):
    """Train until a SIGTERM before step ``step``; the step under way is finished first."""
    training = build(**arguments)
    with pytest.raises(SystemExit) as left:
        training.run(before_step=terminate_at(step))
    assert left.value.code == 0
    assert training.session.steps_done == step + 1
    return training


# -- length -------------------------------------------------------------------------------------------------------

UNFINISHED = """
import torch
from elasticflow_airflow import runtime

session = runtime.init(steps=2)
loader = session.dataloader(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch_size=4)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.register(model, optimizer)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for (inputs,) in step.split(batch):
                step.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_whole_training(training, capsys):
    run = training(epochs=2).run()
    assert run.epochs_seen == [0, 1]
    assert sorted(run.used) == sorted([*range(20), *range(20)])
    assert run.session.steps_done == run.session.total_steps == 8  # 20 samples are 6 + 6 + 6 + 2
    assert run.losses[-1] < run.losses[0]
    assert (run.session.rank, run.session.world_size, run.session.is_main) == (0, 1, True)
    run.session.finish(metrics={"accuracy": torch.tensor(0.5)})
    run.session.finish()
    out = capsys.readouterr().out
    assert (
        "elasticflow: started step=0 micro_batch_size=3 logical_workers=2 seed=0 "
        f"threads={torch.get_num_threads()} in_place=False samples=20 steps=8" in out
    )
    assert out.count("elasticflow: finished step=8 metrics={'accuracy': 0.5}") == 1
    found = promoted(HERE.absolute(), pytest.fail)
    assert found is not None
    assert (found.step, found.metadata["epoch"], found.metadata["step_in_epoch"]) == (8, 2, 0)


def test_an_epoch_without_its_short_last_batch(training, capsys):
    run = training(epochs=2, drop_last=True, checkpoint_dir="undisturbed").run()
    assert (len(run.loader), run.session.total_steps, run.session.steps_done) == (3, 6, 6)
    assert run.epochs_seen == [0, 1]
    for epoch in (run.used[:18], run.used[18:]):
        assert len(set(epoch)) == 18
    assert "in_place=False samples=20 steps=6" in capsys.readouterr().out
    before = interrupted(training, 3, epochs=2, drop_last=True)
    assert before.session.epoch == 1
    after = training(epochs=2, drop_last=True).run()
    assert before.used + after.used == run.used
    assert torch.equal(after.parameters(), run.parameters())


def test_the_short_last_batch_comes_back_with_a_warning(training, capsys):
    interrupted(training, 1, epochs=2, drop_last=True)
    training(epochs=2).run()
    assert "(drop_last was True, is False): training goes on at step 2" in capsys.readouterr().err


def test_steps_end_in_the_middle_of_an_epoch(training):
    run = training(steps=6).run()
    assert run.epochs_seen == [0, 1]
    assert len(run.losses) == run.session.total_steps == 6
    assert sorted(run.used[:20]) == list(range(20))
    assert len(run.used) == 32


def test_the_script_may_say_the_length_where_it_loops(training):
    assert training().run(count=3).session.total_steps == 12


def test_what_init_says_wins_over_the_loop(training):
    assert training(epochs=1).run(count=3).session.total_steps == 4


def test_an_unknown_length_is_an_error(training):
    run = training()
    with pytest.raises(ValueError, match="the length of the training is not known yet"):
        _ = run.session.total_steps
    with pytest.raises(
        ValueError, match=r"nobody has said how long to train, .*session\.epochs\(n\), say steps=, epochs= or target"
    ):
        run.run()


def test_epochs_and_steps_contradict(session_globals):
    with pytest.raises(ValueError, match="give steps= or epochs=, not both"):
        runtime.init(epochs=1, steps=5)


# -- the gradient -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5, 100])
def test_micro_batches_give_the_gradient_of_the_whole_batch(training, micro_batch_size):
    whole = training(epochs=2, checkpoint_dir="whole").run()
    parts = training(epochs=2, checkpoint_dir="parts", micro_batch_size=micro_batch_size).run()
    assert parts.used == whole.used
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)
    torch.testing.assert_close(parts.parameters(), whole.parameters(), rtol=1e-4, atol=1e-6)


def test_the_session_trains_as_a_plain_loop_does(training):
    run = training(epochs=2, shuffle=False, register={"order": _Order()}).run()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    inputs, targets = run.loader._fetcher._fetcher.tickets.dataset.tensors
    for _ in range(2):
        for start in range(0, 20, 6):
            loss = nn.functional.mse_loss(model(inputs[start : start + 6]), targets[start : start + 6])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    plain = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    torch.testing.assert_close(run.parameters(), plain, rtol=1e-5, atol=1e-6)
    assert run.losses[-1] == pytest.approx(float(loss.detach()), rel=1e-4)


class _Order:
    """Something with a state that is no tensor."""

    def state_dict(self):
        return {"order": [1, 2, 3]}

    def load_state_dict(self, state):
        assert state == {"order": [1, 2, 3]}


# -- stop and resume ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 2, 3, 4, 6])
def test_sigterm_saves_and_the_next_run_goes_on_as_if_undisturbed(training, step):
    undisturbed = training(epochs=2, checkpoint_dir="undisturbed").run()
    first = interrupted(training, step, epochs=2)
    second = training(epochs=2)
    assert second.session.steps_done == step + 1
    assert second.session.epoch == (step + 1) // 4
    second.run()
    assert first.used + second.used == undisturbed.used
    assert first.losses + second.losses == undisturbed.losses
    assert torch.equal(second.parameters(), undisturbed.parameters())


def test_sigterm_in_the_last_step_lets_it_finish(training):
    run = training(epochs=1).run(before_step=terminate_at(3))
    run.session.finish()
    assert Promotion.read(HERE).step == 4


def test_after_the_end_a_sigterm_is_the_scripts_own_again(training):
    before = signal.getsignal(signal.SIGTERM)
    run = training(epochs=1)
    assert signal.getsignal(signal.SIGTERM) != before
    run.run().session.finish()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_sigterm_does_not_spoil_the_exit_of_who_has_saved(training):
    run = interrupted(training, 1, epochs=1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert run.session.steps_done == 2


def test_a_finished_run_started_again_does_nothing_more(training):
    first = training(epochs=1).run()
    first.session.finish()
    again = training(epochs=1).run()
    again.session.finish()
    assert again.epochs_seen == []
    assert torch.equal(again.parameters(), first.parameters())
    assert again.session._core.loss == first.losses[-1]


def test_a_model_of_which_nothing_is_trained(training):
    run = training(epochs=1)
    run.model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train: no parameter of the registered model requires a gradient"):
        run.run()


@pytest.mark.parametrize("end", ["", *slow("session.finish()", "raise SystemExit(3)")])
def test_a_script_that_trains_all_and_saves_nothing_is_told_so(tmp_path, end):
    (tmp_path / "train.py").write_text(f"{UNFINISHED}{end}")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == (3 if "Exit" in end else 0), done.stderr
    assert ("ends without session.finish(), which saves the result" in done.stderr) is ("finish" not in end)


def test_a_longer_run_goes_on_from_a_finished_one(training):
    training(epochs=1).run().session.finish()
    more = training(epochs=2).run()
    assert more.epochs_seen == [1]
    assert sorted(more.used) == list(range(20))


def test_other_data_settings_are_warned_of(training, capsys):
    interrupted(training, 1, epochs=2)
    training(epochs=2, global_batch_size=5).run()
    err = capsys.readouterr().err
    assert "elasticflow: warning step=2 message=the checkpoint was written with other data settings" in err
    assert "(global_batch_size was 6, is 5): training goes on at step 2" in err


def test_a_damaged_checkpoint_is_skipped_with_a_warning(training, capsys):
    run = training(epochs=1, checkpoint_interval_s=0.0).run()
    run.session.finish()
    newest = list_candidates(HERE.absolute())[-1]
    (newest / "training.tensors").write_bytes(b"torn")
    again = training(epochs=1)
    assert again.session.steps_done == 3
    err = capsys.readouterr().err
    assert f"skipped: checkpoint {newest}: training.tensors has 4 bytes, not " in err


def test_a_checkpoint_of_another_model_is_an_error_that_says_so(training, capsys):
    training(epochs=1).run().session.finish()
    session = runtime.init(epochs=1)
    with pytest.raises(runtime.CheckpointError, match="does not fit the model"):
        session.register(model=nn.Linear(1, 1))
    assert "elasticflow: failed step=0" in capsys.readouterr().err


def test_saves_by_the_clock_and_keeps_few(training):
    run = training(epochs=3, checkpoint_interval_s=0.0)
    seen = []
    run.run(before_step=lambda done: seen.append([int(path.name[5:]) for path in list_candidates(HERE.absolute())]))
    assert seen[:4] == [[], [], [1], [1, 2]]  # saved at the boundary after the step
    assert seen[-1] == [9, 10]
    run.session.finish()
    assert [path.name for path in list_candidates(HERE.absolute())] == ["step-000000000011", "step-000000000012"]


def test_no_saves_between_with_the_default_interval(training):
    training(epochs=3).run()
    assert not HERE.exists()


def test_each_run_alone_is_a_generation_of_its_own(training):
    training(epochs=1).run().session.finish()
    training(epochs=2).run().session.finish()
    assert [str(path.relative_to(HERE)) for path in list_candidates(HERE)] == [
        "g000000/step-000000000004",
        "g000001/step-000000000008",
    ]


def test_the_environment_names_the_checkpoint_folder(training, monkeypatch, tmp_path):
    monkeypatch.setenv("ELASTICFLOW_CHECKPOINT_DIR", str(tmp_path / "there"))
    training(epochs=1).run().session.finish()
    assert list_candidates(tmp_path / "there")


# -- init_from ----------------------------------------------------------------------------------------------------


def test_init_from_takes_the_weights_only(training, capsys):
    old = training(epochs=1, checkpoint_dir="old").run()
    old.session.finish()
    (folder,) = list_candidates(Path("old").absolute())
    new = training(epochs=1, checkpoint_dir="new", init_from=folder)
    assert torch.equal(new.parameters(), old.parameters())
    assert (new.session.steps_done, new.optimizer.state_dict()["state"], new.scheduler.last_epoch) == (0, {}, 0)
    new.run()
    assert sorted(new.used) == list(range(20))
    assert f"init_from={folder}" in capsys.readouterr().out


def test_resuming_goes_before_init_from(training):
    training(epochs=1, checkpoint_dir="old").run().session.finish()
    (folder,) = list_candidates(Path("old").absolute())
    interrupted(training, 1, epochs=1, checkpoint_dir="new", init_from=folder)
    resumed = training(epochs=1, checkpoint_dir="new", init_from=folder)
    assert resumed.session.steps_done == 2
    assert resumed.optimizer.state_dict()["state"] != {}


def test_init_from_a_place_where_nothing_is(training, tmp_path):
    with pytest.raises(runtime.CheckpointError, match=r"gone: manifest\.json is missing"):
        training(epochs=1, init_from=tmp_path / "gone")


# -- misuse and bad days ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_training_and_spoils_no_checkpoint(training, capsys, value):
    inputs, targets = regression().tensors
    targets[13] = value
    run = training(epochs=1, dataset=TensorDataset(inputs, targets), shuffle=False, checkpoint_interval_s=0.0)
    message = r"the loss is (nan|inf) at step 3: .*Lower the learning rate.*checkpoints from before stay valid"
    with pytest.raises(runtime.NonFiniteLoss, match=message):
        run.run()
    err = capsys.readouterr().err
    assert "elasticflow: failed step=3 message=the loss is" in err
    assert "kind=nan_loss" in err
    found = promoted(HERE.absolute(), pytest.fail)
    assert found is not None
    assert found.step == 2
    assert math.isfinite(found.metadata["loss"])


def test_weights_that_are_no_numbers_are_not_saved(training, capsys):
    """The loss of a step may be finite while its gradients are not; the next loss would tell, after the save."""
    run = training(epochs=1, checkpoint_interval_s=0.0)

    def spoil(done: int) -> None:
        if done == 2:
            with torch.no_grad():
                run.model[0].weight[0, 0] = float("nan")

    with pytest.raises(runtime.NonFiniteLoss, match="weights that are no numbers after step 2"):
        run.run(before_step=spoil)
    assert Promotion.read(HERE).step == 1
    assert "kind=nan_loss" in capsys.readouterr().err


def test_a_loss_that_is_no_number_may_be_allowed(training):
    run = training(epochs=1, allow_nonfinite_loss=True)
    with torch.no_grad():
        run.model[0].weight.fill_(float("nan"))
    run.run().session.finish()
    assert all(math.isnan(loss) for loss in run.losses)


def test_register_twice(training):
    run = training(epochs=1)
    with pytest.raises(ValueError, match=r"session\.register\(\) was called before; name everything in one call"):
        run.session.register(model=run.model)


def test_dataloader_twice(training):
    run = training(epochs=1)
    with pytest.raises(ValueError, match="may be called once"):
        run.session.dataloader(run.loader._fetcher._fetcher.tickets.dataset, global_batch_size=2)


def test_dataloader_alone_needs_the_batch_size(training):
    with pytest.raises(ValueError, match="needs global_batch_size= when the script runs without the service"):
        training(global_batch_size=None)


def test_dataloader_refuses_streams(session_globals):
    class Stream(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(
        TypeError, match=r"needs a map-style dataset, with __len__ and __getitem__; Stream has no length"
    ):
        runtime.init(epochs=1).dataloader(Stream(), global_batch_size=2)


def test_order_of_calls(session_globals):
    session = runtime.init(epochs=1)
    with pytest.raises(ValueError, match=r"call session\.dataloader\(\) before session\.epochs\(\)"):
        next(session.epochs())
    with pytest.raises(ValueError, match=r"call session\.register\(\) before session\.step\(\)"):
        session.step()


def first_batch(run):
    next(run.session.epochs())
    return next(iter(run.loader))


def test_a_step_without_split(training):
    run = training(epochs=1)
    first_batch(run)
    with pytest.raises(RuntimeError, match=r"a step must iterate over step\.split\(batch\) to its end"):
        with run.session.step():
            pass
    assert run.session.steps_done == 0


def test_a_split_left_early(training):
    run = training(epochs=1, micro_batch_size=2)
    batch = first_batch(run)
    with pytest.raises(RuntimeError, match=r"to its end"):
        with run.session.step() as step:
            for inputs, _ in step.split(batch):
                step.backward(run.model(inputs).sum())
                break


def test_a_micro_batch_without_backward(training):
    run = training(epochs=1, micro_batch_size=2)
    batch = first_batch(run)
    with pytest.raises(RuntimeError, match=r"a micro-batch went by without step\.backward\(loss\)"):
        with run.session.step() as step:
            for _ in step.split(batch):
                pass


def test_backward_twice_and_split_twice(training):
    run = training(epochs=1)
    batch = first_batch(run)
    with pytest.raises(RuntimeError, match=r"step\.backward\(\) is for once per micro-batch"):
        with run.session.step() as step:
            for inputs, _ in step.split(batch):
                step.backward(run.model(inputs).sum())
                step.backward(run.model(inputs).sum())
    run.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"step\.split\(\) may be used once in a step"):
        with run.session.step() as step:
            for _ in range(2):
                for inputs, _ in step.split(batch):
                    step.backward(run.model(inputs).sum())


def test_split_takes_our_batches_only(training):
    run = training(epochs=1)
    next(run.session.epochs())
    with pytest.raises(TypeError, match=r"step\.split\(\) takes what session\.dataloader\(\) yields, not Tensor"):
        with run.session.step() as step:
            next(step.split(torch.zeros(3)))


def test_a_batch_that_got_no_step(training):
    """Skipped batches would be samples never used: an error, not a silent gap."""
    run = training(epochs=1)
    next(run.session.epochs())
    batches = iter(run.loader)
    next(batches)
    with pytest.raises(RuntimeError, match="batch 1 of epoch 0 came to the step for batch 0 of epoch 0: every batch"):
        with run.session.step() as step:
            next(step.split(next(batches)))


def test_an_epoch_without_steps(training):
    run = training(epochs=1)
    with pytest.raises(RuntimeError, match=r"an epoch went by without a session\.step\(\)"):
        for _ in run.session.epochs():
            pass


def test_a_step_after_the_end(training):
    run = training(epochs=1).run()
    run.session.finish()
    with pytest.raises(RuntimeError, match=r"session\.step\(\) after session\.finish\(\)"):
        run.session.step()


def test_a_checkpoint_that_cannot_be_written_says_so(training, capsys):
    run = training(epochs=1).run()
    HERE.write_text("in the way")
    with pytest.raises(runtime.CheckpointError, match="cannot write a checkpoint below"):
        run.session.finish()
    assert "kind=checkpoint_not_written" in capsys.readouterr().err


def test_logged_scalars_and_loss_are_printed(training, capsys, monkeypatch):
    run = training(epochs=1)
    run.session.log(lr=torch.tensor(0.5), loss=3)
    run.run().session.finish()
    assert "elasticflow: progress step=4 window_steps=4" in (out := capsys.readouterr().out)
    assert "lr=0.5" in out


@pytest.mark.parametrize("name", ["epoch", "window_s", "window_steps"])
def test_logging_a_number_under_a_name_of_the_report(training, capsys, name):
    run = training(epochs=1)
    run.session.log(**{name: 77})
    run.run().session.finish()
    (progress,) = [line for line in capsys.readouterr().out.splitlines() if " progress " in line]
    assert f"{name}=77" not in progress
    assert f"{name}=" in progress


def test_gradients_left_from_the_step_before_are_refused(training):
    """Each worker would add them once more: two workers would train something else than one."""
    run = training(epochs=1)
    run.optimizer.zero_grad = lambda: None
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\) in every step"):
        run.run()
    assert run.session.steps_done == 1


def test_gradients_may_be_zeroed_instead_of_dropped(training):
    run = training(epochs=1)
    zero = run.optimizer.zero_grad
    run.optimizer.zero_grad = lambda: zero(set_to_none=False)
    assert torch.equal(run.run().parameters(), training(epochs=1, checkpoint_dir="other").run().parameters())


class _Wrapped(torch.nn.Module):
    """Stands for torch's wrapper, which needs a process group to be made."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (type("DistributedDataParallel", (_Wrapped,), {})(), "DistributedDataParallel sums gradients by itself"),
        (torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)), r"model's 0 \(Embedding\) has sparse gradients"),
    ],
)
def test_models_that_cannot_be_summed_here_are_refused(session_globals, model, message):
    with pytest.raises(TypeError, match=message):
        runtime.init(epochs=1).register(model=model)


def test_a_forked_process_of_the_script_dies_of_sigterm(training):
    """It has no step boundary: with our handler it would never end."""
    run = training(epochs=1)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(tell, b"!")  # A signal before this point is lost: Python forgets those that come while it forks.
        for _ in range(1000):
            time.sleep(0.01)
        os._exit(7)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert run.run().session.steps_done == 4


def test_saves_in_the_background_are_promoted_and_told_of(training, capsys):
    def wait_for_the_first(steps_done: int) -> None:
        end_s = time.monotonic() + 60.0
        while steps_done == 100 and not list_candidates(HERE.absolute()) and time.monotonic() < end_s:
            time.sleep(0.01)  # a disk may stand still for longer than all of these steps take
        if steps_done > 100 and not (HERE.absolute() / "promoted.json").exists():
            time.sleep(0.5)  # as may the process that writes, before it tells of it

    run = training(epochs=30, checkpoint_interval_s=1e-9).run(before_step=wait_for_the_first)
    run.session.finish()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("elasticflow: checkpoint")]
    assert 2 <= len(said) <= 120
    assert "stall_s=" in said[0]
    assert promoted(HERE.absolute(), pytest.fail).step == 120
    assert len(list_candidates(HERE.absolute())) == 2
    assert training(epochs=30).session.steps_done == 120


def test_a_checkpoint_of_another_number_of_logical_workers_is_refused(training, capsys):
    training(epochs=1, global_batch_size=4, logical_workers=2).run().session.finish()
    with pytest.raises(
        runtime.CheckpointError, match=r"written with logical_workers=2, this training has 4: .*Give log"
    ):
        training(epochs=2, global_batch_size=4, logical_workers=4)
    assert "kind=bad_checkpoint" in capsys.readouterr().err


def test_parameters_that_are_frozen_and_freed_on_the_way(training):
    """Each step sums the gradients of what is trained then, and nothing else."""
    run = training(epochs=1)
    first, last = run.model[0].weight, run.model[2].weight
    first.requires_grad_(False)
    before = first.detach().clone()
    frozen: list[bool] = []

    def free_in_the_middle(steps_done: int) -> None:
        frozen.append(torch.equal(first, before))
        first.requires_grad_(steps_done >= 2)

    run.run(before_step=free_in_the_middle)
    assert frozen == [True, True, True, False]
    assert last.requires_grad


@pytest.mark.parametrize("where", ["file://{folder}/there", "memory://{folder}/there"])
def test_checkpoints_at_a_url(training, tmp_path, where):
    pytest.importorskip("fsspec", reason="needs fsspec")
    where = where.format(folder=tmp_path)
    whole = training(epochs=2, checkpoint_dir=tmp_path / "undisturbed").run()
    run = training(epochs=2, checkpoint_dir=where)
    with pytest.raises(SystemExit):
        run.run(before_step=lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == 2 else None)
    again = training(epochs=2, checkpoint_dir=where)
    assert again.session.steps_done == 3
    again.run().session.finish()
    assert torch.equal(again.parameters(), whole.parameters())
    third = training(epochs=2, checkpoint_dir=tmp_path / "next", init_from=f"{where}/g000001/step-000000000008")
    assert torch.equal(third.parameters(), whole.parameters())
    assert third.session.steps_done == 0


def train_with_batchnorm(samples: int, batch: int, logical_workers: int, *, drop_last: bool = False, **options):
    """Two epochs; returns the number of steps."""
    session = runtime.init(epochs=2, logical_workers=logical_workers, **options)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    inputs = torch.randn(samples, 4)
    loader = session.dataloader(TensorDataset(inputs, inputs[:, :2]), global_batch_size=batch, drop_last=drop_last)
    for _ in session.epochs():
        for dealt in loader:
            with session.step() as step:
                for inputs, targets in step.split(dealt):
                    step.backward((model(inputs) - targets).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    session.finish()
    return session.steps_done


@pytest.mark.parametrize("last", [2, 3, 7, 8, 15])
def test_batchnorm_is_trained_on_a_short_last_batch(session_globals, capsys, last):
    """Cut into eight, it would leave single samples to some: fewer shares have them all."""
    assert train_with_batchnorm(16 + last, 16, 8) == 4
    assert "BatchNorm" not in capsys.readouterr().err


@pytest.mark.parametrize(("samples", "shares", "micro"), [(28, 4, 2), (32, 2, 7), (22, 2, 2), (27, 1, 5), (26, 2, 4)])
def test_batchnorm_is_trained_on_micro_batches_that_leave_no_single_sample(
    session_globals, capsys, samples, shares, micro
):
    """Three samples of a share in twos would leave one over: plain cutting dies in the first epoch's last batch."""
    assert train_with_batchnorm(samples, 16, shares, micro_batch_size=micro) == 4
    assert "BatchNorm" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("samples", "size", "fewest", "cut"),
    [
        (8, 3, 1, [3, 3, 2]),
        (7, 3, 1, [3, 3, 1]),
        (7, 3, 2, [2, 2, 3]),
        (3, 2, 2, [3]),
        (5, 2, 2, [2, 3]),
        (1, 2, 2, [1]),
        (0, 2, 2, []),
        (4, 1, 2, [1, 1, 1, 1]),  # It is refused in words.
    ],
)
def test_where_a_share_is_cut(samples, size, fewest, cut):
    found = micro_batches(samples, size, fewest)
    assert [end - start for start, end in found] == cut
    assert [start for start, _ in found] == [sum(cut[:number]) for number in range(len(cut))]


@pytest.mark.parametrize(
    ("samples", "options", "remedy"),
    [
        (17, {}, "17 samples in batches of 16.*choose another global batch size"),
        (32, {"micro_batch_size": 1}, "micro_batch_size=1: choose 2 or more"),
    ],
)
def test_what_batchnorm_cannot_be_trained_on_is_refused_before_a_step_counts(
    session_globals, capsys, samples, options, remedy
):
    with pytest.raises(ValueError, match=f"BatchNorm cannot be trained on one sample; .*{remedy}"):
        train_with_batchnorm(samples, 16, 8, **options)


def test_batchnorm_needs_no_second_sample_in_a_batch_that_is_dropped(session_globals, capsys):
    assert train_with_batchnorm(17, 16, 8, drop_last=True) == 2
    assert "BatchNorm" not in capsys.readouterr().err


def test_batchnorm_over_images_takes_a_single_one(session_globals, capsys):
    session = runtime.init(epochs=1)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizer=optimizer)
    loader = session.dataloader(TensorDataset(torch.randn(9, 1, 4, 4)), global_batch_size=8)
    for _ in session.epochs():
        for batch in loader:
            with session.step() as step:
                for (images,) in step.split(batch):
                    step.backward(model(images).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    session.finish()
    assert "BatchNorm sees single samples: the last batch of an epoch has a single sample" in capsys.readouterr().err


@pytest.fixture
def threads_restored():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("said", "shell", "threads"),
    [
        ({}, None, 1),  # Not as many as there are cores: served, there are others.
        ({}, "2", 2),
        ({"threads": 3}, "2", 3),
        ({"consistency": "fast"}, None, 2),
    ],
)
def test_the_number_of_threads_belongs_to_the_task(training, monkeypatch, threads_restored, said, shell, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if shell is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", shell)
    training(epochs=1, **said)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"threads": 0}, "threads=0: it is 1 or more"),
        ({"max_workers": 0}, "max_workers=0: it is 1 or more"),
        ({"max_workers": 8, "logical_workers": 4}, "max_workers=8 beside logical_workers=4"),
    ],
)
def test_numbers_that_cannot_be_are_refused(training, said, why):
    with pytest.raises(ValueError, match=why):
        training(epochs=1, **said)


def test_max_workers_of_the_script_raises_the_logical_workers(training):
    assert training(epochs=1, global_batch_size=16, max_workers=16).session.logical_workers == 16
