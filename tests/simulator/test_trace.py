"""Traces: the public forms and our own are read alike, and what is wrong is said with file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import TraceJob, read_trace, write_trace

GOOD = "a,0,100,net,32,50"
PAPER = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration"
T4 = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu,duration"
OWN = "job_id,submitted_s,steps,model,batch_size,deadline_s,workers,duration_s,best_effort,value,task,expected"


@pytest.mark.parametrize("header", [PAPER, T4])
def test_the_public_forms_are_read(trace_file: Callable[..., Path], header: str) -> None:
    trace = read_trace(trace_file("x,10,500,vgg16,90,64,4,70", header=header))
    (job,) = trace.jobs
    assert replace(job, line=0) == TraceJob(
        job_id="x", submitted_s=10, steps=500, model="vgg16", batch_size=64, deadline_s=90, workers=4, duration_s=70
    )
    assert trace.ignored == ()
    assert trace.name == "trace"


def test_our_own_form_is_read_whole_and_unknown_columns_are_named(trace_file: Callable[..., Path]) -> None:
    row = "x,10,500,net,64,90,4,70,0,2.5,nightly,1,blue"
    trace = read_trace(trace_file(row, header=OWN + ",colour"))
    (job,) = trace.jobs
    assert (job.value, job.task, job.expected, job.line) == (2.5, "nightly", True, 2)
    assert trace.ignored == ("colour",)


def test_jobs_come_in_order_of_submission_and_equal_ones_as_written(trace_file: Callable[..., Path]) -> None:
    trace = read_trace(trace_file("late,9,1,net,1,99", "b,3,1,net,1,99", "a,3,1,net,1,99", "first,-1,1,net,1,99"))
    assert [job.job_id for job in trace.jobs] == ["first", "b", "a", "late"]
    assert [job.line for job in trace.jobs] == [5, 3, 4, 2]


def test_a_job_without_deadline_or_marked_so_is_best_effort(trace_file: Callable[..., Path]) -> None:
    path = trace_file("a,0,1,net,1,", "b,0,1,net,1,50", "c,0,1,net,1,50", header="job_id,submitted_s,steps,model,"
                      "batch_size,deadline_s")  # fmt: skip
    assert [job.deadline_s for job in read_trace(path).jobs] == [None, 50, 50]
    header = "job_id,submitted_s,steps,model,batch_size,deadline_s,best_effort"
    path = trace_file("a,0,1,net,1,50,1", "b,0,1,net,1,50,0", "c,0,1,net,1,50,", header=header)
    assert [job.deadline_s for job in read_trace(path).jobs] == [None, 50, 50]


def test_blank_lines_and_a_byte_order_mark_are_no_jobs(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"\xef\xbb\xbfjob_id,submitted_s,steps,model,batch_size,deadline_s\r\n\r\na,0,1,net,1,5\r\n , \r\n"
    )
    assert [job.job_id for job in read_trace(path).jobs] == ["a"]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    jobs = [
        TraceJob(job_id="a", submitted_s=0.1, steps=7, model="m", batch_size=2, deadline_s=9.7, workers=2, value=3.0),
        TraceJob(
            job_id="b",
            submitted_s=2,
            steps=7.5,
            model="m, n",
            batch_size=2,
            deadline_s=None,
            duration_s=1 / 3,
            task="t",
            expected=True,
        ),
    ]
    write_trace(tmp_path / "t.csv", jobs)
    assert [replace(job, line=0) for job in read_trace(tmp_path / "t.csv").jobs] == jobs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[TraceJob]:
        yield TraceJob(job_id="a", submitted_s=0, steps=7, model="m", batch_size=2, deadline_s=9)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "t.csv", interrupted())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("b,0,100,net,32", "5 cells where the header has 6"),
        ("b,0,100,net,32,50,7", "7 cells where the header has 6"),
        ("b,soon,100,net,32,50", "submitted_s is 'soon'; it must be a number"),
        ("b,,100,net,32,50", "submitted_s is ''; it must be a number"),
        ("b,inf,100,net,32,50", "submitted_s is 'inf'; it must be finite"),
        ("b,0,nan,net,32,50", "steps is 'nan'; it must be finite"),
        ("b,0,0,net,32,50", "steps is '0'; a job has at least one"),
        ("b,0,100,net,3.5,50", "batch_size is '3.5'; it must be a whole number of at least 1"),
        ("b,0,100,net,0,50", "batch_size is '0'; it must be a whole number of at least 1"),
        ("b,0,100,,32,50", "the name of the model is empty"),
        (",0,100,net,32,50", "job_id is empty"),
        ("b,60,100,net,32,50", "the deadline 50 is not after the submission at 60"),
        ("b,50,100,net,32,50", "the deadline 50 is not after the submission at 50"),
        ("b,0,100,net,32,never", "deadline_s is 'never'; it must be a number"),
        ("a,0,100,net,32,50", "job_id 'a' is already that of line 2"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(trace_file: Callable[..., Path], row: str, says: str) -> None:
    path = trace_file(GOOD, row)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("column", ["workers", "value", "best_effort", "expected"])
def test_a_negative_number_in_a_column_that_may_be_left_out(trace_file: Callable[..., Path], column: str) -> None:
    path = trace_file(f"{GOOD},-1", header=f"job_id,submitted_s,steps,model,batch_size,deadline_s,{column}")
    with pytest.raises(InputError, match=rf":2: {column} is '-1'"):
        read_trace(path)


def test_the_line_is_that_of_the_file_also_after_a_cell_with_a_line_break(trace_file: Callable[..., Path]) -> None:
    path = trace_file('"a\nb",0,100,net,32,50', "c,0,-4,net,32,50")
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:4: steps is '-4'")


def test_a_row_over_several_lines_is_named_by_its_first(trace_file: Callable[..., Path]) -> None:
    path = trace_file(GOOD, '"b,0,100,net,32,50', "c,0,100,net,32,50", "d,0,100,net,32,50")
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}:3: 1 cells where the header has 6; is a quote not closed?"
    path = trace_file(GOOD, '"b\nb",0,-4,net,32,50')
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: steps is '-4'")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_file_in_another_encoding_is_named_with_the_line(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(end.join([b"job_id,submitted_s,steps,model,batch_size,deadline_s", GOOD.encode(), b"\xe9,0", b""]))
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:3: cannot be read as a CSV file: byte 0xe9 is no UTF-8")


def test_a_header_that_lacks_something_says_what_and_what_it_has(trace_file: Callable[..., Path]) -> None:
    path = trace_file("a,0", header="job_id,when")
    with pytest.raises(InputError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:1: ")
    assert "submitted_s (or submission_time, submit_time)" in text
    assert "model (or model_name)" in text
    assert text.endswith("it has job_id, when")


def test_a_trace_without_jobs_or_without_one_deadline(tmp_path: Path, trace_file: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match="has no jobs, only a header"):
        read_trace(trace_file())
    with pytest.raises(InputError, match="no job of the trace has a deadline"):
        read_trace(trace_file("a,0,100,net,32,", "b,0,100,net,32,"))
    empty = tmp_path / "empty.csv"
    empty.touch()
    with pytest.raises(InputError, match="the file is empty"):
        read_trace(empty)


def test_what_is_no_text_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "absent.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"job_id,\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as a CSV file"):
        read_trace(binary)
