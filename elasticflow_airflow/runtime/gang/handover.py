"""Forms the process group of a new generation in the background while the old generation still trains.

Each handover has one background thread. Rank 0 opens a new store and publishes its address in the incarnation's
folder. Every worker announces when it is ready; then all build the process group together. May import torch and the
standard library only.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not marked so by torch
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from elasticflow_airflow.runtime.gang.meeting_store import publish_store, wait_for_address
from elasticflow_airflow.runtime.gang.process_group import COLLECTIVE_TIMEOUT_S, WorkerGroup
from elasticflow_airflow.runtime.protocol import Membership, meeting_path, own_address

_POLL_S = 0.01
_BEAT_S = 0.2
JOINER_SILENCE_LIMIT_S = 5.0
"""A switch is abandoned when a joiner has sent no heartbeat for this long, in seconds."""
_BUILD_LIMIT_S = 20.0
_HOLDER = "holder"
_SETTLED, _GIVEN_UP = "settled", "given up"


class Handover:
    """Forms the group of one generation, from the point of view of one worker.

    ``joins`` is True for a worker without training state: it joins the others only after ``announce`` was called.
    """

    def __init__(
        self, folder: Path, plan: Membership, worker_id: str, device: torch.device, *, joins: bool, epoch: int = 0
    ) -> None:
        self.plan, self.rank = plan, plan.rank_of(worker_id)
        self._folder, self._worker_id, self._device = folder, worker_id, device
        self._joins = joins
        self._announced = threading.Event()
        self._epoch = epoch
        """For a joiner, the epoch that its loops have reached; for a holder, the epoch of the next step."""
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self.group: WorkerGroup | None = None
        self.ready = False
        self.joiner_epochs: list[int] = []
        """The epochs that the joiners' loops have reached: a switch in any other epoch would leave them behind."""
        self.epoch_of_holders: int | None = None
        self.failure: str | None = None
        self.settled = False
        """The staying and joining workers have everything they need, so the leaving workers may exit."""
        self.given_up: str | None = None
        """Why the change was abandoned, as a staying worker reported it to the leaving workers."""
        self._words: list[tuple[str, str]] = []
        """Key-value pairs passed to :meth:`tell` that the thread has not yet written to the store."""
        self._beats: dict[str, tuple[bytes, float]] = {}
        """By joiner: its last heartbeat value, and the monotonic time at which that value was first seen."""
        self.store: Any = None
        self._thread = threading.Thread(target=self._run, name=f"elasticflow-meet-{plan.generation}", daemon=True)
        self._thread.start()

    @property
    def generation(self) -> int:
        """The generation whose group is being formed."""
        return self.plan.generation

    def announce(self, epoch: int) -> None:
        """Announce that this joiner has warmed up and that its loops are in this epoch."""
        self._epoch = epoch
        self._announced.set()

    def now_in_epoch(self, epoch: int) -> None:
        """Set the epoch of the holders' next step; called at each step boundary while a handover is in progress."""
        self._epoch = epoch

    def wait(self, limit_s: float) -> None:
        """Wait until the handover is ready, failed or stopped, for at most ``limit_s`` seconds."""
        with self._changed:
            if not (self.ready or self.failure or self._stopped.is_set()):
                self._changed.wait(limit_s)

    def stop(self, why: str) -> None:
        """Cancel this handover. Unblocks any thread that waits in the new group."""
        self._stopped.set()
        if self.group is not None:
            self.group.give_up(why)
        with self._changed:
            self._changed.notify_all()

    @property
    def stopped(self) -> bool:
        """Whether this handover has ended or was cancelled, for instance because a later plan replaced it."""
        return self._stopped.is_set()

    def silent_joiners(self) -> list[str]:
        """Return the joiners that arrived but are now stopped or disconnected: no switch should wait for them."""
        now_s = time.monotonic()
        return sorted(w for w, (_, at_s) in self._beats.items() if now_s - at_s > JOINER_SILENCE_LIMIT_S)

    def end(self) -> None:
        """Mark the handover as complete: its group is in use, so the thread may end and leaving workers may exit."""
        self.tell(_SETTLED, "yes")
        self._stopped.set()

    def give_up(self, why: str) -> None:
        """Report that the change was abandoned and all continue as before, including the workers due to leave."""
        if self.rank is not None:
            self.tell(_GIVEN_UP, why)

    def tell(self, key: str, what: str) -> None:
        """Queue a value for the thread to write to the store: a write blocks if the store's host is unreachable."""
        self._words.append((key, what))

    def join(self, limit_s: float) -> bool:
        """Wait up to ``limit_s`` seconds for the thread to end; return whether it has ended."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._meet()
        except Exception as error:  # noqa: BLE001  (reported to waiting threads; a silent death would hang them)
            self.failure = f"{type(error).__name__}: {error}"
        with self._changed:
            self._changed.notify_all()

    def _meet(self) -> None:
        members = self.plan.members
        if len(members) == 1 and self.rank == 0 and self._joins is False:
            # Nobody joins: only the leaving workers read this store.
            self.store = self._open_store()
            self._say()
            self.group = WorkerGroup(0, 1, None, self.generation)
            self._is_ready()
            self._stopped.wait()
            self._say_words()
            return
        self.store = self._open_store() if self.rank == 0 else self._connect()
        if self.store is None:
            return
        if self._joins:
            while not self._announced.wait(_POLL_S):
                if self._stopped.is_set():
                    return
        said = self._say()
        while not self._stopped.is_set():
            here = [f"here/{m.worker_id}" for m in members]
            if self.store.check(here):
                break
            said = self._say(said)
            time.sleep(_POLL_S)
        if self._stopped.is_set():
            return
        if self.rank is not None:
            self.group = self._build()
        self._follow_epochs(said)

    def _say(self, said: str | None = None) -> str:
        """Publish that this worker is present and, for a joiner, which epoch its loops have reached."""
        text = f"joiner {self._epoch}" if self._joins else _HOLDER
        if text != said:
            self.store.set(f"here/{self._worker_id}", text)
        return text

    def _follow_epochs(self, said: str) -> None:
        """Keep joiners and holders informed of each other's epoch until the switch."""
        told: int | None = None
        beats, beaten_s = 0, -_BEAT_S
        while not self._stopped.is_set():
            if time.monotonic() - beaten_s >= _BEAT_S:
                beats, beaten_s = beats + 1, time.monotonic()
                self._beat(beats)
            said = self._say(said)
            words = [self.store.get(f"here/{m.worker_id}").decode() for m in self.plan.members]
            self.joiner_epochs = [int(word.split()[1]) for word in words if word != _HOLDER]
            if self._joins:
                if self.store.check(["epoch"]):
                    self.epoch_of_holders = int(self.store.get("epoch"))
            else:
                if self._epoch != told:
                    told = self._epoch
                    self.store.set("epoch", str(told))
            self._say_words()
            if not self.ready:
                self._is_ready()
            if self.rank is None and self._hears_the_end():
                return
            self._stopped.wait(_POLL_S)
        self._say_words()
        if self.rank is None:
            self._hears_the_end()

    def _is_ready(self) -> None:
        self.ready = True
        with self._changed:
            self._changed.notify_all()

    def _say_words(self) -> None:
        while self._words:
            self.store.set(*self._words.pop(0))

    def _hears_the_end(self) -> bool:
        """Called by a leaving worker: return whether the change has been settled or abandoned."""
        if self.store.check([_SETTLED]):
            self.settled = True
        elif self.store.check([_GIVEN_UP]):
            self.given_up = self.store.get(_GIVEN_UP).decode()
        return self.settled or self.given_up is not None

    def _beat(self, number: int) -> None:
        """As a joiner, publish a heartbeat; as any other worker, read the heartbeats of the joiners."""
        if self._joins:
            self.store.set(f"beat/{self._worker_id}", str(number))
            return
        for member in self.plan.members:
            key, worker = f"beat/{member.worker_id}", member.worker_id
            beat = self.store.get(key) if self.store.check([key]) else None
            if beat is not None and self._beats.get(worker, (None,))[0] != beat:
                self._beats[worker] = (beat, time.monotonic())

    def _open_store(self) -> Any:
        limit = datetime.timedelta(seconds=_BUILD_LIMIT_S)
        return publish_store(meeting_path(self._folder, self.generation), own_address(), limit)

    def _connect(self) -> Any:
        found = wait_for_address(meeting_path(self._folder, self.generation), self._stopped.is_set)
        if found is None:
            return None
        limit = datetime.timedelta(seconds=_BUILD_LIMIT_S)
        return TCPStore(*found, is_master=False, wait_for_workers=False, timeout=limit)

    def _build(self) -> WorkerGroup:
        assert self.rank is not None  # checked by the caller
        size = len(self.plan.members)
        if size == 1:
            return WorkerGroup(0, 1, None, self.generation)
        group = make_process_group(PrefixStore("group", self.store), self.rank, size, self._device)
        return WorkerGroup(self.rank, size, group, self.generation)


def make_process_group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    """Return a process group outside torch's global one: gloo for the CPU; gloo and NCCL for a GPU."""
    limit = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type != "cuda":
        return ProcessGroupGloo(store, rank, size, limit)
    from elasticflow_airflow.runtime.gang.cuda_group import CudaGroup

    return CudaGroup(store, rank, size, limit, device)


class EpochAim:
    """Chooses the epoch in which a joiner that arrived too late rehearses and waits next.

    A joiner can only join in the epoch that its own loops have reached. If an epoch takes longer than a rehearsal, it
    targets the epoch that the others are in. If epochs are shorter, it would never catch up: it then targets a later
    epoch, ahead by the number of epochs that passed since its last miss, and further ahead after each miss.
    All joiners target multiples of the same powers of two, so that they wait in the same epoch.
    """

    def __init__(self) -> None:
        self._missed_at: int | None = None
        self._reach = 0

    def choose(self, now: int, of_joiners: Sequence[int] = ()) -> int:
        """Return the epoch to rehearse in, after a miss.

        ``now`` is the epoch of the training workers; ``of_joiners`` are the epochs in which other joiners wait.
        """
        gone_by = 0 if self._missed_at is None else max(0, now - self._missed_at)
        self._missed_at = now
        if gone_by == 0:
            self._reach = 0
            return now
        self._reach = 1 << (gone_by - 1).bit_length()
        chosen = (now // self._reach + 2) * self._reach
        met = [epoch for epoch in of_joiners if now + gone_by < epoch <= chosen + self._reach]
        return max(met, default=chosen)

    def misses(self, epoch: int, now: int | None, of_joiners: Sequence[int] = ()) -> bool:
        """Return whether waiting in ``epoch`` is futile: the other workers, now in ``now``, will not switch there.

        This is the case when they have passed it or were set back, or when another joiner waits slightly further on.
        """
        if now is None:
            return False
        since = epoch if self._missed_at is None else self._missed_at
        if not since <= now <= epoch:
            return True
        return any(epoch < other <= epoch + self._reach for other in of_joiners)
