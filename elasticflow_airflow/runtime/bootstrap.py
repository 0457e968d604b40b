"""First code of a trainer process: ties it to its agent, then runs the user's script or module as ``__main__``.

Run by torchrun as ``python -m elasticflow_airflow.runtime.bootstrap``. Before it exits it reports causes of the
script's end that only this process knows (out of memory, the exception). May import torch and the standard library
only, and torch only if it is already imported: threads and cores must be set before.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from elasticflow_airflow.runtime.agent import CORES_ENV
from elasticflow_airflow.runtime.process import stacks
from elasticflow_airflow.runtime.process.imports import file_of_module, leads_to_runtime, names_runtime
from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV, die_with_parent, pin_to_cores
from elasticflow_airflow.runtime.protocol import (
    DEVICE_FAULT,
    GENERATION_ENV,
    SESSION_ENV,
    UNTRAINED,
    WORKER_ENV,
    WORLD_ENV,
    Membership,
    Report,
    ReportKind,
    SessionConfig,
    append_report,
    read_reports,
    report_path,
    stacks_path,
    write_json_atomic,
)

TRAINER_FILE_ENV = "ELASTICFLOW_TRAINER_FILE"
"""Environment variable: file for this process's pid, so that the supervisor can signal it."""

session_initialised = False
"""Set by the session when a script calls ``init``: distinguishes session scripts from plain ones."""

leave_abruptly = False
"""Set by the session if a thread is blocked forever in an operation with a dead worker; no destructor may run then."""

current_step = 0
"""The last completed step, updated by the session, for reports written at exit."""

SAY_AFTER_S, END_AFTER_S = 3.0, 45.0
"""Seconds after the script's end until a process that has not exited is reported, and until it is forced to exit."""

_OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# What a broken device says whatever script uses it. An illegal access or a failed assertion is the script's own fault.
_DEVICE_FAULT_TEXTS = (
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "gpu is lost",
    "fallen off the bus",
    "hardware stack error",
    "no cuda-capable device",
    "devices are unavailable",
    "busy or unavailable",
    "cuda error: unknown error",
    "cuda error: initialization error",
    "cuda error: system not yet initialized",
    "cuda unknown error",
)


def is_device_fault(error: BaseException) -> bool:
    """Return whether an exception means that the device itself is broken."""
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _DEVICE_FAULT_TEXTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the device or the host ran out of memory."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def main() -> int:
    """Run the script; return the exit status."""
    die_with_parent(int(os.environ.pop(PARENT_ENV)))
    if multiprocessing.parent_process() is not None:
        _be_as_if_new()
    pin_to_cores(os.environ.get(CORES_ENV, ""))
    trainer_file = os.environ.pop(TRAINER_FILE_ENV, None)
    if trainer_file:
        write_json_atomic(Path(trainer_file), {"pid": os.getpid()})
    _take_place_in_world()
    session = SessionConfig.read(Path(os.environ[SESSION_ENV]))
    worker_id = os.environ[WORKER_ENV]
    plan = Membership.read(Path(session.incarnation_dir))
    if plan is not None and plan.rank_of(worker_id) is None:
        return 0  # The plan has changed since torchrun started this process; there is nothing to save yet.
    stacks.register(stacks_path(Path(session.incarnation_dir), worker_id))
    _tell_if_it_uses_session(session, worker_id)
    exit_status = _run_to_end(session, worker_id)
    threading.Thread(target=_insist_on_end, args=(exit_status,), daemon=True).start()
    _run_exit_functions()
    return exit_status


def _run_to_end(session: SessionConfig, worker_id: str) -> int:
    """Run the script, and report how it ended as far as only this process knows; return the exit status."""
    try:
        run_script(session)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            if not leaving.code and not _comes_from_runtime(leaving):
                _tell_if_untrained(session, worker_id)
            return leaving.code or 0
        sys.stderr.write(f"{leaving.code}\n")
        _report_end(session, worker_id, ReportKind.FAILED, str(leaving.code), leaving)
        return 1
    except BaseException as error:  # noqa: BLE001  (any exception ends the script and is reported)
        _report_failure(session, worker_id, error)
        return 1
    _tell_if_untrained(session, worker_id)
    return 0


def _insist_on_end(exit_status: int) -> None:
    """Force the process to exit if something that the script started does not end: Python would wait forever."""
    time.sleep(SAY_AFTER_S)
    processes = [str(child.pid) for child in multiprocessing.active_children() if not child.daemon]
    threads = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    held = [f"processes {', '.join(processes)}"] if processes else []
    held += [f"threads {', '.join(threads)}"] if threads else []
    held = held or ["functions registered with atexit"]
    _say(
        f"the script has ended, and waits for its {' and '.join(held)}; in {END_AFTER_S - SAY_AFTER_S:.0f} s it leaves"
    )
    time.sleep(END_AFTER_S - SAY_AFTER_S)
    _say("leaving all the same")
    os._exit(exit_status)


def _say(message: str) -> None:
    sys.stderr.write(f"elasticflow: {message}\n")
    sys.stderr.flush()


def _take_place_in_world() -> None:
    """Set the script's rank and world size among all workers: torchrun's agent knows only this worker."""
    world = os.environ.pop(WORLD_ENV, None)
    if world:
        rank, size = world.split(",")
        for name in ("RANK", "GROUP_RANK", "ROLE_RANK"):
            os.environ[name] = rank
        for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            os.environ[name] = size


def _be_as_if_new() -> None:
    """Reset state inherited by the fork from the agent, to that of a fresh interpreter."""
    if os.getpgid(0) != os.getpid():
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    if "numpy.random" in sys.modules:
        # Python reseeds its own generator after a fork, but numpy does not: all workers would draw the same numbers.
        import numpy

        numpy.random.seed()


def _run_exit_functions() -> None:
    """Run the functions that the script registered with atexit, since a forked process exits without them."""
    if multiprocessing.parent_process() is not None or leave_abruptly:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def run_script(session: SessionConfig) -> None:
    """Run the user's code from the snapshot, like ``python script args`` or ``python -m module args``."""
    code_dir = Path(session.code_dir)
    os.chdir(session.working_dir or code_dir)
    if session.script is not None:
        script = code_dir / session.script
        sys.argv = [str(script), *session.args]
        sys.path[0] = str(script.parent)
        runpy.run_path(str(script), run_name="__main__")
    else:
        module = str(session.module)
        sys.argv = [module, *session.args]
        sys.path[0] = str(code_dir)
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _comes_from_runtime(error: BaseException) -> bool:
    """Return whether the session, and not the script's own code, raised the exception that ends the script."""
    *_, innermost = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return Path(innermost.f_code.co_filename).is_relative_to(Path(__file__).parent)


def _tell_if_it_uses_session(session: SessionConfig, worker_id: str) -> None:
    """Report before the script runs whether it uses a session: after ``os._exit(0)`` it could not report anything."""
    if os.environ.get("RANK", "0") != "0":
        return
    code_dir = Path(session.code_dir)
    start = code_dir / session.script if session.script else file_of_module(str(session.module), code_dir)
    if leads_to_runtime(start, code_dir):
        generation = int(os.environ[GENERATION_ENV])
        path = report_path(Path(session.incarnation_dir), generation, worker_id)
        report = Report(
            kind=ReportKind.USES_SESSION, generation=generation, worker_id=worker_id, rank=0, step=current_step
        )
        with contextlib.suppress(OSError):  # A full disk is reported once training begins.
            append_report(path, report)


def _tell_if_untrained(session: SessionConfig, worker_id: str) -> None:
    """Report a script that uses a session but ended with status 0 before its first step."""
    if os.environ.get("RANK", "0") != "0":
        return
    path = report_path(Path(session.incarnation_dir), int(os.environ[GENERATION_ENV]), worker_id)
    if any(report.kind in (ReportKind.STARTED, ReportKind.FINISHED) for report, _ in read_reports(path)):
        return
    if session_initialised:
        _report_untrained(path, worker_id, "after runtime.init() and before its first session.step()")
    elif _imports_runtime(Path(session.code_dir)):
        _report_untrained(path, worker_id, "before runtime.init() (or the Trainer's train(), or Lightning's fit())")


def _report_untrained(path: Path, worker_id: str, when: str) -> None:
    message = f"the script uses elasticflow_airflow.runtime, and ended with status 0 {when}: nothing was trained"
    sys.stderr.write(f"elasticflow: {message}\n")
    report = Report(
        kind=ReportKind.FAILED,
        generation=int(os.environ[GENERATION_ENV]),
        worker_id=worker_id,
        rank=0,
        step=0,
        data={"message": message, "kind": UNTRAINED},
    )
    append_report(path, report)


def _imports_runtime(code_dir: Path) -> bool:
    """Return whether any loaded module of the user imports the runtime, even in a function that was never called."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())} | {sys.argv[0]}
    mine = [Path(file) for file in files if file and Path(file).suffix == ".py" and code_dir in Path(file).parents]
    return any(names_runtime(path) for path in mine)


def _report_failure(session: SessionConfig, worker_id: str, error: BaseException) -> None:
    _print_users_traceback(error)
    kind = ReportKind.OUT_OF_MEMORY if is_out_of_memory(error) else ReportKind.FAILED
    _report_end(session, worker_id, kind, "".join(traceback.format_exception_only(error)).strip(), error)


def _report_end(session: SessionConfig, worker_id: str, kind: ReportKind, message: str, error: BaseException) -> None:
    generation = int(os.environ[GENERATION_ENV])
    path = report_path(Path(session.incarnation_dir), generation, worker_id)
    try:
        # The session may already have reported it with more detail (the micro-batch, "nan_loss").
        if not any(report.kind in (kind, ReportKind.FAILED) for report, _ in read_reports(path)):
            data = {"message": message}
            if kind is ReportKind.FAILED:
                data["kind"] = DEVICE_FAULT if is_device_fault(error) else "exception"
            report = Report(
                kind=kind,
                generation=generation,
                worker_id=worker_id,
                rank=int(os.environ.get("RANK", "0")),
                step=current_step,
                data=data,
            )
            append_report(path, report)
        _write_error_file(message, error)
    except OSError as failed:
        sys.stderr.write(f"elasticflow: the failure could not be written to {path}: {failed}\n")


def _print_users_traceback(error: BaseException) -> None:
    """Print the traceback without the frames of this module and of runpy: they are not the user's."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)
    sys.stderr.flush()


def _write_error_file(message: str, error: BaseException) -> None:
    """Write torchrun's error file, so that torchrun's summary names the cause, too."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        callstack = "".join(traceback.format_exception(error))
        extra = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


if __name__ == "__main__":
    # Import this module, so that the session sets the flags of the same module object.
    from elasticflow_airflow.runtime import bootstrap

    exit_status = bootstrap.main()
    if bootstrap.leave_abruptly:
        os._exit(exit_status)
    sys.exit(exit_status)
