"""Tables on the command line, at a real service: whole where a program reads them, never a name that is cut."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from elasticflow_airflow.api import JobIdentity, JobSubmission
from elasticflow_airflow.cli.terminal.tables import Column, table_lines
from elasticflow_airflow.client import ElasticFlowClient

ELASTICFLOW = Path(sys.executable).parent / "elasticflow"
DAGS = ("retrain_the_recommendations_of_every_country_each_night", "b")


@pytest.fixture(scope="module")
def job_ids(shared_daemons) -> list[str]:
    """Jobs of a long name and of a short one, with deadlines, that train for as long as the module's tests run."""
    found = []
    with ElasticFlowClient(shared_daemons.embedded("tables")) as client:
        code = _snapshot(shared_daemons.base)
        client.upload_snapshot(code)
        for dag_id in DAGS:
            submission = JobSubmission(
                identity=JobIdentity(dag_id=dag_id, run_id="one", task_id="train_every_model"),
                command={"snapshot": code.sha256, "script": code.entry},
                length={"steps": 10**6},
                global_batch_size=8,
                deadline_at=time.time() + 200 * 3600.0,
                scaling_curve={1: 10.0, 2: 18.0, 4: 30.0},
            )
            found.append(client.submit(submission).job.job_id)
    return found


def _snapshot(folder: Path):
    from elasticflow_airflow.client import snapshot_script

    code = folder / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text("print('the fake engine never runs this')\n")
    return snapshot_script(code / "train.py")


@pytest.fixture
def environment(shared_daemons):
    """What a shell has of its own; without COLUMNS, and at the module's service."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "ELASTICFLOW_URL")}
    return {**kept, "ELASTICFLOW_STATE_DIR": str(shared_daemons.state_dir("tables")), "TERM": "xterm"}


@pytest.mark.parametrize("more", [{}, {"COLUMNS": "80"}, {"FORCE_COLOR": "1"}], ids=["bare", "80 columns", "colours"])
def test_in_a_pipe_a_job_is_one_line_with_its_whole_id(job_ids, environment, more):
    done = subprocess.run(
        [ELASTICFLOW, "jobs"], env={**environment, **more}, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + len(job_ids)
    assert {line.split()[0] for line in lines[1:]} == set(job_ids)
    assert "…" not in done.stdout


@pytest.mark.parametrize("more", [{}, {"COLUMNS": "80"}], ids=["bare", "80 columns"])
def test_in_a_pipe_a_forecast_names_whole_tasks(job_ids, environment, more):
    command = [ELASTICFLOW, "forecast", "--hours", "300"]
    done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, check=True)
    for dag_id in DAGS:
        assert f"{dag_id}.train_every_model" in done.stdout
    assert "…" not in done.stdout


def test_on_a_narrow_terminal_ids_can_be_copied(job_ids, environment):
    lines = on_terminal([ELASTICFLOW, "jobs"], environment, columns=80).splitlines()
    assert max(len(line) for line in lines) <= 80
    short = {line.split()[0] for line in lines if line and not line[0].isspace()} - {"job", "times"}
    assert len(short) == len(job_ids)
    for one in short:
        (job_id,) = [whole for whole in job_ids if whole.endswith(one)]
        assert job_id in on_terminal([ELASTICFLOW, "show", one], environment, columns=200)


def test_the_state_of_all_fits_a_narrow_terminal(job_ids, environment):
    shown = on_terminal([ELASTICFLOW, "status"], environment, columns=80)
    assert shown.startswith("all is well: elasticflow ")
    assert "2 running" in shown
    assert len(shown.splitlines()) < 24


def on_terminal(command, environment, *, columns: int) -> str:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command, env={**environment, "NO_COLOR": "1", "TERM": "dumb"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:
        pass  # Its other end was closed.
    finally:
        os.close(ours)
    assert process.wait(60) == 0, shown
    return shown.decode().replace("\r\n", "\n")


# -- the layout ------------------------------------------------------------------------------------------------------

COLUMNS = (Column("job", key=True), Column("state"), Column("step", number=True), Column("why"))
ROWS = [
    ["train-49074b33567dc1dc", "running, at risk", "5/200", "it waits for slots that others hold until noon"],
    ["other", "failed", "7", "-"],
]


def test_without_a_width_a_row_is_a_line():
    lines = table_lines(COLUMNS, ROWS, None)
    assert len(lines) == 3
    assert lines[1].split("  ")[0] == "train-49074b33567dc1dc"
    assert lines[1].endswith("until noon")


@pytest.mark.parametrize("width", [100, 80, 60])
def test_on_a_terminal_rows_fold_between_words(width):
    lines = table_lines(COLUMNS, ROWS, width)
    assert all(cell_len(line) <= width for line in lines)
    assert sum(line.startswith("train-49074b33567dc1dc ") for line in lines) == 1
    assert set(" ".join(lines).split()) >= {word for row in ROWS for cell in row for word in cell.split()}


@pytest.mark.parametrize("width", [40, 24])
def test_what_does_not_fit_is_written_below_its_name(width):
    lines = table_lines(COLUMNS, ROWS, width)
    assert lines[0] == "train-49074b33567dc1dc"
    assert " ".join(" ".join(lines).split()).startswith("train-49074b33567dc1dc state running, at risk; step 5/200;")
    assert all(cell_len(line) <= width for line in lines)


def test_text_of_jobs_is_no_markup_and_a_row_stays_a_line():
    lines = table_lines(COLUMNS, [["a", "b", "c", "torn [red]at\nthe end"]], None)
    assert lines[1].endswith("torn [red]at the end")
