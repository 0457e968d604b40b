"""Shared by commands that write files: they never overwrite their inputs, and each outcome has its exit status.

A command writes all its files or none, however it ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from elasticflow_airflow.cli.connection import fail

FAILED, NOTHING_DONE = 1, 2
"""Exit statuses: a bug or a disk error; bad input, Ctrl-C or SIGTERM."""
_OPTIONAL = ("matplotlib", "scipy")


class _Terminated(BaseException):
    """Raised when SIGTERM arrives."""


@contextmanager
def answering() -> Iterator[None]:
    """Report an error and end with its status; clean up on SIGTERM as on Ctrl-C."""
    from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
    from elasticflow_airflow.scheduler_core.simulator.run import SimulationError

    def leave(*_: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except InputError as problem:
        fail(str(problem), NOTHING_DONE)
    except SimulationError as problem:
        fail(f"a defect of the policy, nothing was written: {problem}", FAILED)
    except ModuleNotFoundError as problem:
        if problem.name is None or problem.name.split(".")[0] not in _OPTIONAL:
            raise
        fail(
            f"this needs {problem.name}, which is not installed; pip install 'elasticflow-airflow[simulate]'",
            NOTHING_DONE,
        )
    except OSError as problem:
        fail(f"nothing was written: {problem}", FAILED)
    except KeyboardInterrupt:
        fail("interrupted, nothing was written", NOTHING_DONE)
    except _Terminated:
        fail("terminated, nothing was written", NOTHING_DONE)
    finally:
        signal.signal(signal.SIGTERM, before)


def require_writable(paths: Sequence[Path], *, trace: Path | None, curves: Path, make: bool = False) -> None:
    """Check before anything runs that the files can be written. ``make``: their folder will be created.

    Raises:
        InputError: a file cannot be written, is the trace or a table of curves, or would be among the curves.
    """
    from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError

    inputs = [path for path in [trace, *sorted(curves.glob("*.csv"))] if path is not None and path.exists()]
    for path in paths:
        if path.exists() and not path.is_file():
            raise InputError("is no regular file; name one to write to", path)
        if path.exists() and any(path.samefile(given) for given in inputs):
            raise InputError("is read by this very command; name another file to write to", path)
        above = path.parent
        if above.exists() and curves.exists() and above.samefile(curves):
            raise InputError(f"is in the folder of scaling curves {curves}; name another folder to write to", path)
        while make and not above.exists():
            above = above.parent
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise InputError(f"cannot be written: {above} is no folder, or none that may be written to", path)
