"""The training settings that an incarnation's workers get, and what is needed to repeat the training on its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

from elasticflow_airflow.api.insight import TrainedWith
from elasticflow_airflow.engines.job_files import JobFiles
from elasticflow_airflow.runtime.protocol import SessionConfig, threads_in
from elasticflow_airflow.service.job_files.snapshots import Snapshots
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.stored_bounds import promotion_of
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow
from elasticflow_airflow.service.store.unit_of_work import UnitOfWork


def session_of(
    row: IncarnationRow, settings: ServiceSettings, snapshots: Snapshots, files: JobFiles, threads: int | None = None
) -> SessionConfig:
    """Build the session config from the row. ``threads`` is the number that the training began with, if any."""
    submission = row.submission
    command, length = submission.command, submission.length
    return SessionConfig(
        job_id=row.job_id,
        incarnation=row.incarnation,
        incarnation_dir=str(files.folder(row.job_id, row.incarnation)),
        checkpoints_url=files.checkpoints_url(row.job_id, row.incarnation),
        code_dir=str(snapshots.path(command.snapshot)),
        script=command.script,
        module=command.module,
        args=command.args,
        working_dir=command.working_dir,
        steps=length.steps,
        epochs=length.epochs,
        samples=length.samples,
        global_batch_size=submission.global_batch_size,
        micro_batch_size=row.micro_batch_size,
        logical_workers=row.logical_workers,
        script_decides=script_decides(row),
        consistency=submission.consistency,
        init_from=row.init_from_path,
        seed=row.seed,
        threads=threads_in(command.env) if threads is None else threads,
        checkpoint_interval_s=settings.checkpoint_interval_s,
        failures=row.restarts,
        keep_checkpoints=settings.keep_checkpoints,
        progress_regex=submission.progress_regex,
        progress_file=submission.progress_file,
        target_loss=submission.target_loss,
        promoted=promotion_of(row),
    )


def script_decides(row: IncarnationRow) -> bool:
    """Return whether the script sets the number of logical workers: the submission neither gives nor implies one."""
    asked = row.submission
    submitted = asked.logical_workers or asked.max_workers or asked.min_workers > 1
    return row.logical_workers is not None and not submitted and not row.ever_reported and row.promoted is None


def threads_begun_with(tx: UnitOfWork, row: IncarnationRow) -> int | None:
    """Return the threads a training began with, here or in the incarnation it resumes from; the number is kept."""
    one: IncarnationRow | None = row
    if not row.ever_reported and row.resume_from is None:
        return None
    while one is not None:
        for generation in sorted(tx.generations(one.job_id, one.incarnation), key=lambda g: g.generation):
            if generation.notes.threads:
                return generation.notes.threads
        goes_on = one.promoted is not None and one.resume_from is not None
        one = tx.incarnation(one.job_id, one.resume_from) if goes_on and one.resume_from is not None else None
    return None


def python_of(row: IncarnationRow) -> str:
    """Return the Python interpreter of the workers."""
    return row.submission.command.python or sys.executable


def trained_with(
    row: IncarnationRow,
    generations: Sequence[GenerationRow],
    settings: ServiceSettings,
    snapshots: Snapshots,
    files: JobFiles,
) -> TrainedWith | None:
    """Return the settings that determined the weights; None if its workers have not begun to train."""
    began = sorted((one for one in generations if one.first_step is not None), key=lambda one: one.generation)
    if not began:
        return None
    threads = [one.notes.threads for one in began if one.notes.threads]
    session = session_of(row, settings, snapshots, files, threads[0] if threads else None)
    return TrainedWith(
        code_dir=session.code_dir,
        python=python_of(row),
        submitted=session.submitted(),
        threads=threads[0] if threads else None,
        threads_differed=len(set(threads)) > 1,
        micro_batch_changed=any(
            one.notes.out_of_memory is not None and (after.first_step or 0) > 0 for one, after in pairwise(began)
        ),
    )
