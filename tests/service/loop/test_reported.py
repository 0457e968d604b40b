"""What workers report is taken in as far as it is within bounds; nothing that stands in a report stops the loop."""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.raw_columns import check_numbers

from elasticflow_airflow.engines.local.workers.script_progress import PlainProgress
from elasticflow_airflow.runtime.protocol import Report, ReportKind, append_report, read_reports
from elasticflow_airflow.service.decisions.reported_bounds import within_bounds
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow

NOW = 1_800_000_000.0
MOST = 2**31 - 1


def progress(step: int = 10, **data) -> Report:
    return Report(
        kind=ReportKind.PROGRESS, generation=1, worker_id="g000001-r000", rank=0, step=step, at_s=NOW, data=data
    )


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"loss": 1e300}, "loss"),
        ({"window_steps": 10**30}, "window_steps"),
        ({"window_s": 1e30}, "window_s"),
        ({"window_steps": MOST, "window_s": 1e-30}, "window_s"),
        ({"samples_per_s": 1e300}, "samples_per_s"),
        ({"memory_bytes": 2**64}, "memory_bytes"),
        ({"steps_left": 1e200}, "steps_left"),
        ({"loss_curve": {"width": 1e30, "losses": [1.0]}}, "loss_curve"),
        ({"loss_curve": {"width": 1, "losses": [0.1] * 20_000}}, "loss_curve"),
        ({"metrics": {"deep": json.loads("[" * 50 + "]" * 50)}}, "metrics"),
        ({"metrics": {"long": "x" * 100_000}}, "metrics"),
        ({"metrics": {"bad": "a\0b"}}, "metrics"),
        ({"metrics": {"bad": float("nan")}}, "metrics"),
    ],
)
def test_what_is_out_of_bounds_is_left_out_and_named(data, field):
    found = within_bounds(progress(**data, samples=5), 0, NOW)
    assert field in found.refused
    assert found.report is not None
    assert found.report.data.get("samples") == 5
    assert field not in found.report.data or field == "metrics"


def test_one_bad_metric_leaves_the_others():
    found = within_bounds(progress(metrics={"accuracy": 0.9, "bad\0": 1.0, "nested": {"f1": [0.5]}}), 0, NOW)
    assert found.report.data["metrics"] == {"accuracy": 0.9, "nested": {"f1": [0.5]}}
    assert "NUL" in found.refused["metrics"]


@pytest.mark.parametrize("data", [{"loss": "nan"}, {"loss": float("inf")}, {"loss": 0.5}, {"message": "all is well"}])
def test_what_is_within_bounds_is_passed_on(data):
    found = within_bounds(progress(**data), 0, NOW)
    assert (found.report.data, found.refused) == (data, {})


def test_a_step_out_of_bounds_is_no_progress_but_an_end_stays_an_end():
    assert within_bounds(progress(10**30), 7, NOW).report is None
    end = within_bounds(replace(progress(10**30), kind=ReportKind.FINISHED), 7, NOW)
    assert end.report.step == 7
    assert "at most 2147483647" in end.refused["step"]


def test_a_text_is_kept_as_far_as_it_can_be_stored():
    found = within_bounds(progress(message="a\0b\ud800c", path="p" * 5000), 0, NOW)
    assert found.report.data["message"] == "a\N{REPLACEMENT CHARACTER}b?c"
    assert len(found.report.data["path"]) <= 200


def test_nothing_took_longer_than_its_workers_have_lived():
    told = {"window_steps": 3, "window_s": 4000.0, "pause_s": 3e8, "save_s": -5.0, "data_s": 50.0}
    found = within_bounds(progress(**told), 0, NOW, lived_s=3600.0)
    assert found.report.data == {"window_steps": 3, "data_s": 50.0}
    assert found.refused["window_s"] == "4000 s are more than the 1 h that the workers have lived"
    assert set(found.refused) == {"window_s", "pause_s"}


def test_a_report_file_may_hold_anything(tmp_path):
    """Wrong types, deep nesting, numbers without end, lines without end: skipped, and what follows is read."""
    path = tmp_path / "reports" / "r.jsonl"
    append_report(path, progress(1))
    good = json.loads(path.read_bytes())
    wrong = [{**good, name: value} for name, value in (("step", "1"), ("rank", None), ("at_s", {}), ("data", []))]
    with path.open("ab") as file:
        for one in wrong:
            file.write(json.dumps(one).encode() + b"\n")
        file.write(b"[" * 100_000 + b"\n")
        file.write(b'{"step": ' + b"9" * 10_000 + b"}\n")
        file.write(b"x" * (5 << 20) + b"\n")
        file.write(b"\xff\xfe\n")
    append_report(path, progress(2))
    read = list(read_reports(path))
    assert [report.step for report, _ in read] == [1, 2]
    assert list(read_reports(path, read[-1][1])) == []


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.just(10**400), st.sampled_from([2**31, -(2**63), 1e308, -1e308, 5e-324])
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(alphabet=st.characters()), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
FIELDS = [
    "steps", "samples", "micro_batch_size", "in_place", "init_from", "pause_s", "state_bytes", "loss", "window_steps",
    "window_s", "samples_per_s", "noise_scale", "data_s", "compute_s", "memory_bytes", "size_bytes", "smoothed_loss",
    "target_loss", "loss_curve", "steps_left", "steps_left_error", "target_reached", "path", "metrics", "early",
    "message", "kind", "field", "absent", "something_else",
]  # fmt: skip


@pytest.fixture
def two_jobs(make_world):
    """Two jobs that train, and how to begin the first one anew where it has come to an end."""
    world = make_world(slots=4)
    good = world.submit(task="good", within=900_000, scaling_curve={1: 10.0}, max_workers=1, steps=10**6)
    numbers = itertools.count()

    def bad():
        job = world.submit(
            task=f"bad{next(numbers)}", within=3000, scaling_curve={1: 10.0}, max_workers=1, target_loss=0.1
        )
        world.reach(job, "running")
        return job

    world.reach(good, "running")
    return world, good, bad


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.sampled_from(list(ReportKind)), min_size=1, max_size=3),
    step=st.one_of(st.integers(0, 300), NUMBERS.filter(lambda number: isinstance(number, int))),
    at_s=NUMBERS,
    data=st.dictionaries(st.sampled_from(FIELDS), st.one_of(ANYTHING, NUMBERS), max_size=8),
)
def test_whatever_a_worker_reports_the_others_are_decided_on(two_jobs, kinds, step, at_s, data):
    world, good, begin = two_jobs
    bad = begin()
    generation = world.generations(bad)[-1]
    hostile = Report(
        kind=kinds[0],
        generation=generation.generation,
        worker_id=next(iter(generation.folded)),
        rank=0,
        step=step,
        at_s=at_s,
        data=data,
    )
    waiting = world.reconciler._inbox._waiting.setdefault((bad.job.job_id, generation.generation), [])
    waiting += [(10**6 + number, replace(hostile, kind=kind)) for number, kind in enumerate(kinds)]
    before = world.status(good).step
    for _ in range(4):
        world.step(0.5)
        assert world.reconciler.problem == ""
    assert world.status(good).step > before
    assert world.status(bad).model_dump_json()
    for table in (IncarnationRow, GenerationRow):
        check_numbers(world.store.engine, table, bad.job.job_id)
    if not world.status(bad).state.terminal:
        world.job_service.cancel(bad.job.job_id, bad.claim, "the next one")
        world.ended(bad)


@pytest.mark.parametrize(
    ("written", "warned"),
    [
        ('{"step": 1e30}', "at most 2147483647"),
        ("1e30", "at most 2147483647"),
        ("-5", "at least 0"),
        ('{"step": [1]}', "no numbers"),
        ('{"step": 7, "loss": 1e300}', "this loss is not taken"),
        ("[" * 60_000, ""),
        ('{"step": "' + "9" * 100_000 + '"}', ""),
    ],
    ids=lambda value: value[:16],
)
def test_a_progress_file_may_hold_anything(tmp_path, written, warned):
    file = tmp_path / "progress.json"
    said = tmp_path / "reports.jsonl"
    progress = PlainProgress(report_file=said, generation=1, worker_id="w", file=file)
    file.write_text(written)
    progress.poll()
    file.write_text('{"step": 8, "loss": 0.5}')
    os.utime(file, (1, 1))  # another time than before, whatever the clock's resolution
    progress.poll(last=True)
    reports = [report for report, _ in read_reports(said)]
    warnings = [report.data["message"] for report in reports if report.kind is ReportKind.WARNING]
    assert [warned in message for message in warnings] == ([True] if warned else [])
    assert (reports[-1].step, reports[-1].data["loss"]) == (8, 0.5)


def test_once_a_job_an_event_says_what_is_not_taken(world):
    job = world.submit(within=3000, scaling_curve={1: 10.0}, max_workers=1)
    world.reach(job, "running")
    generation = world.generations(job)[-1]
    waiting = world.reconciler._inbox._waiting
    for number in range(3):
        report = replace(progress(10**30, loss=0.5), worker_id=next(iter(generation.folded)))
        waiting[job.job.job_id, generation.generation] = [(10**6 + number, report)]
        world.step()
    (warning,) = world.events(job, "warning")
    assert "step about 1e30 must be at most 2147483647" in warning.reason
    assert warning.data["field"] == "step"
    assert world.status(job).state == "running"
