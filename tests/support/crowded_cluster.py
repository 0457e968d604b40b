"""A large cluster as the page is told of it: 64 nodes with 8 slots, 500 jobs with long names, some in trouble."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elasticflow_airflow.api import JobIdentity, JobStatus, SlotStatus, State, Verdict
from elasticflow_airflow.api.insight import Admission, ClusterNow, Span
from elasticflow_airflow.api.owners import UnownedJob
from support.scripted_cluster import ScriptedCluster
from support.scripted_course import HOUR, steps_per_s

NODES, SLOTS_EACH = 64, 8
RUNNING, WAITING, ENDED = 128, 172, 200
DAGS = tuple(
    f"{team}_{what}_refreshed_before_the_morning_peak"
    for team in ("recommender", "fraud_detection", "search_ranking", "customer_support", "logistics")
    for what in ("candidates", "two_tower_model", "reranker")
)


def _who(number: int) -> JobIdentity:
    dag_id = DAGS[number % len(DAGS)]
    run_id = f"scheduled__2026-11-{1 + number % 28:02}T05:00:00+00:00"
    return JobIdentity(dag_id=dag_id, run_id=run_id, task_id=f"train_on_the_events_of_the_last_day_part_{number:03}")


@dataclass
class CrowdedCluster(ScriptedCluster):
    """The service of the large cluster. Of 4 running jobs each, one is late; every tenth that ended was rejected."""

    made: list[JobStatus] = field(default_factory=list)

    def jobs(self) -> list[JobStatus]:
        if not self.made:
            self.made = [self._one(number) for number in range(RUNNING + WAITING + ENDED)]
        return self.made

    def _one(self, number: int) -> JobStatus:
        who = _who(number)
        nodes = [f"gpu-{1 + (number // 2):02}" for _ in range(4)]
        slots = [(node, 4 * (number % 2) + index) for index, node in enumerate(nodes)] if number < RUNNING else []
        slack_h = -0.4 if number < RUNNING and number % 40 == 3 else 0.2 + (number % 9) / 3
        left_h, done = 0.5 + (number % 23) / 4, number % 10 * 2400
        left = round(left_h * HOUR * steps_per_s(len(slots) or 4))
        job = self._job("vision", slots, (done, done + left), left_h, slack_h)
        job = job.model_copy(
            update={"job_id": who.job_id, "identity": who, "submitted_at": self.now - 0.1 * HOUR * (1 + number % 100)}
        )
        if number < RUNNING:
            return job
        if number < RUNNING + WAITING:
            return job.model_copy(update={"state": State.ADMITTED, "steps_per_s": None, "loss": None, "step": 0})
        if number % 10 == 0:
            reason = "needs 8 slots for 2 h before its deadline, and 5 are free then"
            verdict = Verdict(decision="rejected", reason=reason, earliest_deadline_at=self.now + HOUR)
            return job.model_copy(update={"state": State.REJECTED, "state_reason": reason, "verdict": verdict})
        result = self._ended("vision", 0).result
        assert result is not None
        done = result.model_copy(update={"steps": job.total_steps})
        return job.model_copy(update={"state": State.SUCCEEDED, "step": job.total_steps, "result": done})

    def _unowned(self, _told: Any = None) -> list[UnownedJob]:
        why = "no client has asked for it"
        return [UnownedJob(job=job, since_at=self.now - 600.0, why=why) for job in self.jobs()[7:9]]

    def cluster(self, _told: Any = None) -> ClusterNow:
        live = self._live()
        holder = {tuple(slot): job.job_id for job in live for slot in job.slots}
        names = [(f"gpu-{node:02}", index) for node in range(1, NODES + 1) for index in range(SLOTS_EACH)]
        slots = [SlotStatus(node_id=node, index=index, job_id=holder.get((node, index))) for node, index in names]
        why = {job.job_id: "Waits for slots that tighter deadlines need first, and starts with 4." for job in live}
        return ClusterNow(at=self.now, slots=slots, jobs=live, why=why)

    def _past(self) -> tuple[list[Span], list[Admission]]:
        spans, asked = [], []
        for job in self.jobs():
            who = job.identity.model_dump(include={"namespace", "dag_id", "task_id", "run_id", "map_index"})
            if job.slots:
                begun = self.now - 0.1 * HOUR * (1 + job.step % 40)
                spans.append(
                    Span(
                        job_id=job.job_id,
                        generation=1,
                        from_at=begun,
                        running_at=begun + 20.0,
                        workers=len(job.slots),
                        slots=job.slots,
                        **who,
                    )
                )
            decision = "rejected" if job.state is State.REJECTED else "admitted"
            asked.append(
                Admission(
                    job_id=job.job_id,
                    submitted_at=job.submitted_at,
                    started_at=job.submitted_at + 20.0,
                    decision=decision,
                    deadline_at=job.deadline_at,
                    **who,
                )
            )
        return spans, asked

    def _planned(self) -> list[Span]:
        return []
