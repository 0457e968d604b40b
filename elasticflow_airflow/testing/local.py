"""Real training in tests: the embedded service of this machine, in a private folder, until the test session ends."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from elasticflow_airflow.api import ServiceCard
from elasticflow_airflow.client import Endpoint, ensure_service

_STOP_LIMIT_S = 20.0


def start_service(folder: Path, slots: int) -> Endpoint:
    """Start the service with ``slots`` CPU slots. Raises EmbeddedStartError."""
    return ensure_service(
        folder,
        {
            "ELASTICFLOW_ENGINE": "local",
            "ELASTICFLOW_SLOTS": str(slots),
            "ELASTICFLOW_SLOT_LOCK_DIR": str(folder / "slots"),
            "ELASTICFLOW_IDLE_EXIT_S": "120",
        },
    )


def stop_service(endpoint: Endpoint) -> None:
    """Stop the service; the jobs of a test are over by then, or have been cancelled."""
    folder = endpoint.embedded_state_dir
    card = None if folder is None else ServiceCard.read(folder)
    if folder is None or card is None:
        return
    with suppress(ProcessLookupError):
        os.kill(card.pid, signal.SIGTERM)
    end_s = time.monotonic() + _STOP_LIMIT_S
    while (folder / "service.sock").exists() and time.monotonic() < end_s:
        time.sleep(0.02)
