"""The rendezvous handler that takes our membership plan: backend ``elasticflow`` (entry point ``torchrun.handlers``).

Torchrun's own rendezvous lets whoever comes in time join. Here the service decides who is in: an agent waits until
the plan contains its worker. To torchrun each agent is a world of one, so that none waits for another, neither to begin
nor to end, and workers come, go and die alone. What the plan says of rank and size reaches the trainer beside torchrun
(``WORLD_ENV``). For scripts without a session rank 0's agent opens a fresh TCPStore and publishes its address in the
incarnation's folder; their ``init_process_group`` meets there. May import torch and the standard library only.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not marked so by torch
    HashStore,
    TCPStore,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousHandlerCreator

from elasticflow_airflow.runtime.gang.meeting_store import publish_store, wait_for_address
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV,
    WORKER_ENV,
    WORLD_ENV,
    Membership,
    RescaleMode,
    rendezvous_path,
)

BACKEND = "elasticflow"
DEFAULT_TIMEOUT_S = 600
_POLL_S = 0.02

logger = logging.getLogger(__name__)


class PlanRendezvous(RendezvousHandler):
    """Rendezvous by membership plan.

    ``incarnation_dir`` (torchrun's ``--rdzv-endpoint``) is where plan and address lie. The agent is told that no
    node ever waits: a new plan reaches the workers by themselves, never by a restart that torchrun decides on.
    """

    def __init__(
        self,
        incarnation_dir: Path,
        worker_id: str,
        generation: int,
        run_id: str,
        address: str,
        timeout_s: float,
    ) -> None:
        self._incarnation_dir = incarnation_dir
        self._worker_id = worker_id
        self._generation = generation
        self._run_id = run_id
        self._address = address
        self._timeout_s = timeout_s
        self._closed = False
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name of this backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Trainers use the store of rank 0's agent: no second port, no second race for it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the plan and the store. Raises SystemExit(0) when the plan has moved on without this worker."""
        deadline_s = time.monotonic() + self._timeout_s
        plan = self._wait_for_plan(deadline_s)
        rank, address, port = plan.rank_of(self._worker_id), self._address, 0
        if rank is None:
            raise RuntimeError(f"worker {self._worker_id} is not in the plan of generation {plan.generation}")
        path = rendezvous_path(self._incarnation_dir, plan.generation)
        if plan.mode is RescaleMode.IN_PLACE:
            pass  # who joins a running training has a session, and sessions meet by themselves
        elif rank == 0:
            limit = datetime.timedelta(seconds=self._timeout_s)
            self._store = publish_store(path, address, limit)
            port = self._store.port
        else:
            address, port = self._wait_for_address(path, plan, deadline_s)
        # The trainer inherits it.
        os.environ[WORLD_ENV] = f"{rank},{len(plan.members)}"
        own: Any = HashStore()
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(address, port))

    def is_closed(self) -> bool:
        """Whether set_closed was called here."""
        return self._closed

    def set_closed(self) -> None:
        """Nobody may join through this handler any more."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Never any: see the class."""
        return 0

    def get_run_id(self) -> str:
        """Torchrun's ``--rdzv-id``."""
        return self._run_id

    def shutdown(self) -> bool:
        """Let go."""
        self._closed = True
        return True

    def _wait_for_plan(self, deadline_s: float) -> Membership:
        while True:
            plan = Membership.read(self._incarnation_dir)
            if plan is not None:
                if plan.rank_of(self._worker_id) is not None:
                    return plan
                if plan.generation >= self._generation:
                    logger.info("generation %s goes on without %s: leaving", plan.generation, self._worker_id)
                    # Not RendezvousGracefulExitError: torchrun would end with status 1 after it.
                    raise SystemExit(0)
            if time.monotonic() > deadline_s:
                self._time_out(f"no membership plan contains worker {self._worker_id}")
            time.sleep(_POLL_S)

    def _wait_for_address(self, path: Path, plan: Membership, deadline_s: float) -> tuple[str, int]:
        def is_left_out() -> bool:
            current = Membership.read(self._incarnation_dir)
            if current is not None and current.rank_of(self._worker_id) is None:
                return True
            if time.monotonic() > deadline_s:
                self._time_out(f"rank 0 of generation {plan.generation} has not opened its store ({path})")
            return False

        found = wait_for_address(path, is_left_out)
        if found is None:
            raise SystemExit(0)
        return found

    def _time_out(self, what: str) -> NoReturn:
        raise RendezvousTimeoutError(f"after {self._timeout_s:.0f} s {what}")


def new_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler of one agent. Raises ValueError when the environment does not name the worker."""
    worker_id, generation = os.environ.get(WORKER_ENV), os.environ.get(GENERATION_ENV)
    if not worker_id or not generation:
        raise ValueError(
            f"rendezvous backend {BACKEND!r} needs {WORKER_ENV} and {GENERATION_ENV}; it is for workers that the "
            "elasticflow service starts. Without the service use --rdzv-backend=c10d or --standalone."
        )
    return PlanRendezvous(
        Path(params.endpoint),
        worker_id,
        int(generation),
        params.run_id,
        params.local_addr or "127.0.0.1",
        float(params.get("timeout", DEFAULT_TIMEOUT_S)),
    )


def create_handler() -> RendezvousHandlerCreator:
    """Entry point of group ``torchrun.handlers``: torch calls it without arguments, for the maker of handlers."""
    return new_handler
