"""A PYTHONPATH folder through which any interpreter that has torch finds our runtime, and torchrun our rendezvous.

It holds only a link to this package and a dist-info with the entry point: the service's site-packages would bring its
libraries into the user's interpreter. The dist-info has our real name, so that an interpreter in which the package is
installed sees it once (importlib.metadata takes the first distribution of a name).
"""

from __future__ import annotations

import os
from pathlib import Path

import elasticflow_airflow

_ENTRY_POINTS = "[torchrun.handlers]\nelasticflow = elasticflow_airflow.runtime.rendezvous:create_handler\n"


def prepare_bridge(state_dir: Path) -> Path:
    """Create or repair ``<state_dir>/runtime-path`` and return it. Idempotent and safe to run concurrently."""
    bridge = state_dir / "runtime-path"
    bridge.mkdir(parents=True, exist_ok=True)
    package = Path(elasticflow_airflow.__file__).resolve().parent
    link = bridge / "elasticflow_airflow"
    if not link.is_symlink() or Path(os.readlink(link)) != package:
        fresh = bridge / f".link-{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(package)
        fresh.replace(link)
    version = elasticflow_airflow.__version__
    wanted = f"elasticflow_airflow-{version}.dist-info"
    for other in bridge.glob("elasticflow_airflow-*.dist-info"):
        if other.name != wanted:
            for file in other.iterdir():
                file.unlink(missing_ok=True)
            other.rmdir()
    _write(bridge / wanted / "METADATA", f"Metadata-Version: 2.1\nName: elasticflow-airflow\nVersion: {version}\n")
    _write(bridge / wanted / "entry_points.txt", _ENTRY_POINTS)
    return bridge


def _write(path: Path, text: str) -> None:
    if path.exists() and path.read_text() == text:
        return
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)
