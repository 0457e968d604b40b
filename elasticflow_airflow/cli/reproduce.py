"""``elasticflow reproduce``: prints the command that repeats a run on its own, with the same weights."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import typer

from elasticflow_airflow.api.insight import REDACTED, JobStory, TrainedWith
from elasticflow_airflow.cli.connection import JobId, StateDir, Url, check_name, client, fail, whole_id
from elasticflow_airflow.cli.terminal.lines import note
from elasticflow_airflow.runtime.context import CHECKPOINT_DIR_ENV
from elasticflow_airflow.runtime.protocol import SUBMITTED_ENV


def reproduce(
    job_id: str = JobId,
    url: str | None = Url,
    state_dir: Path | None = StateDir,
    incarnation: int | None = typer.Option(
        None, "--incarnation", min=1, help="Which of its training runs; default: the last."
    ),
    into: Path | None = typer.Option(  # noqa: B008
        None, "--into", help="Folder for the checkpoints of the repetition; default: a new one, here."
    ),
) -> None:
    """Print the command that repeats a job's training alone, without the service: it gives the same weights.

    Whatever changed while the job trained, one worker alone comes to the same result, on a machine of the same kind.
    """
    check_name(job_id)
    with client(url, state_dir) as service:
        job_id = whole_id(service, job_id)
        story = service.story(job_id, incarnation)
    trained = story.trained_with
    if trained is None and story.status.state.terminal:
        fail(
            f"{job_id} is over ({story.status.state}), and its script has reported no step: what it trained, and with"
            " what, is not known. Run the script itself again, as it was submitted"
        )
    if trained is None:
        fail(f"{job_id} has not begun to train: there is nothing to repeat yet")
    if story.status.consistency == "fast":
        fail(
            f"{job_id} trained with consistency='fast': its weights depend on how many workers trained when, and no "
            "command repeats that; consistency='consistent' (the default) can be repeated"
        )
    for caution in _cautions(story, trained):
        note(f"note: {caution}")
    typer.echo(command(story.submission["command"], trained, into or _new_folder(job_id)))


def command(said: Mapping[str, Any], trained: TrainedWith, into: Path) -> str:
    """Return the shell command. ``said`` is the submitted command, in the form for display."""
    code_dir = PurePosixPath(trained.code_dir)
    environment = {
        SUBMITTED_ENV: json.dumps(trained.submitted, sort_keys=True),
        CHECKPOINT_DIR_ENV: str(into.absolute()),
    }
    if trained.threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(trained.threads))
    if said.get("module"):
        environment["PYTHONPATH"] = str(code_dir)
        what = ["-m", str(said["module"])]
    else:
        what = [str(code_dir / str(said["script"]))]
    words = [f"{name}={value}" for name, value in environment.items()]
    run = ["env", *words, trained.python, *what, *said.get("args", ())]
    return f"cd {shlex.quote(said.get('working_dir') or str(code_dir))} && {shlex.join(run)}"


def _cautions(story: JobStory, trained: TrainedWith) -> Iterator[str]:
    """Yield what the command alone does not include, and what may change its weights."""
    said = story.submission["command"]
    if not Path(trained.code_dir).is_dir():
        yield (
            f"the code is not here: run this where the service runs, or put a checkout of the same code in the place "
            f"of {trained.code_dir}"
        )
    if said.get("python"):
        yield f"{trained.python} must find elasticflow_airflow: install it there, or add its folder to PYTHONPATH"
    if said.get("requirements"):
        packages = ", ".join(said["requirements"])
        yield f"the job had packages of its own; install them for {trained.python} first: {packages}"
    if said.get("env"):
        yield f"the job had variables whose values are not shown; set them first: {', '.join(said['env'])}"
    if secrets := story.submission.get("secret_names"):
        yield f"the job had secrets, which are kept nowhere; set them first: {', '.join(secrets)}"
    if any(REDACTED in arg for arg in said.get("args", ())):
        yield f"arguments that may be secret are shown as {REDACTED}; put their values in"
    if story.status.seed is None:
        yield "the script uses no session: what it draws at random is its own, and so are its weights"
    if trained.threads_differed:
        yield "its workers had different numbers of threads: the last bits may differ"
    if trained.micro_batch_changed:
        yield "its micro-batch was halved on the way, when memory did not suffice: the last bits may differ"


def _new_folder(job_id: str) -> Path:
    """Return a folder that does not exist yet, because a training resumes from any checkpoints that it finds."""
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in job_id)
    wanted = [Path(f"reproduced-{name}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000)))]
    return next((folder for folder in wanted if not folder.exists()), wanted[-1])
