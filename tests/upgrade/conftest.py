"""Two environments: with the release before, and with what the checkout makes of it. They share all dependencies."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
(RELEASE_BEFORE,) = (HERE / "release_before").glob("*.whl")
WITHOUT_REPLICAS = "69948fb9672fa8aac6485c1d58a3adac1501997d"
"""The last commit whose service owns its database alone."""
PACKAGES, FILES = ("elasticflow_airflow", "operators", "scheduler_core"), ("pyproject.toml", "README.md", "LICENSE")
UPGRADED = "0.1.1+upgraded"
"""The version of the wheel that is made of the checkout: another one than that of the release before."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment with one version of the package."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def package(self) -> Path:
        """Where the package is, as its processes find it."""
        (found,) = self.folder.glob("lib/python*/site-packages/elasticflow_airflow")
        return found.resolve()

    def install(self, wheel: Path) -> None:
        """As ``pip install --upgrade`` does, offline: what was there goes, and the wheel's files come."""
        install = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-deps", "--no-index"]
        subprocess.run([*install, "--upgrade", str(wheel)], check=True, capture_output=True)

    def version(self) -> str:
        """What the ``elasticflow`` command of this environment says."""
        command = [str(self.python.with_name("elasticflow")), "version"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


def environment_with(wheel: Path, folder: Path) -> Environment:
    """Install a wheel beside links to everything else that this environment has."""
    made = Environment(folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made.folder)], check=True)
    ours = Path(next(path for path in sys.path if path.endswith("site-packages")))
    (theirs,) = made.folder.glob("lib/python*/site-packages")
    for entry in ours.iterdir():
        if "elasticflow" not in entry.name and entry.suffix != ".pth":
            (theirs / entry.name).symlink_to(entry)
    made.install(wheel)
    return made


def wheel_of(source: Path) -> Path:
    """Build the wheel of a folder with the sources."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "dist"), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (source / "dist").iterdir()
    return wheel


@pytest.fixture
def before(tmp_path: Path) -> Environment:
    """The release before, installed."""
    return environment_with(RELEASE_BEFORE, tmp_path / "venv")


@pytest.fixture(scope="session")
def wheel_without_replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the last commit before replicas gives: the release before has no engine over several machines."""
    source = tmp_path_factory.mktemp("without-replicas")
    if subprocess.run(
        ["git", "cat-file", "-e", WITHOUT_REPLICAS], cwd=ROOT, capture_output=True, check=False
    ).returncode:
        pytest.skip(f"needs the history of this repository: it has no commit {WITHOUT_REPLICAS[:12]} here")
    archive = ["git", "archive", "--output", str(source / "source.tar"), WITHOUT_REPLICAS, *PACKAGES, *FILES]
    subprocess.run(archive, cwd=ROOT, check=True)
    with tarfile.open(source / "source.tar") as tar:
        tar.extractall(source, filter="data")
    return wheel_of(source)


@pytest.fixture
def without_replicas(wheel_without_replicas: Path, tmp_path: Path) -> Environment:
    """The last version without replicas that has the engine over several machines, installed."""
    return environment_with(wheel_without_replicas, tmp_path / "venv")


@pytest.fixture(scope="session")
def upgraded_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout as a wheel of a later version."""
    source = tmp_path_factory.mktemp("checkout")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    version = source / "elasticflow_airflow" / "__init__.py"
    text = version.read_text()
    line = next(line for line in text.splitlines() if line.startswith("__version__ = "))
    version.write_text(text.replace(line, f'__version__ = "{UPGRADED}"'))
    return wheel_of(source)
