"""A service's answers about a plausible week on two nodes, for the page's tests: made up, but always the same.

``ScriptedCluster.answer`` takes a request and gives a status and a JSON value; it remembers what was asked of it. All
answers tell of one course of events: see ``support.scripted_course``.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from support.scripted_course import COURSES, GPU_A, GPU_B, HOUR, Course, PastRun, loss_at, past_runs, steps_per_s

SLOTS = [*GPU_A, *GPU_B]
START_S = 40.0
TASKS = {"nightly_reviews": "train", "fraud_daily": "finetune", "search_ranker": "train", "vision": "backbone"}
HIDDEN = JobIdentity(dag_id="payroll", run_id="scheduled__today", task_id="train")
FOREIGN = JobIdentity(namespace="elsewhere", dag_id="fraud_daily", run_id="scheduled__today", task_id="finetune")
EXPECTED = JobIdentity(namespace="elsewhere", dag_id="secretteam_eu", run_id="", task_id="retrain")
"""Of another Airflow, and due: no list of jobs tells of it."""

_ARITHMETIC = """Deadline:
  task 'publish' must end by  {due}  (deadline='{time}')
  minus what comes after      18 min                    (p95 of the last 14 runs (12 min to 19 min))
  the training must end by    {end}"""


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
            return 200, _plain(self._log(job, int(params.get("offset", 0))))
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
            self._running("nightly_reviews", 0.7),
            self._running("fraud_daily", 0.25),
            self._running("search_ranker", -0.2, at_risk=True),
            self._waiting("vision"),
            self._ended("nightly_reviews", 1),
            self._ended("fraud_daily", 1),
            self._refused("search_ranker"),
        ]
        hidden = self._running(HIDDEN.dag_id, 0.7).model_copy(update={"job_id": HIDDEN.job_id, "identity": HIDDEN})
        foreign = made[1].model_copy(update={"job_id": FOREIGN.job_id, "identity": FOREIGN, "slots": [], "workers": 0})
        return [
            job.model_copy(update={"state": State.CANCELLED, "workers": 0}) if job.job_id in self.cancelled else job
            for job in (*made, hidden, foreign)
        ]

    def _running(self, dag: str, slack_h: float, *, at_risk: bool = False) -> JobStatus:
        course = COURSES[dag]
        steps = (int(course.done), course.steps)
        return self._job(dag, list(course.held), steps, course.until_h, slack_h, at_risk=at_risk)

    def _job(
        self, dag: str, slots: Any, steps: tuple[int, int], left_h: float, slack_h: float, *, at_risk: bool = False
    ) -> JobStatus:
        """A job that has made ``steps[0]`` of its ``steps[1]`` steps."""
        who = identity(dag)
        workers = len(slots)
        finish = self.now + left_h * HOUR
        deadline = self.deadlines.get(who.job_id, finish + slack_h * HOUR)
        return JobStatus(
            job_id=who.job_id,
            identity=who,
            incarnation=1,
            generation=3,
            state=State.RUNNING,
            state_reason=f"holds {counted(workers, 'slot')} beside {HIDDEN.job_id}",
            verdict=Verdict(decision="admitted", reason="fits beside all other promises"),
            claim=2,
            submitted_at=self.now - 1.7 * HOUR,
            deadline_at=deadline,
            best_effort=False,
            value=1.0,
            workers=workers,
            slots=slots,
            logical_workers=8,
            step=steps[0],
            total_steps=steps[1],
            loss=round(loss_at(steps[0] / steps[1]), 4),
            steps_per_s=round(steps_per_s(workers), 2),
            projected_finish_at=finish,
            slack_s=deadline - finish,
            at_risk=at_risk,
            log_names=["w0", "w1"],
            last_event_id=9,
        )

    def _waiting(self, dag: str) -> JobStatus:
        who = identity(dag)
        course = COURSES[dag]
        job = self._job(dag, [], (0, course.steps), course.until_h, 1.2)
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
        found = (run for run in past_runs() if run.dag == dag and run.days == days)
        run = next(found, PastRun(dag=dag, days=days, begins_h=-24.0 * days - 3.0, lasts_h=3.0, slots=GPU_A))
        who = identity(dag, run.run_id)
        result = JobResult(
            steps=run.steps,
            final_loss=round(loss_at(1.0), 4),
            finished_at=self.now + run.ends_h * HOUR,
            met=run.met,
            slack_s=run.slack_h * HOUR,
            gpu_seconds=run.slot_h * HOUR,
        )
        changes = {
            "job_id": who.job_id,
            "identity": who,
            "state": State.SUCCEEDED,
            "submitted_at": self.now + run.begins_h * HOUR,
            "deadline_at": self.now + run.due_h * HOUR,
            "result": result,
            "state_reason": f"all {run.steps} steps are done",
        }
        return self._job(dag, [], (run.steps, run.steps), 0.0, 0.4).model_copy(update=changes)

    def _refused(self, dag: str) -> JobStatus:
        who = identity(dag, "manual__1d")
        reason = "needs 8 slots for 2 h before its deadline, and 5 are free; 40 min later is feasible"
        changes = {
            "job_id": who.job_id,
            "identity": who,
            "state": State.REJECTED,
            "step": 0,
            "state_reason": reason,
            "submitted_at": self.now - 21 * HOUR,
            "deadline_at": self.now - 19 * HOUR,
            "projected_finish_at": None,
            "slack_s": None,
            "verdict": Verdict(decision="rejected", reason=reason, earliest_deadline_at=self.now - 19 * HOUR + 2400.0),
        }
        return self._job(dag, [], (0, 20_000), 0.0, 0.0).model_copy(update=changes)

    def _unowned(self, _told: Any = None) -> list[UnownedJob]:
        why = "no client has asked for it"
        lost = [job for job in self.jobs() if job.identity in (HIDDEN, identity("vision"))]
        return [UnownedJob(job=job, since_at=self.now - 600.0, why=why) for job in lost]

    def _live(self) -> list[JobStatus]:
        return [job for job in self.jobs() if not job.state.terminal]

    def cluster(self, _told: Any = None) -> ClusterNow:
        live = self._live()
        holder = {tuple(slot): job.job_id for job in live for slot in job.slots}
        then = self.clock(COURSES["nightly_reviews"].until_h)
        why = {
            identity("nightly_reviews").job_id: (
                "Holds 4 slots until it ends, as its deadline leaves no room for fewer."
            ),
            identity("fraud_daily").job_id: (
                f"holds 2 slots until {then}, then 4: secretteam_eu.retrain and nightly_reviews.train need them"
            ),
            identity("search_ranker").job_id: "holds 1 slot until it ends, as payroll.train needs the others",
            identity("vision").job_id: "Waits until nightly_reviews ends, then starts with 4: its deadline is far off.",
        }
        slots = [SlotStatus(node_id=n, index=i, job_id=holder.get((n, i))) for n, i in SLOTS]
        return ClusterNow(at=self.now, slots=slots, jobs=live, why=why, why_names=_named(why))

    def clock(self, hours: float) -> str:
        """What a clock shows so many hours from now."""
        return time.strftime("%H:%M UTC", time.gmtime(self.now + hours * HOUR))

    def _health(self, _told: Any = None) -> Health:
        return Health(
            status="ok",
            version="0.1.0",
            engine="local",
            pid=1,
            started_at=self.now - 9 * 24 * HOUR,
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
        spans: list[Span] = []
        admissions: list[Admission] = []
        for run in past_runs():
            who = identity(run.dag, run.run_id)
            submitted_at = self.now + run.begins_h * HOUR
            admissions.append(
                Admission(
                    job_id=who.job_id,
                    dag_id=run.dag,
                    task_id=who.task_id,
                    run_id=who.run_id,
                    submitted_at=submitted_at,
                    decided_at=submitted_at + 2,
                    started_at=None if run.refused else submitted_at + run.waits_s + START_S,
                    decision=run.decision,
                    deadline_at=self.now + run.due_h * HOUR,
                    finished_at=None if run.refused else self.now + run.ends_h * HOUR,
                    met=None if run.refused else run.met,
                    reason="needs 8 slots before its deadline, and 5 are free" if run.refused else "fits",
                )
            )
            if not run.refused:
                spans += self._spans(who, run.course)
        for job in (*self._live(), *(job for job in self.jobs() if job.state is State.REJECTED)):
            admissions.append(
                Admission(
                    job_id=job.job_id,
                    namespace=job.identity.namespace,
                    dag_id=job.identity.dag_id,
                    task_id=job.identity.task_id,
                    run_id=job.identity.run_id,
                    submitted_at=job.submitted_at,
                    decision=job.verdict.decision if job.verdict else "admitted",
                    deadline_at=job.deadline_at,
                    started_at=self._started_at(job),
                    reason=job.verdict.reason if job.verdict else "",
                )
            )
            if job.slots:
                spans += self._generations(job)
        return spans, admissions

    def _started_at(self, job: JobStatus) -> float | None:
        """When its first workers trained."""
        return self._generations(job)[0].running_at if job.slots else None

    def _generations(self, job: JobStatus) -> list[Span]:
        return self._spans(job.identity, self._course(job))

    def _course(self, job: JobStatus) -> Course:
        """That of its DAG; a job that has none holds its slots since it was submitted."""
        known = COURSES.get(job.identity.dag_id)
        if known is not None and job.identity.namespace != FOREIGN.namespace:
            return known
        since_h = (job.submitted_at - self.now) / HOUR
        until_h = ((job.projected_finish_at or self.now) - self.now) / HOUR
        return Course(past=((since_h, tuple(job.slots)),), plan=((until_h, tuple(job.slots)),))

    def _spans(self, who: JobIdentity, course: Course) -> list[Span]:
        made = []
        for number, (from_h, until_h, slots) in enumerate(course.generations):
            before = len(course.generations[number - 1][2])
            saved = "saves 22 min beyond the pause of 12 s; has the slots that were free"
            reason = f"grows from {before} to {counted(len(slots), 'worker')}: {saved}"
            if number == 0:
                reason = f"starts with {counted(len(slots), 'worker')}"
            began, end = self.now + from_h * HOUR, None if until_h >= 0.0 else self.now + until_h * HOUR
            made.append(_span(who, began, end, slots, reason, 12 if number else START_S))
        return made

    def _planned(self) -> list[Span]:
        made = []
        for job in self._live():
            if not job.slots and job.identity.dag_id != "vision":
                continue
            course, from_h = self._course(job), 0.0
            for until_h, slots in course.plan:
                if slots:
                    a, b = self.now + from_h * HOUR, self.now + until_h * HOUR
                    made.append(_span(job.identity, a, b, slots, "", 0))
                from_h = until_h
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
                    else f"{identity('search_ranker').job_id} is expected to hold 4 slots then: 4 are left for 4 h",
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
        saved = _saved(job)
        return JobStory(
            status=job,
            incarnations=1,
            why=why,
            why_names=now.why_names.get(job.job_id, []),
            submission={
                "script": "train.py",
                "args": ["--lr", "3e-4"],
                "steps": job.total_steps,
                "global_batch_size": 256,
                "labels": {"deadline_arithmetic": self._arithmetic(job.deadline_at or self.now), "try_number": "1"},
            },
            generations=began,
            planned=[span for span in self._planned() if span.job_id == job.job_id],
            samples=self._samples(job) if job.slots else [],
            samples_per_s=None if job.steps_per_s is None else 256 * job.steps_per_s,
            noise_scale=1840.0,
            curve=[
                CurvePoint(
                    workers=n,
                    measured_steps_per_s=steps_per_s(n) if n < 8 else None,
                    reckoned_steps_per_s=0.99 * steps_per_s(n),
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
                    at=self.now + self._course(job).hour_of(step) * HOUR,
                    promoted=step == saved[-1],
                    status="promoted" if step == saved[-1] else "kept",
                )
                for step in saved
            ],
        )

    def _arithmetic(self, end_at: float) -> str:
        end, due = time.gmtime(end_at), time.gmtime(end_at + 18 * 60)
        shown = "%a %Y-%m-%d %H:%M UTC"
        return _ARITHMETIC.format(
            due=time.strftime(shown, due), time=time.strftime("%H:%M", due), end=time.strftime(shown, end)
        )

    def _samples(self, job: JobStatus) -> list[Sample]:
        return [
            Sample(
                at=self.now + one.at_h * HOUR,
                step=one.step,
                loss=one.loss,
                steps_per_s=one.steps_per_s,
                workers=one.workers,
            )
            for one in self._course(job).measured(160, job.total_steps or 1, job.job_id)
        ]

    def _runs(self, job: JobStatus) -> list[RunOfTask]:
        past = [run for run in reversed(past_runs()) if run.dag == job.identity.dag_id]
        past = past or [replace(run, dag=job.identity.dag_id) for run in past_runs() if run.dag == "nightly_reviews"]
        if any(run.run_id == job.identity.run_id for run in past):
            return [self._run(run) for run in past][:6]
        course = self._course(job) if job.slots else Course()
        this = RunOfTask(
            job_id=job.job_id,
            run_id=job.identity.run_id,
            incarnation=1,
            state="running" if job.slots else str(job.state),
            submitted_at=job.submitted_at,
            started_at=self._started_at(job),
            finished_at=None,
            deadline_at=job.deadline_at,
            met=None,
            steps=job.step,
            final_loss=None,
            slot_s=course.held_slot_h * HOUR,
            rescales=max(0, len(course.past) - 1),
            samples=[
                sample.model_copy(update={"at": sample.at - job.submitted_at})
                for sample in (self._samples(job) if job.slots else [])
            ],
        )
        return [this, *(self._run(run) for run in past)][:6]

    def _run(self, run: PastRun) -> RunOfTask:
        who, submitted_at = identity(run.dag, run.run_id), self.now + run.begins_h * HOUR
        samples = [
            Sample(at=(one.at_h - run.begins_h) * HOUR, step=one.step, loss=one.loss)
            for one in run.course.measured(150, run.steps, who.job_id)
        ]
        ran = not run.refused
        return RunOfTask(
            job_id=who.job_id,
            run_id=who.run_id,
            incarnation=1,
            state="succeeded" if ran else "rejected",
            submitted_at=submitted_at,
            started_at=submitted_at + run.waits_s + START_S if ran else None,
            finished_at=self.now + run.ends_h * HOUR if ran else None,
            deadline_at=self.now + run.due_h * HOUR,
            met=run.met if ran else None,
            steps=run.steps if ran else 0,
            final_loss=round(loss_at(1.0) + 0.002 * run.days, 4) if ran else None,
            slot_s=run.slot_h * HOUR if ran else 0.0,
            rescales=1 if ran else 0,
            samples=samples if ran else [],
        )

    def _events(self, job: JobStatus) -> list[Event]:
        course, saved = self._course(job), _saved(job)
        decided = ("admitted", "fits beside all other promises: at most 4 slots are needed")
        if job.state is State.REJECTED:
            decided = ("rejected", job.state_reason)
        told = [(job.submitted_at, "submitted", "by Airflow, attempt 1"), (job.submitted_at + 2.0, *decided)]
        for span in self._spans(job.identity, course) if job.slots else ():
            is_first = span.from_at <= job.submitted_at + HOUR / 60
            reason = f"{span.reason}: {FOREIGN.job_id} holds the others" if is_first else span.reason
            told.append((span.from_at, "resized", reason))
            if is_first:
                told.append((span.running_at or span.from_at, "started", f"{counted(span.workers, 'worker')} started"))
        told += [(self.now + course.hour_of(step) * HOUR, "promoted", f"checkpoint of step {step}") for step in saved]
        return [
            Event(event_id=n + 1, job_id=job.job_id, incarnation=1, at=at, kind=kind, reason=why)
            for n, (at, kind, why) in enumerate(sorted(told))
        ]

    def _log(self, job: JobStatus, offset: int) -> LogPiece:
        steps = range(max(0, job.step - 2000), job.step, 50)
        text = "".join(f"step {n} loss {loss_at(n / (job.total_steps or 1)):.4f}\n" for n in steps)
        return LogPiece(text=text[offset:], start_offset=offset, next_offset=len(text), end_of_file=True)


def counted(number: int, what: str) -> str:
    """``1 slot``, ``2 slots``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def _saved(job: JobStatus) -> list[int]:
    """The steps of the checkpoints that are kept."""
    return list(range(2400, job.step + 1, 2400))[-3:] if job.slots else []


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
