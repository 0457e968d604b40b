"""Machines of a cluster on this one: network, PID and host name namespaces, joined by a bridge (needs root and ``ip``).

Killing a machine's init with its link down is a power cut; taking the link down and up again is a partition.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.quiet_network import quiet_network

_NUMBERS = itertools.count()


def need_namespaces() -> None:
    """Skip the test where namespaces cannot be made."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("namespaces need root, ip (iproute2) and unshare")
    tried = subprocess.run(["unshare", "--net", "--pid", "--uts", "--fork", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.decode().strip()}")
    try:
        Machines(1).close()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"namespaces cannot be connected here: {error.stderr.decode().strip()}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _without_own_address(link: str) -> None:
    """Have an interface give itself no address of IPv6 when it comes up (without IPv6 it does not anyway)."""
    subprocess.run(["ip", "link", "set", link, "addrgenmode", "none"], capture_output=True, check=False)


class Machines:
    """A bridge with some machines; the service, outside of them, has the address ``<subnet>.1``."""

    def __init__(self, count: int) -> None:
        number = next(_NUMBERS)
        self._tag = f"ef{os.getpid() % 100000}{number}"
        # Tests in other processes have machines at the same time.
        self._subnet = f"10.{64 + os.getpid() % 128}.{number % 256}"
        self.outside = f"{self._subnet}.1"
        """Of this machine, for those in the namespaces."""
        self.addresses = [f"{self._subnet}.{index + 2}" for index in range(count)]
        self._inits: dict[int, subprocess.Popen[str]] = {}
        try:
            _ip("link", "add", self._tag, "type", "bridge")
            _without_own_address(self._tag)
            with quiet_network():
                _ip("addr", "add", f"{self.outside}/24", "dev", self._tag)
                _ip("link", "set", self._tag, "up")
            for index, address in enumerate(self.addresses):
                space = self._space(index)
                _ip("netns", "add", space)
                _ip("link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
                _without_own_address(space)
                _ip("link", "set", space, "master", self._tag, "up")
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def run(self, index: int, command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """Run a command as a machine's init; its output is piped. Its end is the end of all that runs there."""
        self._inits[index] = found = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._space(index)),
                *("unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"),
                # As init it would not get signals for which it has no handler, and would have to reap orphans.
                *("sh", "-c", f'hostname machine{index}; "$@" & while :; do wait; sleep 0.2; done', "sh", *command),
            ],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )
        return found

    def run_beside(self, index: int, command: list[str], env: dict[str, str]) -> None:
        """Run another command on a machine that runs; nobody waits for it."""
        inside, *_ = _children(self._inits[index].pid)
        enter = ["nsenter", f"--target={inside}", "--net", "--pid", "--uts", "--mount"]
        subprocess.Popen(
            [*enter, "sh", "-c", '"$@" & :', "sh", *command],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ).wait()

    @property
    def running(self) -> list[int]:
        """The machines that have power."""
        return list(self._inits)

    def processes(self, index: int) -> Iterator[psutil.Process]:
        """Yield the processes on a machine."""
        yield from self._in_network(f"/run/netns/{self._space(index)}")

    @staticmethod
    def _in_network(network: str) -> Iterator[psutil.Process]:
        wanted = os.stat(network).st_ino
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == wanted:
                    yield process

    def cut(self, index: int) -> None:
        """Take the link of a machine down."""
        _ip("link", "set", self._space(index), "down")

    def heal(self, index: int) -> None:
        """Take it up again."""
        _ip("link", "set", self._space(index), "up")

    def cut_power(self, index: int) -> None:
        """Kill everything on a machine at once; nobody hears of it."""
        self.cut(index)
        self.end(index)

    def end(self, index: int) -> None:
        """Kill everything on a machine."""
        outer = self._inits.pop(index)
        for child in _children(outer.pid):
            os.kill(child, signal.SIGKILL)
        outer.kill()
        outer.wait()
        assert outer.stdout is not None
        outer.stdout.close()

    def close(self) -> None:
        """Kill the machines, and remove what connects them."""
        for index in list(self._inits):
            self.end(index)
        for index in range(len(self.addresses)):
            subprocess.run(["ip", "link", "del", self._space(index)], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", self._space(index)], capture_output=True, check=False)
        with quiet_network():
            subprocess.run(["ip", "link", "del", self._tag], capture_output=True, check=False)

    def _space(self, index: int) -> str:
        return f"{self._tag}-{index}"


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has just ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found
