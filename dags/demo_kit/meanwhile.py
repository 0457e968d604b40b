"""What else happens on the first day of ``make demo``: a colleague wants a model, and a worker is killed.

Begins once the thorough training has all slots. The colleague asks for too much and is refused at once, then takes a
deadline that can be promised, for which the training makes room. Afterwards one of its workers is killed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime

from demo_kit.layout import SLOTS, DemoPaths
from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length, State
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, Endpoint

REFUSED = "a deadline that cannot be kept was to be refused"
SQUEEZED = "the training was to make room for a job with a tighter deadline"
KILLED = "a worker was to be killed, and training to go on"
_LOOK_S = 0.5
_STEPS_BETWEEN = 4
_TOO_SOON_S, _FAR_ENOUGH_S = 10.0, 150.0
_STEPS_OF_COLLEAGUE = 12


class Meanwhile:
    """Begins in the constructor, in a thread of its own. ``tell`` is given a sentence on each step."""

    def __init__(self, layout: DemoPaths, endpoint: Endpoint, stretch: float, tell: Callable[[str], None]) -> None:
        self._layout, self._endpoint, self._stretch, self._tell = layout, endpoint, stretch, tell
        self._missing = [REFUSED, SQUEEZED, KILLED]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> Sequence[str]:
        """Have nothing happen from now on, and return what has not happened."""
        self._over.set()
        self._thread.join()
        return tuple(self._missing)

    def _run(self) -> None:
        for happen in (self._ask_for_too_much, self._ask_for_room, self._kill_a_worker):
            while not self._over.wait(_LOOK_S):
                with suppress(ElasticFlowError, OSError), ElasticFlowClient(self._endpoint, retry_for_s=0.0) as client:
                    if happen(client):
                        break

    def _ask_for_too_much(self, client: ElasticFlowClient) -> bool:
        quick, thorough = _job(client, "finetune_quick"), self._with_all_slots(client)
        if quick is None or thorough is None or quick.state is not State.SUCCEEDED:
            return False
        job = client.submit(self._wish(client, quick, "wants_it_at_once", _TOO_SOON_S)).job
        if job.state is State.REJECTED:
            offer = job.verdict.earliest_deadline_at
            earliest = "" if offer is None else f"; the earliest deadline that can be promised is {_clock(offer)}"
            self._say(f"a colleague wants a model within {_TOO_SOON_S:.0f} s: refused at once{earliest}", REFUSED)
        return True

    def _ask_for_room(self, client: ElasticFlowClient) -> bool:
        quick, name = _job(client, "finetune_quick"), "takes_the_offer"
        job = _job(client, name)
        if job is None and quick is not None:
            job = client.submit(self._wish(client, quick, name, _FAR_ENOUGH_S * self._stretch)).job
            due = "" if job.deadline_at is None else f" by {_clock(job.deadline_at)}"
            self._say(f"the colleague asks for it{due}: {job.verdict.decision}; finetune_thorough makes room")
        if job is None or not job.state.terminal:
            return False
        if job.state is State.SUCCEEDED and job.result is not None and job.result.met:
            self._say("the colleague has the model in time; finetune_thorough grows again", SQUEEZED)
        return True

    def _kill_a_worker(self, client: ElasticFlowClient) -> bool:
        thorough = self._with_all_slots(client)
        pid = None if thorough is None else self._second_worker(thorough.job_id)
        if thorough is None or pid is None:
            return False
        self._say(
            f"killing one of the {thorough.workers} workers of finetune_thorough (kill -9) at step {thorough.step}"
        )
        os.kill(pid, signal.SIGKILL)
        while not self._over.wait(_LOOK_S):
            now = client.status(thorough.job_id)
            if now.state.terminal or now.step > thorough.step + _STEPS_BETWEEN:
                self._say(f"finetune_thorough has gone on to step {now.step}", KILLED)
                return True
        return True

    def _with_all_slots(self, client: ElasticFlowClient) -> JobStatus | None:
        """Return the thorough training if it trains on all slots, and its speed there is known."""
        job = _job(client, "finetune_thorough")
        if job is None or job.state is not State.RUNNING or job.workers < SLOTS:
            return None
        changes = [event for event in client.events(job.job_id) if event.kind == "rescaled"]
        if not changes or changes[-1].data["workers"] != SLOTS:
            return None
        measured = any(
            point.workers == SLOTS and point.measured_steps_per_s for point in client.story(job.job_id).curve
        )
        return job if measured and job.step >= changes[-1].data["step"] + _STEPS_BETWEEN else None

    def _wish(self, client: ElasticFlowClient, like: JobStatus, name: str, due_s: float) -> JobSubmission:
        """Return a short training like this job's, at its measured speed."""
        story = client.story(like.job_id)
        asked = story.submission["command"]
        return JobSubmission(
            identity=JobIdentity(dag_id=like.identity.dag_id, run_id="by_hand", task_id=name),
            command=Command(snapshot=asked["snapshot"], script=asked["script"], args=asked["args"]),
            length=Length(steps=_STEPS_OF_COLLEAGUE),
            global_batch_size=story.submission["global_batch_size"],
            logical_workers=like.logical_workers,
            scaling_curve={point.workers: point.measured_steps_per_s for point in story.curve[:1]},
            max_workers=1,
            deadline_at=time.time() + due_s,
        )

    def _second_worker(self, job_id: str) -> int | None:
        """Return the process of a living worker that is not the first one."""
        for file in sorted((self._layout.state_dir / "jobs" / job_id).glob("i*/supervisors/*/status.json")):
            for worker in json.loads(file.read_text()).get("workers", {}).values():
                if worker.get("rank") and not worker.get("ended") and worker.get("trainer"):
                    return int(worker["trainer"]["pid"])
        return None

    def _say(self, what: str, done: str | None = None) -> None:
        self._tell(what)
        with self._layout.accidents.open("a") as record:
            record.write(f"{datetime.now().astimezone():%H:%M:%S}  {what}\n")
        if done is not None:
            self._missing.remove(done)


def _job(client: ElasticFlowClient, task_id: str) -> JobStatus | None:
    """Return the newest job of a task."""
    return next((job for job in client.list_jobs() if job.identity.task_id == task_id), None)


def _clock(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s).astimezone():%H:%M:%S}"
