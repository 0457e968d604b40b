"""A script under the service, whose part the test plays: it writes the plan, reads the reports and promotes."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext

import pytest
import torch

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime import bootstrap
from elasticflow_airflow.runtime.checkpoints.interval import PRIOR_MTBF_S
from elasticflow_airflow.runtime.context import detect
from elasticflow_airflow.runtime.protocol import (
    SUBMITTED_ENV,
    Promotion,
    ReportKind,
    RescaleMode,
    SessionConfig,
    append_report,
    candidate_name,
    promoted_path,
)
from elasticflow_airflow.runtime.stores.manifest import CheckpointError, adopt, list_candidates


def at(step: int, act):
    return lambda done: act() if done == step else None


def leave(run, before_step) -> None:
    with pytest.raises(SystemExit) as left:
        run.run(before_step=before_step)
    assert left.value.code == 0


def kinds(reports) -> list[str]:
    return [str(report.kind) for report in reports]


# -- reports ------------------------------------------------------------------------------------------------------


def test_the_reports_of_a_whole_training(service, training):
    service.configure(epochs=2, samples=20)
    service.start(4)
    run = training(epochs=7, global_batch_size=3, micro_batch_size=2).run()
    run.session.log(lr=torch.tensor(0.5), note=float("nan"))
    run.session.finish(metrics={"accuracy": torch.tensor(0.5), "confusion": torch.eye(2), "f1": float("nan")})
    reports = service.reports(4)
    assert kinds(reports) == ["started", "progress", "checkpoint", "finished"]
    assert {(report.generation, report.worker_id, report.rank) for report in reports} == {(4, "w0", 0)}
    started, progress, saved, finished = reports
    assert started.step == 0
    assert started.data == {
        "samples": 20,
        "steps": 8,  # what was submitted: epochs=2 and a global batch of 6, not what the script says
        "micro_batch_size": 2,
        "logical_workers": 2,
        "seed": 0,
        "threads": torch.get_num_threads(),
        "in_place": True,
        "resumed_from": None,
        "init_from": None,
    }
    assert (progress.step, progress.data["window_steps"], progress.data["lr"]) == (8, 8, 0.5)
    assert progress.data["note"] == "nan"
    assert progress.data["window_s"] > 0
    assert progress.data["loss"] == pytest.approx(run.losses[-1])
    assert saved.data["path"] == finished.data["path"] == "g000004/step-000000000008"
    assert saved.data["size_bytes"] > 0
    assert saved.data["write_s"] > 0
    assert finished.data["metrics"] == {"accuracy": 0.5, "confusion": [[1.0, 0.0], [0.0, 1.0]], "f1": "nan"}
    assert bootstrap.session_initialised
    assert bootstrap.current_step == 8
    info = service.promote(saved)
    assert (info.incarnation, info.generation, info.step) == (3, 4, 8)


def test_progress_comes_by_the_clock(service, training, monkeypatch):
    monkeypatch.setattr("elasticflow_airflow.runtime.reporting.FileReporter.interval_s", 0.0)
    service.configure(epochs=1)
    service.start(1)
    training().run()
    progress = service.reports(1, kind=ReportKind.PROGRESS)
    assert [report.step for report in progress] == [1, 2, 3, 4]
    assert [report.data["window_steps"] for report in progress] == [1, 1, 1, 1]


def test_steps_are_submitted(service, training):
    service.configure(epochs=None, steps=5)
    service.start(1)
    run = training(epochs=2).run()
    assert run.session.steps_done == 5
    assert service.reports(1)[0].data["steps"] == 5


@pytest.mark.parametrize(("init", "count", "steps"), [({"epochs": 4}, None, 16), ({}, 3, 12), ({"steps": 5}, None, 5)])
def test_where_no_length_was_submitted_the_script_has_its_own(service, training, init, count, steps):
    service.configure(epochs=None)
    service.start(1)
    run = training(**init).run(count=count)
    assert run.session.steps_done == steps
    assert service.reports(1)[0].data["steps"] == steps
    assert not service.reports(1, kind=ReportKind.WARNING)


def make_step(run, batch) -> None:
    with run.session.step() as step:
        for inputs, targets in step.split(batch):
            step.backward(torch.nn.functional.mse_loss(run.model(inputs), targets))
        run.optimizer.step()
        run.optimizer.zero_grad()


def four_epochs(run) -> None:
    for _ in range(4):
        for batch in run.loader:
            make_step(run, batch)


def twenty_steps(run) -> None:
    while run.session.steps_done < 20:
        for batch in run.loader:
            make_step(run, batch)


@pytest.mark.parametrize("loop", [four_epochs, twenty_steps, lambda run: run.run()])
def test_where_nobody_says_how_long_it_is_that_is_an_error(service, training, loop):
    """As alone: a loop of the script's own may be meant to go on for four epochs, or for twenty steps."""
    service.configure(epochs=None)
    service.start(1)
    run = training()
    with pytest.raises(ValueError, match=r"nobody has said how long to train, .* Loop over session\.epochs\(n\)"):
        loop(run)
    assert run.session.steps_done == 0


def test_a_loop_that_waits_for_more_steps_than_were_submitted_does_not_spin_for_ever(service, training):
    service.configure(epochs=1)
    service.start(1)
    run = training()
    four_epochs(run)  # More than were submitted.
    assert run.session.steps_done == 4
    with pytest.raises(RuntimeError, match=r"10000 times through its loader since the training was done"):
        twenty_steps(run)


def test_a_wrong_number_of_samples_is_warned_of(service, training):
    service.configure(samples=50)
    service.start(1)
    training()
    (warning,) = service.reports(1, kind=ReportKind.WARNING)
    assert warning.data["message"] == "the submission says samples=50, the dataset has 20; the dataset counts"


def test_out_of_memory_names_the_micro_batch(service, training):
    service.configure(micro_batch_size=4)
    service.start(1)
    run = training()

    def fail(_inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    run.model.forward = fail
    with pytest.raises(torch.OutOfMemoryError):
        run.run()
    (report,) = service.reports(1, kind=ReportKind.OUT_OF_MEMORY)
    assert report.data == {"micro_batch_size": 3, "message": "CUDA out of memory. Tried to allocate 20.00 GiB"}


def test_out_of_memory_names_the_share_where_nobody_chose_a_micro_batch(service, training):
    service.configure()
    service.start(1)
    run = training()

    def fail(_inputs):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    run.model.forward = fail
    with pytest.raises(RuntimeError):
        run.run()
    (report,) = service.reports(1, kind=ReportKind.OUT_OF_MEMORY)
    assert report.data["micro_batch_size"] == 3


def test_another_error_is_no_out_of_memory(service, training):
    service.configure()
    service.start(1)
    run = training()
    run.model.forward = lambda inputs: {}["no such"]
    with pytest.raises(KeyError):
        run.run()
    assert kinds(service.reports(1)) == ["started"]


def test_a_full_disk_costs_reports_but_not_the_training(service, training, monkeypatch, capsys):
    """Progress may be lost; a start must arrive, and is tried again until somebody has made room."""
    service.configure(epochs=1)
    service.start(1)
    run = training()
    tried = []

    def full(path, report):
        tried.append(report.kind)
        if report.kind is ReportKind.PROGRESS or len(tried) == 1:
            raise OSError(28, "No space left on device")
        append_report(path, report)

    monkeypatch.setattr("elasticflow_airflow.runtime.reporting.append_report", full)
    run.run()
    said = capsys.readouterr().err
    assert "elasticflow: report started of step 0 could not be written: [Errno 28]" in said
    assert "tries again" in said
    assert run.session.steps_done == 4
    assert ReportKind.STARTED in {report.kind for report in service.reports(1)}
    assert ReportKind.PROGRESS not in {report.kind for report in service.reports(1)}


# -- leaving and coming back --------------------------------------------------------------------------------------


def next_generation(service):
    service.plan(5, "w0", "w1")


def empty(service):
    service.plan(4)


def without_me(service):
    service.plan(5, "w7")


@pytest.mark.parametrize("tell", [next_generation, empty, without_me])
@pytest.mark.parametrize("step", [0, 2, 3])
def test_told_to_leave_it_saves_and_ends_with_status_0(service, training, tell, step):
    undisturbed = training(epochs=2, checkpoint_dir="alone").run()
    service.configure()
    service.start(4)
    first = training()
    leave(first, at(step, lambda: tell(service)))
    reports = service.reports(4)
    assert kinds(reports) == ["started", "progress", "checkpoint", "stopped"]
    assert {report.step for report in reports[1:]} == {step + 1}
    assert not promoted_path(service.folder / "checkpoints").exists()
    service.promote(reports[2])
    service.start(6)
    second = training()
    assert second.session.steps_done == step + 1
    second.run().session.finish()
    started = service.reports(6)[0]
    assert (started.step, started.data["resumed_from"]) == (step + 1, reports[2].data["path"])
    assert first.used + second.used == undisturbed.used
    assert torch.equal(second.parameters(), undisturbed.parameters())


def test_sigterm_means_leave_as_well(service, training):
    import os
    import signal

    service.configure()
    service.start(1)
    leave(training(), at(1, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert kinds(service.reports(1)) == ["started", "progress", "checkpoint", "stopped"]


@pytest.mark.parametrize(
    ("generation", "mode"),
    [(4, RescaleMode.RESTART), (3, RescaleMode.RESTART), (5, RescaleMode.IN_PLACE)],
    ids=["the same", "an old one", "a new one, in place"],
)
def test_plans_that_ask_nothing_of_this_worker(service, training, generation, mode):
    service.configure()
    service.start(4)
    run = training()
    run.run(before_step=at(1, lambda: service.plan(generation, "w0", mode=mode)))
    assert run.session.steps_done == 8


def test_only_promoted_checkpoints_count(service, training):
    """The worker of a generation that was overtaken wrote more: nobody promoted it, nobody resumes from it."""
    service.configure(checkpoint_interval_s=0.0)
    service.start(1)
    training().run().session.finish()
    candidates = service.reports(1, kind=ReportKind.CHECKPOINT)
    assert [report.step for report in candidates] == [*range(1, 8), 8]
    assert len(list_candidates(service.folder / "checkpoints")) == 8  # the service removes old ones, nobody else
    service.start(2)
    assert training().session.steps_done == 0
    service.promote(candidates[2])
    assert training().session.steps_done == 3


def test_a_damaged_promoted_checkpoint_is_reported_and_the_one_before_used(service, training):
    service.configure(checkpoint_interval_s=0.0)
    service.start(1)
    training().run()
    candidates = service.reports(1, kind=ReportKind.CHECKPOINT)
    newest = service.promote(candidates[4])
    (newest.path / "model.tensors").write_bytes(b"torn")
    service.start(2)
    assert training().session.steps_done == 4
    (warning,) = service.reports(2, kind=ReportKind.WARNING)
    assert warning.data["message"].startswith(f"skipped: checkpoint {newest.path}: model.tensors has 4 bytes, not")


def test_what_the_service_has_promoted_is_missed_though_the_whole_folder_is_gone(service, training, tmp_path):
    """A volume that is not mounted lists nothing, and has no promoted.json: training must not begin again at step 0."""
    service.configure(checkpoint_interval_s=0.0)
    service.start(1)
    training().run()
    info = service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[4])
    known = Promotion.read(service.folder / "checkpoints")
    service.configure(promoted=known)
    (service.folder / "checkpoints").rename(tmp_path / "elsewhere")
    service.start(2)
    with pytest.raises(CheckpointError, match=f"the promoted checkpoint {info.path} is missing"):
        training()
    *_, failed = service.reports(2)
    assert (failed.kind, failed.data["kind"]) == (ReportKind.FAILED, "bad_checkpoint")
    assert failed.data["message"].startswith("the service says that there is a checkpoint to go on from")

    (tmp_path / "elsewhere").rename(service.folder / "checkpoints")
    promoted_path(service.folder / "checkpoints").unlink()
    service.start(3)
    assert training().session.steps_done == 5, "it needs the checkpoint only"
    assert service.reports(3, kind=ReportKind.WARNING) == []


def test_an_older_promotion_than_the_service_knows_is_not_believed(service, training):
    service.configure(checkpoint_interval_s=0.0)
    service.start(1)
    training().run()
    saved = service.reports(1, kind=ReportKind.CHECKPOINT)
    service.promote(saved[4])
    service.configure(promoted=Promotion.read(service.folder / "checkpoints"))
    for content in (service.promote(saved[1]) and promoted_path(service.folder / "checkpoints").read_text(), "torn"):
        promoted_path(service.folder / "checkpoints").write_text(content)
        service.start(2)
        assert training().session.steps_done == 5
    (warning,) = service.reports(2, kind=ReportKind.WARNING)
    assert warning.data["message"].endswith("the checkpoint of step 5 is used instead")


def test_a_checkpoint_of_another_incarnation_is_not_resumed(service, training):
    service.configure(epochs=1)
    service.start(1)
    training().run().session.finish()
    service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[0])
    service.configure(epochs=1, incarnation=4)
    service.start(2)
    assert training().run().session.steps_done == 4
    (warning,) = service.reports(2, kind=ReportKind.WARNING)
    assert "belongs to incarnation 3, this is 4: training starts afresh" in warning.data["message"]


def test_init_from_of_the_submission(service, training):
    service.configure(epochs=1)
    service.start(1)
    old = training().run()
    old.session.finish()
    info = service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[0])
    (service.folder / "checkpoints").rename(service.folder.parent / "yesterday")
    folder = service.folder.parent / "yesterday" / info.path.relative_to(service.folder / "checkpoints")
    service.configure(epochs=1, init_from=str(folder))
    service.start(2)
    new = training()
    assert torch.equal(new.parameters(), old.parameters())
    assert new.session.steps_done == 0
    new.run()
    assert service.reports(2)[0].data["init_from"] == str(folder)


def test_failures_and_the_time_in_which_they_came_are_counted_from_the_same_moment(service, training):
    """Or the mean time between failures would be that of the last process alone."""
    service.configure(checkpoint_interval_s=None)
    service.start(1)
    first = training()
    first.session._core.saver.carry_on(90_000.0)
    first.run().session.finish()
    service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[0])
    service.configure(checkpoint_interval_s=None, failures=5, epochs=3)
    service.start(2)
    second = training(epochs=3)
    second.run().session.finish()
    interval = second.session._core.saver._interval
    assert (interval.failures, interval.trained_s >= 90_000.0) == (5, True)
    assert interval.mtbf_s >= (PRIOR_MTBF_S + 90_000.0) / 6


def test_failures_of_another_incarnation_are_not_counted_and_neither_is_its_time(service, training, tmp_path):
    service.configure(incarnation=2)
    service.start(1)
    first = training()
    first.session._core.saver.carry_on(90_000.0)
    first.run().session.finish()
    old = service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[0])
    service.folder = tmp_path / "i000004"
    made = adopt(old.path, service.folder / "checkpoints", incarnation=4)
    Promotion(path=made.name, generation=0, step=made.step, digest=made.digest).write(service.folder)
    service.configure(incarnation=4, epochs=3)
    service.start(1)
    second = training()
    assert second.session.steps_done == made.step
    assert second.session._core.saver.trained_s < 90_000.0


def test_a_checkpoint_that_does_not_fit_fails_with_a_reason(service, training):
    service.configure(epochs=1)
    service.start(1)
    training().run().session.finish()
    service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[0])
    service.start(2)
    with pytest.raises(runtime.CheckpointError):
        runtime.init().register(model=torch.nn.Linear(1, 1))
    (failed,) = service.reports(2, kind=ReportKind.FAILED)
    assert failed.data["kind"] == "bad_checkpoint"
    assert "does not fit the model" in failed.data["message"]


def test_a_loss_that_is_no_number_is_reported(service, training):
    service.configure()
    service.start(1)
    run = training()
    with torch.no_grad():
        run.model[0].weight.fill_(float("nan"))
    with pytest.raises(runtime.NonFiniteLoss):
        run.run()
    (failed,) = service.reports(1, kind=ReportKind.FAILED)
    assert (failed.step, failed.data["kind"]) == (1, "nan_loss")
    assert service.reports(1, kind=ReportKind.CHECKPOINT) == []


def test_an_allowed_loss_that_is_no_number_is_not_reported(service, training):
    """Whoever reads the reports ends a training that reports one."""
    service.configure(epochs=1)
    service.start(1)
    run = training(allow_nonfinite_loss=True)
    with torch.no_grad():
        run.model[0].weight.fill_(float("nan"))
    run.run().session.finish()
    (progress,) = service.reports(1, kind=ReportKind.PROGRESS)
    assert (progress.step, progress.data["loss"]) == (4, None)


# -- where it runs ------------------------------------------------------------------------------------------------


def test_the_session_file_decides(service):
    config = service.configure(args=("--data", "x"))
    service.start(9, worker="w5")
    context = detect("ignored")
    assert (context.managed, context.worker_id, context.generation) == (True, "w5", 9)
    assert context.config == config
    assert context.checkpoints == service.folder / "checkpoints"


def test_a_missing_or_damaged_session_file(service):
    service.start(1)
    with pytest.raises(ValueError, match=r"no session file at .*session\.json"):
        detect()
    (service.folder / "session.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="does not hold a JSON object"):
        detect()


def test_a_submission_that_is_repeated_alone_decides_too(monkeypatch, tmp_path):
    said = SessionConfig(
        job_id="j", incarnation=1, incarnation_dir="/there", code_dir="/there", epochs=2, global_batch_size=16, seed=7
    ).submitted()
    assert said == {"epochs": 2, "global_batch_size": 16, "seed": 7, "consistency": "consistent"}
    monkeypatch.setenv(SUBMITTED_ENV, json.dumps(said))
    context = detect(tmp_path / "checkpoints")
    assert (context.managed, context.submitted) == (False, True)
    assert (context.config.epochs, context.config.global_batch_size, context.config.seed) == (2, 16, 7)
    assert context.config.job_id == "alone"


@pytest.mark.parametrize("said", ["{", "[]", "{}", '{"global_batch_size": 8, "incarnation_dir": "/"}'])
def test_a_submission_that_cannot_be_read_is_refused(monkeypatch, tmp_path, said):
    monkeypatch.setenv(SUBMITTED_ENV, said)
    with pytest.raises(ValueError, match=r"ELASTICFLOW_SUBMITTED.*elasticflow reproduce"):
        detect(tmp_path / "checkpoints")


@pytest.mark.parametrize(("kept", "threads"), [(None, 1), (2, 2)])
def test_the_slot_does_not_decide_on_the_threads(service, training, monkeypatch, kept, threads):
    """Its engine says how many cores it has; a training that has begun with so many keeps them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    service.configure(threads=kept)
    service.start(1)
    run = training()
    assert torch.get_num_threads() == threads
    run.run()
    assert service.reports(1)[0].data["threads"] == threads
    torch.set_num_threads(1)


@pytest.mark.parametrize(("said", "logical"), [({"logical_workers": 2}, 2), ({"max_workers": 16}, 16), ({}, 8)])
def test_the_scripts_logical_workers_count_where_it_decides(service, training, said, logical):
    service.configure(global_batch_size=16, logical_workers=8, script_decides=True, epochs=1)
    service.start(1)
    training(**said).run()
    assert service.reports(1)[0].data["logical_workers"] == logical
    assert service.reports(1, kind=ReportKind.WARNING) == []


def test_what_the_script_says_and_does_not_count_is_told(service, training):
    service.configure(epochs=1, logical_workers=2, seed=5)
    service.start(1)
    training(logical_workers=4, seed=5).run().session.finish()
    (warned,) = [report.data["message"] for report in service.reports(1, kind=ReportKind.WARNING)]
    assert warned.startswith("logical_workers=4 of the script does not count: logical_workers=2 was submitted")


def test_the_configuration_comes_through_the_file_as_it_was(service):
    promoted = Promotion(path=candidate_name(2, 40), generation=2, step=40, digest="d")
    config = service.configure(args=("a", "b"), seed=7, progress_regex="step (\\d+)", promoted=promoted)
    assert SessionConfig.read(service.folder / "session.json") == config


def test_promotion_read_back(service, training):
    service.configure(epochs=1)
    service.start(1)
    training().run().session.finish()
    info = service.promote(service.reports(1, kind=ReportKind.CHECKPOINT)[0])
    assert Promotion.read(service.folder / "checkpoints") == Promotion(
        path="g000001/step-000000000004", generation=1, step=4, digest=info.digest
    )


def test_a_script_that_ends_early_still_says_how_far_it_came(service, training):
    service.configure(steps=50)
    service.start(1)
    run = training(steps=50, global_batch_size=3, micro_batch_size=2)

    def stop() -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        run.run(before_step=at(7, stop))
    run.session._core.at_exit()
    assert service.reports(1)[-1].kind is ReportKind.PROGRESS
    assert service.reports(1)[-1].step == 7


def test_saves_in_the_background_name_the_step_that_they_hold(service, training):
    service.configure(checkpoint_interval_s=1e-9, epochs=20)
    service.start(1)
    training().run().session.finish()
    reports = service.reports(1, kind=ReportKind.CHECKPOINT)
    assert [report.step for report in reports] == [int(report.data["path"][-12:]) for report in reports]
    assert reports[-1].step == 80
    for report in reports:
        service.promote(report)


def test_a_write_that_fails_in_the_background_ends_the_training(service, training):
    service.configure(checkpoint_interval_s=1e-9, epochs=1000)
    service.start(1)
    (service.folder / "checkpoints").write_text("in the way")
    run = training()
    with pytest.raises(runtime.CheckpointError, match="cannot write a checkpoint below"):
        run.run(before_step=lambda _: time.sleep(0.02))  # it takes a while until the writer is there
    (failed,) = service.reports(1, kind=ReportKind.FAILED)
    assert failed.data["kind"] == "checkpoint_not_written"


def test_where_nobody_says_how_often_it_saves_as_often_as_pays_off(service, training, monkeypatch):
    chosen = []
    for failures in (0, 9):
        service.configure(checkpoint_interval_s=None, failures=failures)
        service.start(1 + len(chosen))
        saver = training().run().session._core.saver
        first_s = saver.interval_s
        saver._interval.saved(stall_s=1.0, write_s=1.0)
        chosen.append((first_s, saver.interval_s))
    (first_s, quiet_s), (_, failing_s) = chosen
    assert first_s == 10.0, "soon, as it is small"
    assert failing_s < quiet_s / 2


@pytest.mark.parametrize(("steps", "told"), [(3, "no better for 3 epochs"), (8, None)])
def test_an_early_end_says_that_it_is_meant_and_a_whole_training_is_not_early(service, training, steps, told):
    service.configure()
    service.start(1)
    run = training()

    def stop(done: int) -> None:
        if done == steps:
            raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration) if told else nullcontext():
        run.run(before_step=stop)
    run.session.finish(early="no better for 3 epochs")
    (finished,) = service.reports(1, kind=ReportKind.FINISHED)
    assert finished.step == steps
    assert finished.data.get("early") == told
