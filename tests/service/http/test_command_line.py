"""The command line over a real service: submit, follow, amend, cancel, doctor; and what it says to bad input."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from elasticflow_airflow.api import Event, ForecastAnswer, Health, JobStatus, LogPiece, State, Verdict
from elasticflow_airflow.cli import submit as submitting
from elasticflow_airflow.cli.connection import client
from elasticflow_airflow.cli.logs import read
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.cli.status import Status
from elasticflow_airflow.cli.terminal.moments import moment_of
from elasticflow_airflow.client import ElasticFlowClient, JobNotFound
from elasticflow_airflow.client.errors import ServiceUnavailable
from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV


@pytest.fixture
def command(shared_daemons, monkeypatch):
    """Run a command against one embedded service on the fake engine, which the first submit starts."""
    for name, value in shared_daemons.environment(profile_s=1.0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ELASTICFLOW_STATE_DIR", str(shared_daemons.state_dir("cli")))
    monkeypatch.delenv("ELASTICFLOW_URL", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def script(tmp_path):
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "train.py"
    path.write_text("print('training')\n")
    return path


def job_of(output: str) -> str:
    found = re.search(r"^(\S+): (admitted|best effort|undecided)", output, re.MULTILINE)
    assert found, output
    return found[1]


def test_submit_waits_for_the_end_and_says_where_the_checkpoint_is(command, script):
    fast = json.dumps({"steps_per_s": {"1": 500.0}, "startup_s": 0.1})
    done = command(
        *("submit", script, "--steps", 20, "--batch", 8, "--best-effort", "--wait", "--env", f"{BEHAVIOUR_ENV}={fast}")
    )
    assert done.exit_code == 0, done.output
    assert "succeeded after 20 steps" in done.output


def test_what_cannot_be_repeated_is_not(command, script, monkeypatch):
    """What can be is in test_reproduce_local: here no session trains."""
    common = ("submit", script, "--steps", 100000, "--batch", 8, "--best-effort", "--no-wait")
    unlike = job_of(command(*common, "--name", "unlike", "--consistency", "fast").output)
    monkeypatch.setenv("A_TOKEN", "hunter3")
    more = ("--name", "plain", "--python", sys.executable, "--secret-env", "A_TOKEN", "--", "--token=hunter2", "it's")
    plain = job_of(command(*common, *more).output)
    end = time.monotonic() + 30
    while (done := command("reproduce", plain)).exit_code and time.monotonic() < end:
        assert "has not begun to train" in done.output
        time.sleep(0.1)
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("""train.py '--token=***' 'it'"'"'s'\n"""), done.stdout
    assert "may be secret" in done.stderr
    assert "the job had secrets, which are kept nowhere; set them first: A_TOKEN" in done.stderr
    assert "hunter" not in done.output
    assert f"{sys.executable} must find elasticflow_airflow" in done.stderr
    while "has not begun" in (done := command("reproduce", unlike)).output and time.monotonic() < end:
        time.sleep(0.1)
    assert done.exit_code == 1
    assert "consistency='fast'" in done.output
    assert command("reproduce", "no-such-job").exit_code == 1
    for job in (plain, unlike):
        command("cancel", job, "--yes")


def test_of_a_plain_script_that_is_over_it_is_said_that_nothing_is_known(command, script):
    silent = json.dumps({"reports": False, "exit_at_step": 5, "startup_s": 0.1})
    done = command("submit", script, "--batch", 8, "--best-effort", "--wait", "--env", f"{BEHAVIOUR_ENV}={silent}")
    assert done.exit_code == 0, done.output
    assert "succeeded: the script ended with status 0, and reported no step" in done.output
    done = command("reproduce", job_of(done.output))
    assert done.exit_code == 1
    assert "is over (succeeded), and its script has reported no step" in done.output
    assert "has not begun" not in done.output


def test_what_decides_on_the_weights_and_how_progress_is_told_is_submitted(command, script):
    common = ("submit", script, "--steps", 100000, "--batch", 32, "--best-effort", "--no-wait")
    told = ("--seed", 23, "--logical-workers", 4, "--progress-file", "progress.json", "--name", "all-said")
    job = job_of(command(*common, *told).output)
    with client(None, None) as service:
        said = service.story(job).submission
    assert (said["seed"], said["logical_workers"], said["progress_file"]) == (23, 4, "progress.json")
    shown = command("show", job).output
    assert "shares      4 logical workers\nseed        23\n" in shown
    command("cancel", job, "--yes")
    refused = command(*common, "--logical-workers", 3)
    assert refused.exit_code == 2
    assert "logical_workers=3 is not a power of two" in refused.output


def test_a_job_is_submitted_amended_and_cancelled(command, script):
    done = command("submit", script, "--steps", 100000, "--batch", 8, "--best-effort", "--name", "nightly")
    assert done.exit_code == 0, done.output
    job = job_of(done.output)
    assert f"elasticflow logs -f {job}" in done.output
    assert command("amend", job).exit_code == 2
    done = command("amend", job, "--value", "3")
    assert done.exit_code == 0, done.output
    assert "value 3" in done.output
    done = command("cancel", job)
    assert done.exit_code == 1
    assert "give --yes" in done.output
    done = command("cancel", job, "--yes", "--reason", "enough")
    assert done.exit_code == 0, done.output
    end = time.monotonic() + 30
    while "cancelled" not in (shown := command("show", job)).output and time.monotonic() < end:
        time.sleep(0.1)
    assert "enough" in shown.output
    assert "already" in command("cancel", job).output


def test_a_promise_that_cannot_be_made_ends_it_with_status_3(command, script):
    common = ("submit", script, "--steps", 10**6, "--batch", 8, "--deadline", "+1m")
    # Measured before: a job of unknown speed is not refused at once.
    done = command(*common, "--dry-run")
    assert done.exit_code in (0, 3), done.output
    assert command("submit", script, "--steps", 1, "--batch", 8).exit_code == 2
    assert command("submit", script, "--steps", 1, "--batch", 8, "--deadline", "2001-01-01T00:00").exit_code == 2


SPEED = {"steps_per_s": {"1": 50.0, "2": 90.0, "4": 160.0}, "startup_s": 0.1}


@pytest.fixture
def submit(command, script):
    """Submit what nobody has measured, with a deadline in half an hour."""
    environment = ("--env", f"{BEHAVIOUR_ENV}={json.dumps(SPEED)}", "--deadline", "+30m")
    return lambda *options: command("submit", script, "--batch", 8, *environment, *options)


def test_the_verdict_is_waited_for(submit, command):
    done = submit("--steps", 10_000, "--name", "can-be")
    assert done.exit_code == 0, done.output
    assert re.search(r"^can-be-train-\w+: admitted, ", done.output, re.MULTILINE), done.output
    assert "not decided yet, measures its speed" in done.output  # Meanwhile it said what it waits for.
    command("cancel", job_of(done.output), "--yes")


def test_a_rejection_is_waited_for_and_the_next_attempt_may_ask_for_less(submit, command):
    done = submit("--steps", 10_000_000, "--name", "cannot-be")
    assert done.exit_code == 3, done.output
    (job_id,) = re.findall(r"^(cannot-be-train-\w+): rejected, ", done.output, re.MULTILINE)
    assert "the earliest deadline that can be promised is" in done.output
    amended = command("amend", job_id, "--best-effort")
    assert (amended.exit_code, "the next attempt is best effort" in amended.output) == (0, True), amended.output


def test_without_waiting_it_says_that_nothing_is_decided(submit, command):
    done = submit("--steps", 10_000, "--name", "at-once", "--no-wait")
    assert done.exit_code == 0, done.output
    assert "at-once-train-" in done.output
    assert "undecided" in done.output
    assert "may still be rejected" in done.output
    command("cancel", job_of(done.output), "--yes")


def test_whoever_interrupts_the_wait_is_told_that_the_job_goes_on(submit, command, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    # The command's own sleep alone: the client sleeps, too, before it asks a busy service again.
    monkeypatch.setattr(submitting, "time", SimpleNamespace(time=time.time, sleep=interrupt))
    done = submit("--steps", 10_000, "--name", "interrupted")
    monkeypatch.undo()
    assert done.exit_code == 130, done.output
    (job,) = set(re.findall(r"interrupted-train-\w+", done.output))
    assert f"{job} goes on" in done.output
    assert f"elasticflow cancel {job}" in done.output


def test_a_job_that_ends_before_its_verdict_is_told_of(submit):
    done = submit("--steps", 1, "--name", "short")
    assert done.exit_code == 0, done.output
    assert re.search(r"succeeded after 1 steps|: admitted, ", done.output)


@pytest.mark.parametrize(("on_reject", "asked"), [("wait", 0), ("fail", 2)])
def test_who_chose_to_wait_for_capacity_is_not_kept(world, monkeypatch, on_reject, asked):
    """A job that may be rejected waits for slots to be measured on, and is asked about until it has a verdict."""
    submission = world.submission(within=600.0, on_reject=on_reject)
    waits = world.attached(world.job_service.submit(submission.identity.job_id, submission)).job.model_copy(
        update={"state": State.WAITING}
    )
    answers = [waits, waits.model_copy(update={"verdict": Verdict(decision="admitted")})]
    monkeypatch.setattr(submitting, "time", SimpleNamespace(time=time.time, sleep=lambda _: None))
    service = SimpleNamespace(status=lambda _: answers.pop(0))
    job = submitting._await_verdict(service, waits, submission)
    assert 2 - len(answers) == asked
    assert job.verdict.decision == ("undecided" if on_reject == "wait" else "admitted")


def test_bad_input_is_named(command, script, tmp_path):
    done = command("submit", tmp_path / "none.py", "--steps", 1, "--batch", 8, "--best-effort")
    assert done.exit_code == 2
    assert "none.py is not there" in done.output
    assert "DAG" not in done.output
    done = command("submit", tmp_path, "--steps", 1, "--batch", 8, "--best-effort")
    assert done.exit_code == 2
    assert "is a folder" in done.output
    assert "DAG" not in done.output
    done = command("submit", script, "--epochs", 2, "--batch", 8, "--best-effort", "--min-workers", 3)
    assert done.exit_code == 2
    assert "power of two" in done.output
    done = command("submit", script, "--steps", 1, "--batch", 8, "--best-effort", "--secret-env", "NOT_SET_HERE")
    assert done.exit_code == 2
    assert "NOT_SET_HERE" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--steps", 100, "--epochs", 3), "--steps=100 beside --epochs=3"),
        (("--steps", 100, "--samples", 3), "--steps=100 beside --samples=3"),
        (("--target-loss", 0.1), "target_loss=0.1 needs"),
        (("--steps", 1, "--target-loss", 0.1, "--progress-regex", r"(?P<step>\d+)"), "beside progress_regex="),
        (("--steps", 1, "--progress-regex", "x"), "progress_regex has no group"),
        (("--steps", 1, "--latest-deadline", "+3h"), "--latest-deadline='+3h' beside --on-reject=fail"),
        (("--steps", 1, "--on-reject", "late"), 'on_reject="late" needs latest_deadline'),
        (("--steps", 1, "--on-reject", "shrug"), "--on-reject='shrug': Input should be 'fail', "),
        (("--steps", 1, "--consistency", "slow"), "--consistency='slow': Input should be 'consistent' or 'fast'"),
        (("--steps", 1, "--value", "inf"), "--value=inf: must be a finite number: give at least 1e-09"),
        (("--steps", 1, "--min-workers", 4, "--max-workers", 2), "max_workers=2 is less than min_workers=4"),
        (("--steps", 1, "--deadline", "+9999999999d"), "--deadline='+9999999999d' is too far away"),
        (("--steps", 1, "--deadline", "9999999d"), "--deadline='9999999d' is too far away"),
    ],
    ids=lambda given: " ".join(map(str, given)) if isinstance(given, tuple) else "",
)
def test_options_that_do_not_go_together_are_refused(command, script, options, said):
    deadline = () if "--deadline" in options else ("--deadline", "+2h")
    done = command("submit", script, "--batch", 8, *deadline, *options)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())
    assert "Value error" not in done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)


def test_a_state_that_there_is_not_is_refused_with_those_that_there_are(command):
    done = command("jobs", "--state", "bogus")
    assert done.exit_code == 2
    for state in State:
        assert f"'{state}'" in done.output


@pytest.mark.parametrize("words", [("show", ""), ("events", " "), ("logs", ""), ("cancel", ""), ("drain", "")])
def test_an_empty_name_is_refused(command, script, words):
    command("submit", script, "--steps", 1, "--batch", 8, "--best-effort")
    done = command(*words)
    assert done.exit_code == 2, done.output
    assert "is empty" in done.output


def test_doctor_of_a_running_service(command, script):
    command("submit", script, "--steps", 1, "--batch", 8, "--best-effort")
    done = command("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert found["slots"]["message"].startswith("4 slots (fake)") or found["slots"]["level"] == "ok"
    assert found["scheduler"]["level"] == found["database"]["level"] == found["clock"]["level"] == "ok"
    assert found["token"]["message"].startswith("none is needed")


def test_doctor_looks_at_the_interpreters_that_tasks_name(command, script, tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"python": "3.11.0"}\'\n')
    python.chmod(0o755)
    command("submit", script, "--steps", 1, "--batch", 8, "--best-effort", "--python", python)
    found = [finding for finding in json.loads(command("doctor", "--json").stdout) if finding["name"] == "torch"]
    assert [finding["level"] for finding in found] == ["warning", "ok"]
    assert str(python) in found[0]["message"]


def test_who_only_looks_starts_no_service_and_is_told_how_to_go_on(command, script, shared_daemons):
    job = job_of(command("submit", script, "--steps", 1, "--batch", 8, "--best-effort").output)
    (pid,) = shared_daemons.pids("cli")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + 60
    while (shared_daemons.state_dir("cli") / "service.sock").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    for looking in ("show", job), ("jobs",), ("health",), ("logs", job, "--follow"), ("cancel", job):
        done = command(*looking)
        assert done.exit_code == 1, done.output
        assert "the last one was told to stop" in done.output
        assert "elasticflow serve --state-dir" in done.output
    assert not (shared_daemons.state_dir("cli") / "service.sock").exists()
    command("submit", script, "--steps", 1, "--batch", 8, "--best-effort")
    assert job in command("show", job).output


def test_where_no_service_has_ever_run(command, tmp_path):
    done = command("jobs", "--state-dir", tmp_path)
    assert done.exit_code == 1
    assert "no service has ever run in" in done.output
    assert "elasticflow submit" in done.output


# -- logs ------------------------------------------------------------------------------------------------------------


class Logs:
    """Logs in memory that rotate and end as a test says."""

    def __init__(self, status) -> None:
        self.statuses = [status]
        self.logs: dict[tuple[int, str], tuple[int, str, bool]] = {}
        """(incarnation, name): first byte that is left, text from there, whether its worker has ended."""

    def status(self, _job_id):
        return self.statuses[0]

    def read_log(self, job_id, name, offset=0, limit=65536, incarnation=None):
        if (incarnation, name) not in self.logs:
            raise JobNotFound(name)
        first, text, ended = self.logs[incarnation, name]
        start = min(max(offset, first), first + len(text))
        piece = text[start - first : start - first + limit]
        at_end = start + len(piece) == first + len(text)
        return LogPiece(text=piece, start_offset=start, next_offset=start + len(piece), end_of_file=at_end and ended)


@pytest.fixture
def follow(world):
    """Follow scripted logs; ``then`` is called at each pause, and says by StopIteration when the job has ended."""
    job = world.submit(steps=10).job

    def run(logs, then, worker=None):
        def pause():
            try:
                next(then)
            except StopIteration:
                logs.statuses[0] = logs.statuses[0].model_copy(update={"state": State.SUCCEEDED})

        pieces = list(read(logs, job.job_id, worker, follow=True, pause=pause))
        return "".join(piece.text for piece in pieces), [piece.note for piece in pieces if piece.note]

    return run, lambda **changes: Logs(job.model_copy(update={"state": State.RUNNING, **changes}))


def test_what_was_rotated_away_is_said_and_nothing_is_printed_twice(follow):
    run, make = follow
    logs = make(log_names=["g000001-r000"])
    logs.logs[1, "g000001-r000"] = (0, "abc", False)

    def then():
        logs.logs[1, "g000001-r000"] = (2, "cde", False)
        yield
        logs.logs[1, "g000001-r000"] = (10, "kl", False)
        yield

    assert run(logs, then()) == ("abcdekl", ["5 bytes of g000001-r000 were rotated away"])


def test_the_end_of_an_old_log_is_read_before_the_new_one_begins(follow):
    run, make = follow
    logs = make(log_names=["g000001-r000"])
    logs.logs[1, "g000001-r000"] = (0, "first ", False)

    def then():
        names = ["g000001-r000", "g000002-r000"]
        logs.statuses[0] = logs.statuses[0].model_copy(update={"log_names": names})
        logs.logs[1, "g000002-r000"] = (0, "third", False)
        yield
        logs.logs[1, "g000001-r000"] = (0, "first second ", True)
        yield

    assert run(logs, then()) == ("first second third", ["goes on in g000002-r000"])


def test_a_survivor_takes_over_from_a_dead_rank_0(follow):
    run, make = follow
    logs = make(log_names=["g000001-r000", "g000001-r001"])
    logs.logs[1, "g000001-r000"] = (0, "a", True)
    logs.logs[1, "g000001-r001"] = (0, "its own lines;", False)

    def then():
        logs.logs[1, "g000001-r001"] = (0, "its own lines;b", False)
        yield

    assert run(logs, then()) == ("ab", ["goes on in g000001-r001"])


def test_a_new_incarnation_is_followed(follow):
    run, make = follow
    logs = make(log_names=["g000001-r000"])
    logs.logs[1, "g000001-r000"] = (0, "a", True)

    def then():
        changed = {"incarnation": 2, "log_names": ["g000002-r000"]}
        logs.statuses[0] = logs.statuses[0].model_copy(update=changed)
        logs.logs[2, "g000002-r000"] = (0, "b", True)
        yield

    assert run(logs, then()) == ("ab", ["goes on in g000002-r000"])


# -- moments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "after_s"),
    [("+2h30m", 9000), ("90m", 5400), ("1d", 86400), ("+45s", 45), ("2027-01-15T09:00:00+01:00", 0)],
)
def test_moments(text, after_s):
    now = 1_800_000_000.0 if after_s else 1_799_000_000.0
    assert moment_of(text, now) == (now + after_s if after_s else 1_800_000_000.0)


def test_a_time_of_day_is_the_next_one():
    now = 1_800_000_000.0
    at = moment_of("07:30", now)
    assert now < at <= now + 86400 + 3600
    assert time.localtime(at)[3:5] == (7, 30)


@pytest.mark.parametrize("text", ["", "25:00", "soon", "+", "2001-01-01", "+9999999999d", "9" * 5000 + "s", "9999999d"])
def test_no_moment(text):
    import typer

    with pytest.raises(typer.BadParameter, match="--deadline"):
        moment_of(text, 1_800_000_000.0)


def test_what_is_read_is_printed_as_json_too(command, script):
    done = command("submit", script, "--steps", 10**6, "--batch", 8, "--best-effort", "--run", "json")
    job_id = job_of(done.output)

    def read(*words):
        done = command(*words, "--json")
        assert done.exit_code in (0, 1), done.output
        return json.loads(done.stdout)

    assert Health.model_validate(read("health")).engine == "fake"
    assert job_id in [JobStatus.model_validate(one).job_id for one in read("jobs")]
    assert read("jobs", "--dag", "nobody's") == []
    shown = read("show", job_id)
    assert shown["job"]["job_id"] == job_id
    assert Event.model_validate(shown["events"][0]).kind == "submitted"
    lines = command("events", job_id, "--json").stdout.splitlines()
    assert json.loads(lines[0])["kind"] == "submitted"
    assert ForecastAnswer.model_validate(read("forecast")).items is not None
    assert isinstance(read("jobs", "--unowned"), list)
    told = Status.model_validate(read("status"))
    assert told.running + told.waiting >= 1
    assert command("cancel", job_id, "--yes").exit_code == 0


def test_a_part_of_an_id_that_one_job_has_is_enough(command, script):
    done = [command("submit", script, "--steps", 10**6, "--batch", 8, "--best-effort", "--run", n) for n in "ab"]
    first, second = (job_of(one.output) for one in done)
    short = next(first[-n:] for n in range(4, 17) if first[-n:] not in second)
    for words in (("show", short), ("events", short), ("amend", short, "--value", 2)):
        told = command(*words)
        assert told.exit_code == 0, told.output
    assert first in command("show", short).output
    both = command("show", first[:-17])
    assert both.exit_code == 2
    assert "is in the ids of" in both.output
    assert command("show", "ffffffffffff").exit_code == 1
    for job_id in (first, second):
        command("cancel", job_id, "--yes")


def test_status_says_what_needs_attention_and_ends_with_1(command, script):
    done = command("submit", script, "--steps", 10**9, "--batch", 8, "--deadline", "+2m", "--run", "hopeless")
    assert "rejected" in done.output
    told = command("status")
    assert told.exit_code == 1, told.output
    assert told.output.startswith("needs attention: elasticflow ")
    assert "was rejected: " in told.output


def test_without_a_forecast_all_is_not_well(command, script, monkeypatch):
    command("submit", script, "--steps", 20, "--batch", 8, "--best-effort", "--run", "calm")

    def away(*_, **__):
        raise ServiceUnavailable("it has too much to do", "ask again")

    monkeypatch.setattr(ElasticFlowClient, "forecast", away)
    told = command("status", "--json")
    assert told.exit_code == 1, told.output
    found = Status.model_validate_json(told.stdout)
    assert (found.well, found.forecast) == (False, None)
    assert any(problem.startswith("the forecast could not be made: it has too much") for problem in found.problems)


def test_the_version_is_an_option_too(command):
    assert command("--version").output == command("version").output


def test_what_nobody_wants_is_listed_and_cancelled_after_a_question(command, script, shared_daemons):
    """A task whose Airflow is gone asks no more, and its lease is minutes away."""
    from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
    from elasticflow_airflow.client import ElasticFlowClient

    done = command("submit", script, "--steps", 100000, "--batch", 8, "--best-effort", "--name", "at home")
    wanted = job_of(done.output)
    identity = JobIdentity(dag_id="daily", run_id="run1", task_id="train", map_index=3)
    with ElasticFlowClient(shared_daemons.embedded("cli")) as service:
        sent = service.story(wanted).submission["command"]
        code = Command(snapshot=sent["snapshot"], script=sent["script"])
        length = Length(steps=100000)
        service.submit(
            JobSubmission(identity=identity, command=code, length=length, global_batch_size=8, best_effort=True)
        )
    time.sleep(1.1)  # the shortest silence that can be asked for
    silent = ("--unowned", "--silent", "1")
    listed = command("jobs", *silent).output
    row = rf"^{identity.job_id}\s+daily\.train\[3\], run run1\s.*nobody has asked for it for [\d.]+ s"
    assert re.search(row, listed, re.MULTILINE), listed
    assert wanted not in listed
    assert "no such jobs" in command("jobs", *silent, "--dag", "other").output
    assert command("cancel").exit_code == command("cancel", wanted, "--unowned").exit_code == 2
    asked = command("cancel", *silent)
    assert asked.exit_code == 1
    assert "give --yes" in asked.output
    done = command("cancel", *silent, "--yes")
    assert done.exit_code == 0, done.output
    assert f"{identity.job_id} is " in done.output
    assert wanted not in done.output
    command("cancel", wanted, "--yes")
