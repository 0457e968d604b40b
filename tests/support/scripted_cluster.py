"""A service's answers about a plausible week on two nodes, for the page's tests: made up, but always the same.

``ScriptedCluster.answer`` takes a request and gives a status and a JSON value; it remembers what was asked of it.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from elasticflow_airflow.api import (
    AmendAnswer,
    Event,
    ForecastAnswer,
    ForecastItem,
    Health,
    JobIdentity,
    JobResult,
    JobStatus,
    LeaderStatus,
    LogPiece,
    Problem,
    SlotStatus,
    State,
    Verdict,
)
from elasticflow_airflow.api.insight import (
    Admission,
    Checkpoint,
    ClusterHistory,
    ClusterNow,
    CurvePoint,
    DagTotals,
    JobStory,
    RunOfTask,
    Sample,
    Span,
    StackDump,
    WhatIf,
    WhatIfVerdict,
    WorkerTimes,
)
from elasticflow_airflow.api.owners import UnownedJob
from elasticflow_airflow.api.status import Mention

HOUR = 3600.0
NODES = ("gpu-a", "gpu-b")
SLOTS = [(node, index) for node in NODES for index in range(4)]
TASKS = {"nightly_reviews": "train", "fraud_daily": "finetune", "search_ranker": "train", "vision": "backbone"}
HIDDEN = JobIdentity(dag_id="payroll", run_id="scheduled__today", task_id="train")
FOREIGN = JobIdentity(namespace="elsewhere", dag_id="fraud_daily", run_id="scheduled__today", task_id="finetune")
EXPECTED = JobIdentity(namespace="elsewhere", dag_id="secretteam_eu", run_id="", task_id="retrain")
"""Of another Airflow, and due: no list of jobs tells of it."""

_ARITHMETIC = """Deadline:
  task 'publish' must end by  Sat 2026-11-21 07:30 UTC  (deadline='07:30')
  minus what comes after      18 min                    (p95 of the last 14 runs (12 min to 19 min))
  the training must end by    Sat 2026-11-21 07:12 UTC"""


def identity(dag_id: str, run_id: str = "scheduled__today") -> JobIdentity:
    return JobIdentity(dag_id=dag_id, run_id=run_id, task_id=TASKS.get(dag_id, "train"))


@dataclass
class ScriptedCluster:
    """The service, with jobs that can be cancelled and amended. ``now`` is fixed when it is made."""

    now: float = field(default_factory=time.time)
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    away: bool = False
    cancelled: set[str] = field(default_factory=set)
    deadlines: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    leadership: LeaderStatus | None = None
    further: list[JobStatus] = field(default_factory=list)
    """More jobs that lists find."""
    happened: int = 0
    """How many events there were."""
    followed: list[str] = field(default_factory=list)
    """What was asked for events as they come."""
    listed: list[dict[str, str]] = field(default_factory=list)
    """What lists were asked for."""

    def answer(self, method: str, path: str, params: httpx.QueryParams, body: bytes) -> tuple[int, Any]:
        """The status and the JSON value for a request."""
        told = json.loads(body) if body[:1] == b"{" else None
        self.asked.append((method, path, told))
        for verb, pattern, reply in (
            ("GET", r"/v1/health", self._health),
            ("GET", r"/v1/cluster", self.cluster),
            ("GET", r"/v1/cluster/history", self.history),
            ("POST", r"/v1/forecast", self.forecast),
            ("POST", r"/v1/what-if", self._what_if),
            ("GET", r"/v1/unowned", self._unowned),
            ("GET", r"/v1/jobs", self._list),
        ):
            if method == verb and path == pattern:
                value = reply(params) if reply in (self.history, self._list) else reply(told)
                return 200, _plain(value)
        found = re.fullmatch(r"/v1/jobs/([a-z0-9-]+)(?:/(\w+))?(?:/([\w-]+))?", path)
        job = next((one for one in self.jobs() if found and one.job_id == found[1]), None)
        if found is None or job is None:
            return 404, _plain(Problem(error="job_not_found", message="there is no such job"))
        return self._of_job(job, method, found[2] or "", told, params)

    def _of_job(self, job: JobStatus, method: str, what: str, told: Any, params: Mapping[str, str]) -> tuple[int, Any]:
        if what in ("cancel",) or method == "PATCH":
            if told["claim"] < job.claim:
                return 409, _plain(Problem(error="stale_claim", message="the claim is stale"))
            if what == "cancel":
                self.cancelled.add(job.job_id)
                return 200, _plain(job.model_copy(update={"state": State.CANCELLED}))
            if told.get("deadline_at") is not None:
                self.deadlines[job.job_id] = told["deadline_at"]
            return 200, _plain(AmendAnswer(accepted=True, job=job))
        if what == "story":
            return 200, _plain(self.story(job))
        if what == "runs":
            return 200, _plain(self._runs(job))
        if what == "events":
            return 200, _plain([e for e in self._events(job) if e.event_id > int(params.get("after", 0))])
        if what == "logs":
            return 200, _plain(self._log(int(params.get("offset", 0))))
        if what == "stacks":
            stacks = {
                "w0": 'File "train.py", line 41 in main\n  loss.backward()',
                "w1": 'File "train.py", line 38 in main',
            }
            return 200, _plain(StackDump(job_id=job.job_id, at=self.now, stacks=stacks))
        return 200, _plain(job)

    # What there is

    def jobs(self) -> list[JobStatus]:
        made = [
            self._job("nightly_reviews", 4, 0.62, 1.9, 0.7, [("gpu-a", i) for i in range(4)]),
            self._job("fraud_daily", 2, 0.31, 2.8, 0.25, [("gpu-b", 0), ("gpu-b", 1)]),
            self._job("search_ranker", 1, 0.48, 0.6, -0.2, [("gpu-b", 2)], at_risk=True),
            self._waiting("vision"),
            self._ended("nightly_reviews", 1),
            self._ended("fraud_daily", 1),
            self._refused("search_ranker", 1),
        ]
        hidden = made[0].model_copy(
            update={"job_id": HIDDEN.job_id, "identity": HIDDEN, "slots": [("gpu-b", 3)], "workers": 1}
        )
        foreign = made[1].model_copy(update={"job_id": FOREIGN.job_id, "identity": FOREIGN, "slots": [], "workers": 0})
        return [
            job.model_copy(update={"state": State.CANCELLED, "workers": 0}) if job.job_id in self.cancelled else job
            for job in (*made, hidden, foreign)
        ]

    def _job(
        self, dag: str, workers: int, part: float, left_h: float, slack_h: float, slots: Any, *, at_risk: bool = False
    ) -> JobStatus:
        who = identity(dag)
        finish = self.now + left_h * HOUR
        deadline = self.deadlines.get(who.job_id, finish + slack_h * HOUR)
        return JobStatus(
            job_id=who.job_id,
            identity=who,
            incarnation=1,
            generation=3,
            state=State.RUNNING,
            state_reason=f"holds {workers} slots beside {HIDDEN.job_id}",
            verdict=Verdict(decision="admitted", reason="fits beside all other promises"),
            claim=2,
            submitted_at=self.now - 1.7 * HOUR,
            deadline_at=deadline,
            best_effort=False,
            value=1.0,
            workers=workers,
            slots=slots,
            logical_workers=8,
            step=int(part * 24000),
            total_steps=24000,
            loss=0.21 + 0.4 * (1 - part),
            steps_per_s=round(1.35 * workers**0.9, 2),
            projected_finish_at=finish,
            slack_s=deadline - finish,
            at_risk=at_risk,
            log_names=["w0", "w1"],
            last_event_id=9,
        )

    def _waiting(self, dag: str) -> JobStatus:
        who = identity(dag)
        job = self._job(dag, 0, 0.0, 9.0, 1.2, [])
        return job.model_copy(
            update={
                "job_id": who.job_id,
                "state": State.ADMITTED,
                "generation": 0,
                "steps_per_s": None,
                "loss": None,
                "log_names": [],
                "submitted_at": self.now - 0.2 * HOUR,
            }
        )

    def _ended(self, dag: str, days: int) -> JobStatus:
        who = identity(dag, f"scheduled__{days}d")
        at = self.now - days * 24 * HOUR
        result = JobResult(steps=24000, final_loss=0.22, finished_at=at, met=True, slack_s=1500.0, gpu_seconds=24800.0)
        changes = {
            "job_id": who.job_id,
            "identity": who,
            "state": State.SUCCEEDED,
            "step": 24000,
            "workers": 0,
            "slots": [],
            "submitted_at": at - 2.2 * HOUR,
            "deadline_at": at + 1500.0,
            "result": result,
            "state_reason": "all 24000 steps are done",
        }
        return self._job(dag, 0, 1.0, 0.0, 0.4, []).model_copy(update=changes)

    def _refused(self, dag: str, days: int) -> JobStatus:
        who = identity(dag, f"manual__{days}d")
        reason = "needs 8 slots for 2 h before its deadline, and 5 are free; 40 min later is feasible"
        changes = {
            "job_id": who.job_id,
            "identity": who,
            "state": State.REJECTED,
            "step": 0,
            "state_reason": reason,
            "submitted_at": self.now - days * 21 * HOUR,
            "verdict": Verdict(decision="rejected", reason=reason),
        }
        return self._job(dag, 0, 0.0, 0.0, 0.4, []).model_copy(update=changes)

    def _unowned(self, _told: Any = None) -> list[UnownedJob]:
        why = "no client has asked for it"
        lost = [job for job in self.jobs() if job.identity in (HIDDEN, identity("vision"))]
        return [UnownedJob(job=job, since_at=self.now - 600.0, why=why) for job in lost]

    def _live(self) -> list[JobStatus]:
        return [job for job in self.jobs() if not job.state.terminal]

    def cluster(self, _told: Any = None) -> ClusterNow:
        live = self._live()
        holder = {tuple(slot): job.job_id for job in live for slot in job.slots}
        why = {
            identity("nightly_reviews").job_id: (
                "Holds 4 slots until it ends, as its deadline leaves no room for fewer."
            ),
            identity("fraud_daily").job_id: (
                "holds 2 slots until 03:20 UTC, then 4: secretteam_eu.retrain and nightly_reviews.train need them"
            ),
            identity("search_ranker").job_id: "holds 1 slot until 03:20 UTC, as payroll.train needs the others",
            identity("vision").job_id: "Waits until nightly_reviews ends, then starts with 4: its deadline is far off.",
        }
        slots = [SlotStatus(node_id=n, index=i, job_id=holder.get((n, i))) for n, i in SLOTS]
        return ClusterNow(at=self.now, slots=slots, jobs=live, why=why, why_names=_named(why))

    def _health(self, _told: Any = None) -> Health:
        return Health(
            status="ok",
            version="0.1.0",
            engine="local",
            pid=1,
            started_at=self.now,
            state_dir="/var/x",
            live_jobs=4,
            problems=self.problems,
            leadership=self.leadership,
        )

    def history(self, params: Mapping[str, str]) -> ClusterHistory:
        from_at, until_at = float(params["from_at"]), float(params["until_at"])
        parts = int(params.get("parts", 96))
        spans, admissions = self._past()
        spans = [s for s in spans if (s.until_at or self.now) > from_at and s.from_at < until_at]
        part_s = (until_at - from_at) / parts
        held, computing = [0.0] * parts, [0.0] * parts
        for span in spans:
            for at in range(parts):
                a, b = from_at + at * part_s, from_at + (at + 1) * part_s
                end = min(b, span.until_at or self.now)
                held[at] += span.workers * max(0.0, end - max(a, span.from_at))
                computing[at] += span.workers * max(0.0, end - max(a, span.running_at or span.from_at))
        return ClusterHistory(
            from_at=from_at,
            until_at=until_at,
            now=self.now,
            spans=spans,
            planned=self._planned(),
            admissions=[a for a in admissions if a.submitted_at >= from_at],
            part_s=part_s,
            held_slot_s=held,
            computing_slot_s=computing,
            slots=8,
            by_dag=_by_dag(spans, [a for a in admissions if a.submitted_at >= from_at], from_at, self.now),
        )

    def _past(self) -> tuple[list[Span], list[Admission]]:
        chance = random.Random(7)
        spans: list[Span] = []
        admissions: list[Admission] = []
        hours = {"nightly_reviews": 3.0, "fraud_daily": 5.5, "search_ranker": 2.0, "payroll": 4.0}
        for days in range(7, 0, -1):
            for number, (dag, long) in enumerate(hours.items()):
                who = identity(dag, f"scheduled__{days}d")
                at = self.now - days * 24 * HOUR + number * 4.6 * HOUR + chance.uniform(0, 1800)
                refused = dag == "search_ranker" and days in (2, 5)
                first = [("gpu-a", 0), ("gpu-a", 1)] if number % 2 == 0 else [("gpu-b", 0), ("gpu-b", 1)]
                end = at + long * HOUR
                admissions.append(
                    Admission(
                        job_id=who.job_id,
                        dag_id=dag,
                        task_id=who.task_id,
                        run_id=who.run_id,
                        submitted_at=at,
                        decided_at=at + 2,
                        started_at=None if refused else at + chance.choice([8, 12, 30, 400]),
                        decision="rejected" if refused else chance.choice(["admitted"] * 5 + ["renegotiated"]),
                        deadline_at=end + 1800,
                        finished_at=None if refused else end,
                        met=None if refused else not (days == 4 and dag == "fraud_daily"),
                        reason="needs 8 slots before its deadline, and 5 are free" if refused else "fits",
                    )
                )
                if refused:
                    continue
                middle = at + 0.4 * long * HOUR
                more = [(first[0][0], i) for i in range(4)]
                spans += [
                    _span(who, at, middle, first, "starts with 2 workers", 40),
                    _span(who, middle, end, more, "grows from 2 to 4 workers: saves 22 min beyond the pause", 12),
                ]
        for job in self._live():
            admissions.append(
                Admission(
                    job_id=job.job_id,
                    namespace=job.identity.namespace,
                    dag_id=job.identity.dag_id,
                    task_id=job.identity.task_id,
                    run_id=job.identity.run_id,
                    submitted_at=job.submitted_at,
                    decision="admitted",
                    deadline_at=job.deadline_at,
                    started_at=None if not job.slots else job.submitted_at + 20,
                    reason="fits beside all other promises",
                )
            )
            if job.slots:
                spans += self._generations(job)
        return spans, admissions

    def _generations(self, job: JobStatus) -> list[Span]:
        half = max(1, len(job.slots) // 2)
        began = job.submitted_at + 20
        if half == len(job.slots):
            return [_span(job.identity, began, None, job.slots, "starts with 1 worker", 45)]
        grew = self.now - 0.9 * HOUR
        return [
            _span(job.identity, began, grew, job.slots[:half], f"starts with {half} workers", 45),
            _span(job.identity, grew, None, job.slots, f"grows from {half} to {len(job.slots)} workers", 14),
        ]

    def _planned(self) -> list[Span]:
        made = [
            _span(job.identity, self.now, job.projected_finish_at, job.slots, "", 0)
            for job in self._live()
            if job.slots and job.projected_finish_at
        ]
        waiting = identity("vision")
        if waiting.job_id not in self.cancelled:
            start = self.now + 1.9 * HOUR
            made.append(_span(waiting, start, start + 6.5 * HOUR, [("gpu-a", i) for i in range(4)], "", 0))
        return [span.model_copy(update={"generation": None}) for span in made]

    def forecast(self, _told: Any = None) -> ForecastAnswer:
        items = [
            ForecastItem(
                kind="job",
                outcome="at_risk" if job.at_risk and job.job_id not in self.deadlines else "kept",
                task=f"{job.identity.dag_id}.{job.identity.task_id}",
                job_id=job.job_id,
                namespace=job.identity.namespace,
                dag_id=job.identity.dag_id,
                deadline_at=job.deadline_at,
                projected_at=job.projected_finish_at,
                reason="is slower than it was measured" if job.at_risk else "",
            )
            for job in self._live()
        ]
        for hours, dag, outcome in (
            (7, "search_ranker", "kept"),
            (13, "nightly_reviews", "kept"),
            (19, "fraud_daily", "missed"),
        ):
            due = self.now + hours * HOUR
            items.append(
                ForecastItem(
                    kind="expected",
                    outcome=outcome,
                    task=f"{dag}.{TASKS[dag]}",
                    namespace="default",
                    dag_id=dag,
                    due_at=due,
                    deadline_at=due + 4 * HOUR,
                    projected_at=due + 3.4 * HOUR if outcome == "kept" else None,
                    earliest_deadline_at=None if outcome == "kept" else due + 4.6 * HOUR,
                    reason=""
                    if outcome == "kept"
                    else f"{identity('vision').job_id} holds 4 slots until 03:20, so 4 are left for 4 h",
                )
            )
        kept = sum(item.outcome == "kept" for item in items)
        return ForecastAnswer(
            asked_at=self.now,
            until_at=self.now + 24 * HOUR,
            kept=kept,
            not_kept=len(items) - kept,
            missing_slots=2,
            summary=f"{kept} of {len(items)} deadlines will be kept",
            items=items,
        )

    def _what_if(self, told: Any) -> WhatIf:
        before = self.forecast()
        better = told["extra_nodes"] > 0
        items = [i.model_copy(update={"outcome": "kept", "reason": ""}) if better else i for i in before.items]
        after = before.model_copy(
            update={"items": items, "summary": "all will be kept" if better else before.summary, "missing_slots": 0}
        )
        verdicts = []
        for change in told["changes"]:
            job = next(one for one in self.jobs() if one.job_id == change["job_id"])
            fits = change["deadline_at"] is None or change["deadline_at"] >= (job.projected_finish_at or 0)
            verdict = (
                Verdict(decision="admitted", reason="can be kept beside all other promises")
                if fits
                else Verdict(
                    decision="rejected",
                    reason="cannot be kept: all slots are promised until then",
                    earliest_deadline_at=job.projected_finish_at,
                )
            )
            verdicts.append(WhatIfVerdict(job_id=job.job_id, verdict=verdict))
        return WhatIf(verdicts=verdicts, before=before, after=after)

    def _list(self, params: httpx.QueryParams) -> list[JobStatus]:
        """As the service does it: what is asked for is sought first, and only then cut to the limit."""
        found = self.jobs() + self.further
        found = [job for job in found if params.get("state") in (None, str(job.state))]
        found = [job for job in found if params.get("live") in (None, str(not job.state.terminal).lower())]
        for word in params.get("text", "").lower().split():
            found = [
                job for job in found if word in f"{job.identity.dag_id} {job.identity.task_id} {job.state}".lower()
            ]
        for part in ("namespace", "run_id", "task_id", "map_index"):
            found = [job for job in found if params.get(part) in (None, str(getattr(job.identity, part)))]
        dag_ids = params.get_list("dag_id")
        found = [job for job in found if not dag_ids or job.identity.dag_id in dag_ids]
        found.sort(key=lambda job: (-job.submitted_at, job.job_id))
        self.listed.append(dict(params.multi_items()))
        if cursor := params.get("cursor"):
            at, _, job_id = cursor.partition(",")
            found = [job for job in found if (-job.submitted_at, job.job_id) > (-float(at), job_id)]
        return found[: int(params.get("limit", 100))]

    def story(self, job: JobStatus) -> JobStory:
        now = self.cluster()
        why = now.why.get(job.job_id, job.state_reason)
        began = self._generations(job) if job.slots else []
        return JobStory(
            status=job,
            incarnations=1,
            why=why,
            why_names=now.why_names.get(job.job_id, []),
            submission={
                "script": "train.py",
                "args": ["--lr", "3e-4"],
                "steps": 24000,
                "global_batch_size": 256,
                "labels": {"deadline_arithmetic": _ARITHMETIC, "try_number": "1"},
            },
            generations=began,
            planned=[span for span in self._planned() if span.job_id == job.job_id],
            samples=self._samples(job, began[0].from_at if began else None),
            samples_per_s=None if job.steps_per_s is None else 256 * job.steps_per_s,
            noise_scale=1840.0,
            curve=[
                CurvePoint(
                    workers=n, measured_steps_per_s=1.35 * n**0.9 if n < 8 else None, reckoned_steps_per_s=1.34 * n**0.9
                )
                for n in (1, 2, 4, 8)
            ],
            workers=[
                WorkerTimes(
                    worker_id=f"w{rank}",
                    rank=rank,
                    at=self.now,
                    window_steps=50,
                    data_s=1.1 + 0.4 * rank,
                    compute_s=15.2,
                    reduce_s=2.1,
                    wait_s=0.4 + 0.3 * rank,
                    save_s=0.5,
                    memory_bytes=3_400_000_000,
                )
                for rank in range(job.workers)
            ],
            checkpoints=[
                Checkpoint(
                    step=step,
                    generation=2,
                    path=f"generation-2/step-{step}",
                    digest="ab" * 32,
                    size_bytes=440_000_000,
                    at=self.now - (14880 - step) / 3,
                    promoted=step == 14400,
                    status="promoted" if step == 14400 else "kept",
                )
                for step in (9600, 12000, 14400)
            ],
        )

    def _samples(self, job: JobStatus, began: float | None) -> list[Sample]:
        if began is None:
            return []
        chance = random.Random(job.job_id)
        long = self.now - began
        grown = (self.now - 0.9 * HOUR - began) / long
        made = []
        for at in range(160):
            part = at / 159
            workers = job.workers if part >= grown else max(1, job.workers // 2)
            loss = 0.24 + 0.9 * math.exp(-3.2 * part) + chance.gauss(0, 0.012)
            speed = 1.35 * workers**0.9 * chance.uniform(0.96, 1.02)
            made.append(
                Sample(at=began + part * long, step=int(part * job.step), loss=loss, steps_per_s=speed, workers=workers)
            )
        return made

    def _runs(self, job: JobStatus) -> list[RunOfTask]:
        made = []
        for days in range(6):
            this = days == 0
            who = job.identity if this else identity(job.identity.dag_id, f"scheduled__{days}d")
            at = job.submitted_at - days * 24 * HOUR
            samples = [
                Sample(at=60.0 * n, step=n * 200, loss=0.24 + 0.9 * math.exp(-n / 30) + 0.008 * days * math.sin(n / 5))
                for n in range(100 if this else 150 + 4 * days)
            ]
            made.append(
                RunOfTask(
                    job_id=who.job_id,
                    run_id=who.run_id,
                    incarnation=1,
                    state="running" if this else "succeeded",
                    submitted_at=at,
                    started_at=at + 20,
                    finished_at=None if this else at + (2.2 + 0.1 * days) * HOUR,
                    deadline_at=at + 3 * HOUR,
                    met=None if this else days != 4,
                    steps=job.step if this else 24000,
                    final_loss=None if this else 0.24 + 0.003 * days,
                    slot_s=5.5 * HOUR + days * 900,
                    rescales=1 + days % 3,
                    samples=samples,
                )
            )
        return made

    def _events(self, job: JobStatus) -> list[Event]:
        told = [
            ("submitted", "by Airflow, attempt 1"),
            ("admitted", "fits beside all other promises: at most 4 slots are needed"),
            ("resized", f"starts with 2 workers: {FOREIGN.job_id} holds the others"),
            ("started", "2 workers train"),
            ("promoted", "checkpoint of step 9600"),
            (
                "resized",
                "grows from 2 to 4 workers: saves 22 min beyond the pause of 12 s; has the slots that were free",
            ),
            ("promoted", "checkpoint of step 14400"),
        ]
        return [
            Event(
                event_id=n + 1, job_id=job.job_id, incarnation=1, at=job.submitted_at + n * 700, kind=kind, reason=why
            )
            for n, (kind, why) in enumerate(told)
        ]

    def _log(self, offset: int) -> LogPiece:
        text = "".join(f"step {n} loss {0.24 + 0.9 * math.exp(-n / 4000):.4f}\n" for n in range(13000, 14900, 50))
        return LogPiece(text=text[offset:], start_offset=offset, next_offset=len(text), end_of_file=True)


def _by_dag(spans: list[Span], asked: list[Admission], from_at: float, now: float) -> list[DagTotals]:
    made = []
    for namespace, dag_id in sorted({(one.namespace, one.dag_id) for one in (*spans, *asked)}):
        mine = [one for one in asked if (one.namespace, one.dag_id) == (namespace, dag_id)]
        held = [one for one in spans if (one.namespace, one.dag_id) == (namespace, dag_id)]
        waits = [one.started_at - one.submitted_at for one in mine if one.started_at is not None]
        made.append(
            DagTotals(
                namespace=namespace,
                dag_id=dag_id,
                runs=len(mine),
                rejected=sum(one.decision == "rejected" for one in mine),
                judged=sum(one.met is not None for one in mine),
                met=sum(one.met is True for one in mine),
                median_wait_s=median(waits) if waits else None,
                slot_s=sum(one.workers * ((one.until_at or now) - max(from_at, one.from_at)) for one in held),
            )
        )
    return made


def _named(why: Mapping[str, str]) -> dict[str, list[Mention]]:
    """Where sentences name a task by its full name, as the service says it."""
    whose = [EXPECTED, *(identity(dag_id) for dag_id in TASKS)]
    return {
        job_id: [
            Mention(at=found.start(), length=len(found[0]), namespace=who.namespace, dag_id=who.dag_id)
            for who in whose
            for found in re.finditer(rf"\b{who.dag_id}\.{who.task_id}\b", sentence)
        ]
        for job_id, sentence in why.items()
    }


def _span(who: JobIdentity, a: float, b: float | None, slots: Any, reason: str, starting_s: float) -> Span:
    return Span(
        job_id=who.job_id,
        namespace=who.namespace,
        dag_id=who.dag_id,
        task_id=who.task_id,
        run_id=who.run_id,
        generation=1,
        from_at=a,
        running_at=a + starting_s,
        until_at=b,
        workers=len(slots),
        slots=list(slots),
        reason=reason,
    )


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.model_dump(mode="json")
