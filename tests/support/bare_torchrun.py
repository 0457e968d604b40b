"""Runs a script under a real torchrun, without the service."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

LIMIT_S = 240


def torchrun(folder: Path, script: str, workers: int, **env: str) -> tuple[int, str]:
    """Status and output of a script with so many workers; all of them are ended with it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.py"
    path.write_text(script)
    options = ["--standalone", "--nnodes=1", f"--nproc-per-node={workers}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, output
