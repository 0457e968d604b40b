"""Virtual environments for trainings that ask for packages: built by uv, once per interpreter and list of requirements.

An environment lies over its interpreter's own packages: what is not in it is found there, above all torch, which is
installed anew only if a requirement names it. A folder that exists is complete, because it is renamed into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from elasticflow_airflow.engines.local.inherited_variables import inherited
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.requirement_lines import project_of, without_passwords

FOLDER = "environments"
LIMIT_S = 1800.0
"""A build that takes longer is ended."""
KEPT = 20
"""So many environments that no job uses are kept, those used last, ..."""
KEPT_S = 14 * 24 * 3600.0
"""... for so long."""
_SPARED_S = 24 * 3600.0
"""One that was asked for since then may be for a job that waits for its slots."""
_LAST_LINES = 12
_BUILDING = ".building-"
_TRASH = ".trash-"
_NAMES = frozenset({"ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy", "https_proxy"})
_PACKAGES = (
    "import json, sys; print(json.dumps([p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))]))"
)
_CHECK = """
import importlib.metadata, sys
try:
    torch = importlib.metadata.version("torch")
except importlib.metadata.PackageNotFoundError:
    sys.exit("the interpreter has no torch: add torch to requirements=, or give a python= that has it")
try:
    from packaging.requirements import Requirement
except ImportError:
    sys.exit(0)
for found in importlib.metadata.distributions(path=sys.argv[1:]):
    for needed in map(Requirement, found.requires or ()):
        applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if needed.name == "torch" and applies and not needed.specifier.contains(torch, prereleases=True):
            sys.exit(
                f"{found.name} {found.version} needs {needed}, and the interpreter has torch {torch}: ask for another"
                f" version of {found.name}, or add torch to requirements="
            )
"""


def python_in(state_dir: Path, base: str, requirements: Sequence[str]) -> Path:
    """Return where the interpreter of an environment is, or will be, below a machine's state directory."""
    digest = hashlib.sha256(json.dumps([1, base, list(requirements)]).encode()).hexdigest()
    return state_dir / FOLDER / digest[:32] / "bin" / "python"


class Environments:
    """The environments of one machine. Thread-safe; builds run aside.

    ``used`` returns the interpreters that the jobs here use: their environments are kept.
    """

    def __init__(self, state_dir: Path, environ: Mapping[str, str], used: Callable[[], Collection[str]]) -> None:
        self._state_dir, self._used = state_dir, used
        self._environ = inherited(environ) | {
            name: value for name, value in environ.items() if name in _NAMES or name.startswith("UV_")
        }
        self._environ.pop("VIRTUAL_ENV", None)
        self._lock = threading.Lock()
        self._aside = ThreadPoolExecutor(2, "elasticflow-environments")
        self._builds: dict[Path, Future[None]] = {}
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        for left in (state_dir / FOLDER).glob(".*-*"):
            self._aside.submit(shutil.rmtree, left, ignore_errors=True)

    def is_ready(self, base: str, requirements: Sequence[str]) -> bool:
        """Return whether an environment is there; otherwise begin to build it. Does not block.

        Raises EngineError, once, when a build has failed; asked again, it is tried again.
        """
        python = python_in(self._state_dir, base, requirements)
        with self._lock:
            build = self._builds.get(python)
            if build is None:
                if python.exists():
                    with contextlib.suppress(OSError):  # It only says when it was asked for last.
                        os.utime(python.parent.parent)
                    return True
                self._builds[python] = self._aside.submit(self._build, python.parent.parent, base, tuple(requirements))
                return False
            if not build.done():
                return False
            del self._builds[python]
        build.result()
        return True

    def is_being_built(self, base: str, requirements: Sequence[str]) -> bool:
        """Return whether a build is under way."""
        build = self._builds.get(python_in(self._state_dir, base, requirements))
        return build is not None and not build.done()

    def close(self) -> None:
        """End what is being built."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            _kill(process)
        self._aside.shutdown(wait=False, cancel_futures=True)

    # -- aside

    def _build(self, target: Path, base: str, requirements: tuple[str, ...]) -> None:
        """Raise EngineError when it cannot be built."""
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            building = target.with_name(f"{_BUILDING}{secrets.token_hex(8)}")
            try:
                self._fill(building, base, requirements)
                building.rename(target)
            finally:
                shutil.rmtree(building, ignore_errors=True)
            self._trim()
        except OSError as error:
            raise EngineError(f"the environment for requirements= could not be built: {error}") from error

    def _fill(self, folder: Path, base: str, requirements: tuple[str, ...]) -> None:
        uv, python = find_uv(), str(folder / "bin" / "python")
        self._run(uv, "venv", "--quiet", "--relocatable", "--python", base, str(folder))
        wanted, dropped = folder / "requirements.txt", folder / "interpreters-own.txt"
        wanted.write_text("".join(f"{line}\n" for line in requirements))
        dropped.write_text("" if "torch" in map(project_of, requirements) else 'torch ; python_version < "0"\n')
        self._run(uv, "pip", "install", "--quiet", "--python", python, "-r", str(wanted), "--overrides", str(dropped))
        (packages,) = (folder / "lib").glob("python3*/site-packages")
        # ``addsitedir`` also heeds the .pth files there, by which editable installations are found.
        paths = json.loads(self._run(base, "-I", "-c", _PACKAGES))
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths)
        (packages / "_elasticflow_interpreter.pth").write_text(lines)
        self._run(python, "-I", "-c", _CHECK, str(packages))

    def _run(self, *command: str) -> str:
        """Return the output of a command. Raises EngineError with the last lines of its complaint."""
        with self._lock:
            if self._is_closed:
                raise EngineError("the service is ending")
            process = subprocess.Popen(
                command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            output, complaint = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise EngineError(f"the environment for requirements= was not built within {LIMIT_S:.0f} s") from None
        finally:
            _kill(process)
            self._processes.discard(process)
        if process.returncode != 0:
            last = [line.rstrip() for line in complaint.splitlines() if line.strip()][-_LAST_LINES:]
            said = without_passwords("\n".join(last)) or f"exit code {process.returncode}"
            raise EngineError(f"the environment for requirements= could not be built: {said}")
        return output

    def _trim(self) -> None:
        """Delete environments that no job uses, and nobody has asked for lately."""
        used, now = self._used(), time.time()
        aged = [
            (now - folder.stat().st_mtime, folder)
            for folder in (self._state_dir / FOLDER).iterdir()
            if not folder.name.startswith(".") and str(folder / "bin" / "python") not in used
        ]
        for place, (age_s, folder) in enumerate(sorted(aged)):
            if age_s > KEPT_S or (place >= KEPT and age_s > _SPARED_S):
                trash = folder.with_name(f"{_TRASH}{secrets.token_hex(8)}")
                folder.rename(trash)
                shutil.rmtree(trash, ignore_errors=True)


def find_uv() -> str:
    """Return the path of uv. Raises EngineError when it is not installed."""
    found = shutil.which("uv")
    with contextlib.suppress(ImportError, FileNotFoundError):
        from uv import find_uv_bin  # an extra of this package

        found = find_uv_bin()
    if found is None:
        raise EngineError(
            f"requirements= needs uv on {os.uname().nodename}: pip install 'elasticflow-airflow[environments]' there"
        )
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command that has not ended, with all that it has started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
