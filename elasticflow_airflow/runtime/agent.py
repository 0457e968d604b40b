"""A torchrun agent under a supervisor: stock torchrun that dies with its parent and writes its worker's exit code.

Run as ``python -m elasticflow_airflow.runtime.agent RESULT_FILE TORCHRUN_ARGUMENTS...``. May import torch and the
standard library only; it runs in the user's training interpreter.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path

from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV, die_with_parent, pin_to_cores
from elasticflow_airflow.runtime.protocol import write_json_atomic

CORES_ENV = "ELASTICFLOW_CORES"
"""Environment variable: the cores of this worker's slot, as in "0,1"; empty disables pinning."""


def main(arguments: list[str]) -> int:
    """Run torchrun with all arguments but the first, which is the result file; return the exit status."""
    die_with_parent(int(os.environ[PARENT_ENV]))
    pin_to_cores(os.environ.get(CORES_ENV, ""))
    # The trainer is tied to this process, its parent.
    os.environ[PARENT_ENV] = str(os.getpid())
    result_file, torchrun_arguments = Path(arguments[0]), arguments[1:]
    # Torchrun copies the first error to this file and complains in the worker's log if it is not set. The trainer gets
    # a file of its own.
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(result_file.with_suffix(".error.json"))
    # Torchrun resolves the full host name at each event; without reverse DNS each lookup takes 10 s.
    host = socket.gethostname()
    socket.getfqdn = lambda name="": name or host

    if "LOGLEVEL" not in os.environ:
        # Torchrun's log of a failed worker would bury the script's own traceback, and writing it takes 2 s, because
        # torch's log formatter imports half of torch. The supervisor logs the same in one line.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    exit_code = 0
    try:
        torchrun(torchrun_arguments)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        exit_code = failure.exitcode
    except SignalException as error:
        exit_code = -int(error.sigval)
    except SystemExit as error:
        exit_code = error.code if isinstance(error.code, int) else int(error.code is not None)
    write_json_atomic(result_file, {"exit_code": exit_code})
    return 0 if exit_code == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
