"""``python -m …agent_process FOLDER ADDRESS [PID START]``: a node agent that no longer belongs to who started it.

Its settings are on standard input. With a process, given by its pid and start time, it and all workers end with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from elasticflow_airflow.engines.cluster.agent_server import AgentOptions, run_agent
from elasticflow_airflow.engines.local.machine.processes import ProcessId, boot_id
from elasticflow_airflow.engines.ray.messages import AgentSettings


def main(arguments: Sequence[str]) -> int:
    """Return at once in the process that was started; run the agent in its grandchild."""
    folder, address, *owner = arguments
    settings = AgentSettings.model_validate_json(sys.stdin.buffer.read())
    if os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(3, 1024)
    options = AgentOptions(
        state_dir=Path(folder),
        shared_dir=settings.shared_dir,
        listen=f"{address}:{settings.port}",
        node_id=settings.node_id,
        slots=settings.slots,
        slot_lock_dir=settings.slot_lock_dir,
        warm_imports=settings.warm_imports,
        notice_file=settings.notice_file,
        own_cpus=True,
        ends_with=ProcessId(int(owner[0]), int(owner[1]), boot_id()) if owner else None,
        fingerprint=settings.fingerprint + (f" {owner[0]}" if owner else ""),
    )
    return run_agent(options, settings.token.get_secret_value())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
