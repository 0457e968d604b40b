"""Context of a session: alone, under a bare torchrun, or under the service; detected once from the environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    SESSION_ENV,
    SUBMITTED_ENV,
    SUBMITTED_FIELDS,
    WORKER_ENV,
    SessionConfig,
)
from elasticflow_airflow.runtime.reporting import ConsoleReporter, FileReporter
from elasticflow_airflow.runtime.stores.manifest import CheckpointError
from elasticflow_airflow.runtime.stores.open_store import open_store
from elasticflow_airflow.runtime.stores.store import is_remote

CHECKPOINT_DIR_ENV = "ELASTICFLOW_CHECKPOINT_DIR"
"""Environment variable: checkpoint folder or URL of a session that runs alone."""
DEFAULT_CHECKPOINT_DIR = "elasticflow-checkpoints"


@dataclass(slots=True)
class Context:
    """Settings of this process from its environment.

    ``managed`` is True under the service, which promotes checkpoints. ``submitted`` means that submitted settings
    override those of the script: under the service, and where a run of the service is repeated.
    """

    config: SessionConfig
    managed: bool
    submitted: bool
    worker_id: str
    generation: int
    checkpoints: Path | str
    """Checkpoint folder or fsspec URL."""
    reporter: FileReporter | ConsoleReporter


def detect(checkpoint_dir: Path | str | None = None) -> Context:
    """Read the environment, and check before the training that checkpoints can be written.

    Raises ValueError if the service's session file is missing or damaged, CheckpointError if nothing can be saved.
    """
    session_file = os.environ.get(SESSION_ENV)
    if session_file:
        config = SessionConfig.read(Path(session_file))
        worker_id, generation = os.environ[WORKER_ENV], int(os.environ[GENERATION_ENV])
        return Context(
            config=config,
            managed=True,
            submitted=True,
            worker_id=worker_id,
            generation=generation,
            checkpoints=config.checkpoints,
            reporter=FileReporter(Path(config.incarnation_dir), generation, worker_id),
        )
    where = checkpoint_dir or os.environ.get(CHECKPOINT_DIR_ENV) or DEFAULT_CHECKPOINT_DIR
    checkpoints = str(where) if is_remote(where) else Path(where).absolute()
    _try_to_write(checkpoints, "checkpoint_dir" if checkpoint_dir else CHECKPOINT_DIR_ENV)
    here = str(checkpoints.parent) if isinstance(checkpoints, Path) else os.getcwd()
    repeated = _submitted_elsewhere()
    config = SessionConfig(job_id="alone", incarnation=0, incarnation_dir=here, code_dir=os.getcwd(), **repeated)
    newest = open_store(checkpoints).newest_generation()
    return Context(
        config=config,
        managed=False,
        submitted=bool(repeated),
        worker_id=f"rank-{os.environ.get('RANK', '0')}",
        # Each run alone is a new generation, so that it never overwrites checkpoints of an earlier run.
        generation=0 if newest is None else newest + 1,
        checkpoints=checkpoints,
        reporter=ConsoleReporter(),
    )


def _submitted_elsewhere() -> dict[str, Any]:
    """Return the submitted settings of the training that this one repeats, else an empty dict. Raises ValueError."""
    text = os.environ.get(SUBMITTED_ENV)
    if not text:
        return {}
    advice = "copy the whole command that `elasticflow reproduce` prints, or unset it"
    try:
        said = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{SUBMITTED_ENV} is no JSON ({error}): {advice}") from error
    if not isinstance(said, dict) or "global_batch_size" not in said or not said.keys() <= set(SUBMITTED_FIELDS):
        raise ValueError(f"{SUBMITTED_ENV}={text}: it is an object with global_batch_size and other settings: {advice}")
    return said


def _try_to_write(checkpoints: Path | str, named: str) -> None:
    """Create a test file in the checkpoint folder, or where that will be. Raises CheckpointError naming the setting."""
    store = open_store(checkpoints)
    try:
        store.try_writing()
    except Exception as error:  # Each store has its own exceptions.
        reason = getattr(error, "strerror", None) or str(error) or repr(error)
        by, advice = f" by uid {os.getuid()}", "Choose another folder, or make this one writable"
        if isinstance(checkpoints, str):
            by, advice = (
                "",
                "Choose another place, or give the keys the right to put and delete objects there",
            )
        raise CheckpointError(f"{named}={str(checkpoints)!r} cannot be written{by}: {reason}. {advice}") from error
