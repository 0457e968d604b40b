"""What happens to the cluster of ``make demo-cluster`` while it trains: a node is killed, and the replica that leads.

Each once, as soon as a job trains that it concerns, and one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from demo_kit.ray_cluster import NODES, RayCluster
from demo_kit.replicas import Replicas
from elasticflow_airflow.api import JobStatus
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint

NODE, LEADER = "a node was to be killed", "the replica that leads was to be killed, and the other one to take over"
_LOOK_S, _SOON_S = 1.0, 0.1
_AWAY_S = 20.0
_STEPS_BEFORE = 10
_GOES_ON_WITHIN_S = 60.0


class Accidents:
    """Begins in the constructor, with a thread for each accident. ``tell`` is given a sentence on each step.

    ``record`` is a file that gets these sentences, too, with the time. Without ``replicas`` the node is all that is
    killed.
    """

    def __init__(
        self,
        cluster: RayCluster,
        replicas: Replicas | None,
        endpoint: Endpoint,
        record: Path,
        tell: Callable[[str], None],
    ) -> None:
        self._cluster, self._replicas, self._endpoint = cluster, replicas, endpoint
        self._record, self._tell = record, tell
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._missing = [NODE] if replicas is None else [NODE, LEADER]
        self._threads = [threading.Thread(target=self._watch, args=(what,), name=what) for what in self._missing]
        for thread in self._threads:
            thread.start()

    def end(self) -> Sequence[str]:
        """Have nothing happen from now on, and return what has not happened."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return tuple(self._missing)

    def _watch(self, what: str) -> None:
        accident = self._lose_the_node if what == NODE else self._lose_the_leader
        while what in self._missing and not self._over.wait(_LOOK_S):
            with self._one_at_a_time:
                if accident():
                    self._missing.remove(what)

    def _lose_the_node(self) -> bool:
        """Kill a node once a job trains over all of them, and start it again."""
        over_all = [job for job in self._training() if len({node_id for node_id, _ in job.slots}) == len(NODES)]
        if not over_all:
            return False
        self._say(f"killing {NODES[1]}, on which a worker of {over_all[0].identity.task_id} trains")
        self._cluster.kill(NODES[1])
        if not self._over.wait(_AWAY_S):
            self._say(f"starting {NODES[1]} again")
            self._cluster.start_node(NODES[1])
        return True

    def _lose_the_leader(self) -> bool:
        """Kill the replica that leads, once a job of the second day trains, and start it again."""
        training = self._training(day=2)
        leader = None if self._replicas is None else self._replicas.leader()
        if self._replicas is None or leader is None or not training:
            return False
        job = max(training, key=lambda one: (one.total_steps or 0) - one.step)
        self._say(f"killing {leader}, the replica that leads, while {job.identity.task_id} trains (step {job.step})")
        self._replicas.kill(leader)
        killed_s = time.monotonic()
        while (successor := self._replicas.leader()) is None:
            if self._over.wait(_SOON_S):
                return False
        self._say(f"{successor} decides, {time.monotonic() - killed_s:.1f} s after {leader} was killed")
        self._say(f"starting {leader} again")
        self._replicas.start_one(leader)
        end_s = time.monotonic() + _GOES_ON_WITHIN_S
        while time.monotonic() < end_s and not self._over.wait(_SOON_S):
            now = next((one for one in self._jobs() if one.job_id == job.job_id), None)
            if now is not None and now.step > job.step:
                same = " with the same workers" if now.generation == job.generation else ""
                self._say(f"{job.identity.task_id} has gone on{same}, to step {now.step}")
                break
        return True

    def _training(self, day: int = 1) -> list[JobStatus]:
        """Return jobs that have made some steps on the slots that they have, from this day of the demo on."""
        jobs = self._jobs()
        if len({job.identity.run_id for job in jobs}) < day:
            return []
        return [job for job in jobs if not job.state.terminal and job.slots and job.step >= _STEPS_BEFORE]

    def _jobs(self) -> list[JobStatus]:
        """Return all jobs; none while no service answers."""
        with (
            suppress(ElasticFlowError, OSError),
            ElasticFlowClient(self._endpoint, retry_for_s=0.0) as client,
        ):
            return client.list_jobs()
        return []

    def _say(self, what: str) -> None:
        self._tell(what)
        with self._record.open("a") as record:
            record.write(f"{datetime.now().astimezone():%H:%M:%S}  {what}\n")
