"""File errors: transient ones of the machine, and those that a training script causes in its own folder.

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
    """Return whether an error is a transient one of the machine, such as a full disk, and below ``state_dir``.

    An error at a path outside, to which a script has redirected us, is the script's fault.
    """
    where = error.filename if isinstance(error.filename, str | Path) else None
    real = Path(state_dir if where is None else os.path.realpath(where))
    return error.errno in OF_THE_MACHINE and (real == state_dir or state_dir in real.parents)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert OSError into an EngineError that says where it happened and what to do."""
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
    """Like :func:`disk_errors`, for calls for one job: damaged files of the job raise EngineError, too."""
    try:
        with disk_errors(path):
            yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineError(f"what {path} holds cannot be used: {error!r}") from error
