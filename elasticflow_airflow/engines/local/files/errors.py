"""What goes wrong with files: of the machine, which passes, or of what a training script has made of its own folder.

Part of the local engine.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import OF_THE_MACHINE
from elasticflow_airflow.engines.port import EngineError


def is_of_the_machine(error: OSError, state_dir: Path) -> bool:
    """Whether an error is nobody's fault and passes: a full disk, say. One to which a script has led us is its own."""
    where = error.filename if isinstance(error.filename, str | Path) else None
    real = Path(state_dir if where is None else os.path.realpath(where))
    return error.errno in OF_THE_MACHINE and (real == state_dir or state_dir in real.parents)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says where and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full: free some space, or move the state directory ([elasticflow] state_dir)"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"uid {os.getuid()} may not write there: check owner and mode, or set another state directory"
        else:
            advice = os.strerror(error.errno) if error.errno else "see the cause"
        raise EngineError(f"cannot write {where}: {advice} ({error})") from error


@contextlib.contextmanager
def as_engine_errors(path: Path) -> Iterator[None]:
    """As :func:`disk_errors`, for calls about one job: whatever is wrong with its files is said by an EngineError."""
    try:
        with disk_errors(path):
            yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"what {path} holds cannot be used: {error!r}") from error
