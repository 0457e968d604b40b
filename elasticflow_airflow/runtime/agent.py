"""A torchrun agent under a supervisor: stock torchrun, tied to its parent, whose worker's exit code is kept on disk.

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
"""Environment variable: the cores of this worker's slot, as "0,1"; empty: no pinning."""


def main(arguments: list[str]) -> int:
    """Run torchrun with the arguments after the first, which names the file for the result."""
    die_with_parent(int(os.environ[PARENT_ENV]))
    pin_to_cores(os.environ.get(CORES_ENV, ""))
    # The trainer's parent is this process.
    os.environ[PARENT_ENV] = str(os.getpid())
    result_file, torchrun_arguments = Path(arguments[0]), arguments[1:]
    # Where torchrun copies the first error to; without it, it complains in the worker's log. The trainer gets its own.
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(result_file.with_suffix(".error.json"))
    # Torchrun asks for the full host name at each of its events; without reverse DNS each answer takes 10 s.
    host = socket.gethostname()
    socket.getfqdn = lambda name="": name or host

    if "LOGLEVEL" not in os.environ:
        # What torchrun says of a failed worker would bury the script's own traceback, and saying it costs 2 s: torch's
        # log formatter imports half of torch. The supervisor says the same in a line.
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
