"""Processes, identified by pid *and* start time, so that a reused pid is never mistaken for the earlier process.

Reads /proc (Linux). Standard library only: supervisors import it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STAT_STATE, _STAT_PPID, _STAT_PGRP, _STAT_USER, _STAT_SYSTEM, _STAT_START, _STAT_EXIT = 0, 1, 2, 11, 12, 19, 49
"""Positions in /proc/PID/stat after the command name (field 2, which may contain spaces); 19 is field 22."""
_EXEC_LOOKS, _EXEC_LOOK_S = 20, 0.02
_WORKER_MARK = b"ELASTICFLOW_CORES="
"""Present in the environment of every trainer and of its child processes."""


def boot_id() -> str:
    """Return the id of the current boot, from which start times are counted."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_NO_PROCESS = (errno.ESRCH, errno.ENOENT, errno.EINVAL)
"""The kernel's answers if a pid is free, or is the number of a thread by now (EINVAL from older kernels)."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that exists or existed. ``start`` is field 22 of /proc/PID/stat, in clock ticks since boot."""

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Identify an existing process; None when there is none (or only a zombie)."""
        stat = _stat(pid)
        if stat is None or stat[_STAT_STATE] in "ZX":
            return None
        return cls(pid, int(stat[_STAT_START]), boot_id())

    @classmethod
    def current(cls) -> ProcessId:
        """Identify this process."""
        found = cls.of(os.getpid())
        assert found is not None
        return found

    @classmethod
    def from_json(cls, raw: dict[str, Any] | None) -> ProcessId | None:
        """Inverse of ``asdict``. Raises TypeError, KeyError or ValueError when ``raw`` is not a process."""
        if raw is None:
            return None
        found = cls(raw["pid"], raw["start"], raw["boot"])
        if type(found.pid) is not int or not 0 < found.pid < 1 << 31 or type(found.start) is not int:
            raise ValueError(f"there is no process {raw!r}")
        return found

    def is_alive(self) -> bool:
        """Return whether exactly this process still exists and is not a zombie."""
        return ProcessId.of(self.pid) == self

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal exactly this process, if it still exists; by pidfd, so that the pid cannot be reused in between."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError as error:
            if error.errno in _NO_PROCESS:
                return
            raise
        try:
            if self.is_alive():
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return
        finally:
            os.close(handle)


def group_led_by(leader: ProcessId) -> list[ProcessId]:
    """Return the processes of the group that ``leader`` leads or led: a trainer and its child processes.

    A group's number is its leader's pid, which is not reused while a member is alive. Afterwards both can be reused:
    a process with that pid must be the leader itself, and without one the members must be our workers.
    """
    if leader.boot != boot_id():
        return []
    members = _where(_STAT_PGRP, leader.pid)
    stat = _stat(leader.pid)  # Unlike ProcessId.of, this includes zombies, which still hold their pid.
    if stat is not None:
        return members if int(stat[_STAT_START]) == leader.start else []
    return [process for process in members if _is_marked(process.pid)]


def children_of(pid: int) -> list[ProcessId]:
    """Return the direct children that are not zombies."""
    return _where(_STAT_PPID, pid)


def unread_exit_code(pid: int, parent_pid: int) -> int | None:
    """Return the exit code (-N: signal N) of a zombie whose parent has not waited for it yet; otherwise None."""
    stat = _stat(pid)
    if stat is None or stat[_STAT_STATE] != "Z" or int(stat[_STAT_PPID]) != parent_pid:
        return None
    return os.waitstatus_to_exitcode(int(stat[_STAT_EXIT]))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, in seconds; 0 when it does not exist."""
    stat = _stat(pid)
    return 0.0 if stat is None else (int(stat[_STAT_USER]) + int(stat[_STAT_SYSTEM])) / os.sysconf("SC_CLK_TCK")


def _where(position: int, value: int) -> list[ProcessId]:
    found = []
    boot = boot_id()
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = _stat(int(name))
            if stat is not None and stat[_STAT_STATE] not in "ZX" and int(stat[position]) == value:
                found.append(ProcessId(int(name), int(stat[_STAT_START]), boot))
    return found


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _is_marked(pid: int) -> bool:
    """Return whether a process has a worker's environment. During exec, a process briefly shows none."""
    for _ in range(_EXEC_LOOKS):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            return False
        if environment:
            return any(entry.startswith(_WORKER_MARK) for entry in environment.split(b"\0"))
        time.sleep(_EXEC_LOOK_S)
    return False
