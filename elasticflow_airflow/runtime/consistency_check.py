"""Find out whether a script trains the same weights with any number of workers, on this machine.

    python -m elasticflow_airflow.runtime.consistency_check train.py --global-batch-size 32 [-- script arguments]

Trains the first steps of the script once for each number of workers, and compares the weights tensor by tensor, bit for
bit. Typical causes of differences are nondeterministic operators, random numbers that depend on rank or time, and state
that the script did not register. May import torch and the standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from elasticflow_airflow.runtime.checkpoints.checkpoint import read_weights
from elasticflow_airflow.runtime.checkpoints.tensor_bytes import add_tensor
from elasticflow_airflow.runtime.process.parent_tie import PARENT_ENV
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    SESSION_ENV,
    WORKER_ENV,
    WORLD_ENV,
    Member,
    Membership,
    RescaleMode,
    SessionConfig,
    session_path,
)
from elasticflow_airflow.runtime.stores.manifest import CheckpointError, list_candidates, verify_candidate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return exit status 0 for equal weights, 1 for different ones, 2 if the script failed."""
    parser = argparse.ArgumentParser(prog="consistency_check", description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("script_arguments", nargs="*", help="after --: arguments of the script")
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, default=20, help="how many steps to train (20)")
    parser.add_argument("--workers", default="1,2", help="numbers of workers to compare (1,2)")
    options = parser.parse_args(arguments)
    sizes = [int(size) for size in options.workers.split(",")]
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    found: dict[int, dict[str, str]] = {}
    for size in sizes:
        _say(f"training {options.steps} steps with {size} worker{'s' if size > 1 else ''} ...")
        with tempfile.TemporaryDirectory(prefix="elasticflow-check-") as folder:
            config = SessionConfig(
                job_id="consistency-check",
                incarnation=1,
                incarnation_dir=folder,
                code_dir=str(options.script.absolute().parent),
                script=options.script.name,
                args=tuple(options.script_arguments),
                steps=options.steps,
                global_batch_size=options.global_batch_size,
                logical_workers=max(sizes),
                checkpoint_interval_s=1e9,
            )
            try:
                found[size] = _train(config, size)
            except (RuntimeError, CheckpointError) as error:
                sys.stderr.write(f"the script failed with {size} workers: {error}\n")
                return 2
    return _compare(found)


def _train(config: SessionConfig, size: int) -> dict[str, str]:
    """Train, and return the digest of each tensor of the model. Raises RuntimeError if the script fails."""
    folder = Path(config.incarnation_dir)
    config.write()
    members = [Member(worker_id=f"w{r}", rank=r, node_id="here", slot_index=r) for r in range(size)]
    Membership(generation=1, mode=RescaleMode.RESTART, members=tuple(members)).write(folder)
    processes = []
    try:
        for member in members:
            env = {
                **os.environ,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
                SESSION_ENV: str(session_path(folder)),
                WORKER_ENV: member.worker_id,
                GENERATION_ENV: "1",
                WORLD_ENV: f"{member.rank},{size}",
                PARENT_ENV: str(os.getpid()),
            }
            with (folder / f"{member.worker_id}.log").open("wb") as log:
                command = [sys.executable, "-m", "elasticflow_airflow.runtime.bootstrap"]
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    bad = next((r for r, code in enumerate(codes) if code), None)
    candidates = list_candidates(config.checkpoint_dir)
    if bad is not None or not candidates:
        last = (folder / f"w{bad or 0}.log").read_text(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError("\n".join([f"rank {bad or 0} ended without a checkpoint", *last]))
    info = verify_candidate(candidates[-1])
    return {name: _digest(tensor) for name, tensor in read_weights(info.path).items()}


def _compare(found: Mapping[int, Mapping[str, str]]) -> int:
    first, *others = found
    for size in others:
        differs = [name for name, digest in found[first].items() if found[size].get(name) != digest]
        if differs:
            named = ", ".join(differs[:5]) + (", ..." if len(differs) > 5 else "")
            _say(
                f"NOT THE SAME: {len(differs)} of {len(found[first])} tensors differ between {first} and {size}"
                f" workers: {named}\n"
                "Look for operators that are not deterministic (torch.use_deterministic_algorithms(True) names them),"
                " for draws that depend on rank or time, and for state that is not registered."
            )
            return 1
    sizes = ", ".join(map(str, found))
    _say(f"the same, bit for bit, with {sizes} workers: {len(found[first])} tensors")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _digest(tensor: torch.Tensor) -> str:
    digest = hashlib.sha256()
    add_tensor(digest, tensor)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
