"""Starts node agents as users do, each with a folder of its own below one base."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from elasticflow_airflow.engines.local import detect_nodes
from elasticflow_airflow.engines.local.node_facts import threads_env
from support.machines import Machines
from support.shared_pool import LENT_ENV, LENT_FOR_ENV, SharedPool

TOKEN = "a-token-of-the-tests"


def agent_command(
    base: Path,
    node_id: str,
    listen: str,
    slots: int,
    shared: Path | str | None = None,
    python: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of an agent, and its environment. ``python``: of another environment than ours."""
    options = {
        "--folder": base / node_id,
        "--shared-dir": shared or base / "shared",
        "--slot-lock-dir": base / f"locks-{node_id}",
        "--node-id": node_id,
        "--listen": listen,
        "--slots": slots,
    }
    ours = [sys.executable, "-c", "from elasticflow_airflow.cli.main import main; main()"]
    command = [
        *(ours if python is None else [str(python.with_name("elasticflow"))]),
        "node",
        *(str(word) for pair in options.items() for word in pair),
    ]
    return command, {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ELASTICFLOW_NODE_TOKEN": TOKEN}


def start_agent(
    base: Path,
    node_id: str,
    listen: str,
    slots: int,
    machines: Machines | None = None,
    index: int = 0,
    *,
    shared: Path | str | None = None,
    python: Path | None = None,
    pool: SharedPool | None = None,
) -> tuple[subprocess.Popen[str], str]:
    """Start an agent, on this machine or on one of ``machines``; return its process and its address.

    ``pool``: what its workers are forked from. On this machine only, as a fork stays in the namespace of its parent.
    """
    command, env = agent_command(base, node_id, listen, slots, shared, python)
    if machines is None and pool is None:
        agent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    elif machines is None:
        (here,) = detect_nodes(slots=slots, environ={"CUDA_VISIBLE_DEVICES": ""})
        control, key = pool.lend(threads_env(here.slots[0]))
        lent = control.fileno()
        command = [sys.executable, "-m", "support.shared_pool", *command[3:], "--warm-imports", "torch"]
        env |= {LENT_ENV: str(lent), LENT_FOR_ENV: key, "PYTHONPATH": str(Path(__file__).parents[1])}
        agent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, pass_fds=(lent,))
    else:
        agent = machines.run(index, command, env)
    assert agent.stdout is not None
    return agent, "http://" + agent.stdout.readline().split()[-1]
