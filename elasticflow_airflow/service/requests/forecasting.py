"""Answers hypothetical questions: a forecast of all deadlines, and the verdict on a job without submitting it.

Runs in the threads of HTTP handlers, on a copy of the scheduler: neither the store nor the scheduler is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elasticflow_airflow.api import (
    DryRun,
    ForecastAnswer,
    ForecastItem,
    JobIdentity,
    JobSubmission,
    PlannedRun,
    Verdict,
)
from elasticflow_airflow.api.submission import name_of, owner_of
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Reject, Terms, Wait
from elasticflow_airflow.scheduler_core.model.recurring_work import ExpectedRun, Spread
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.outlook.forecast import Forecast, Outcome, Outlook, forecast
from elasticflow_airflow.service.decisions import recurring_runs, task_history
from elasticflow_airflow.service.decisions.lateness import as_asked, passed_already
from elasticflow_airflow.service.decisions.pass_context import costs_from
from elasticflow_airflow.service.decisions.scheduler_job import logical_workers, scheduler_job
from elasticflow_airflow.service.refusal import Refusal, never_fits, wrong_job_id
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.store.documents.job_documents import InPlaceRecord
from elasticflow_airflow.service.store.documents.scheduler_values import plan_to_json
from elasticflow_airflow.service.store.store import Reader, Store
from elasticflow_airflow.service.store.views import told

_HOUR_S = 3600.0
_INSTEAD = {
    "best_effort": "it would train as best effort then, without a promise",
    "wait": "it would wait for capacity then",
    "renegotiate": "nothing up to its latest_deadline can be promised either",
    "late": "nothing up to its latest_deadline can be promised either",
}
"""What happens to a planned run that is missed, by ``on_reject``, unless it fails."""


@dataclass(frozen=True, slots=True)
class ForecastService:
    """Answers both kinds of question. ``scheduler`` returns a copy of the scheduler, or None while there is none."""

    store: Store
    settings: ServiceSettings
    scheduler: Callable[[], Scheduler | None]
    device_type: Callable[[], str]
    clock: Callable[[], float]

    def forecast(self, hours: float, planned: Sequence[PlannedRun] = ()) -> ForecastAnswer:
        """Return the outlook for everything that is due in the next ``hours``, and for the planned runs.

        Raises Refusal 503.
        """
        scheduler, now = self.present(), self.clock()
        until_s = now + hours * _HOUR_S
        with self.store.read() as reader:
            planned_ids, told_at_once = self._take_planned(scheduler, reader, planned, now)
        found = forecast(scheduler, now, until_s)
        with self.store.read() as reader:
            identities = identities_of(reader, (one.job_id for one in found.outlooks))
            told = {one.run_id for one in found.outlooks}
            runs = recurring_runs.expected_runs_of(self.settings, reader)
        replaced = {run.submission.identity.recurring_key for run in planned}
        items = [_planned(_item(one, identities), planned_ids.get(one.run_id)) for one in found.outlooks]
        items += told_at_once
        for run_id, (key, due_at, run) in runs.items():
            if run is None and run_id not in told and due_at <= until_s and key not in replaced:
                items.append(
                    ForecastItem(
                        kind="expected",
                        outcome="unknown",
                        task=name_of(key),
                        namespace=owner_of(key)[0],
                        dag_id=owner_of(key)[1],
                        due_at=due_at,
                        reason="its speed, length or deadline is not known yet: nothing is kept free for it",
                    )
                )
        items.sort(key=lambda item: (item.deadline_at or item.due_at or 0.0, item.task))
        extra = found.extra_nodes
        return ForecastAnswer(
            asked_at=now,
            until_at=until_s,
            kept=sum(item.outcome == "kept" for item in items),
            not_kept=sum(item.outcome in ("at_risk", "missed") for item in items),
            missing_slots=None if extra is None else extra * found.extra_slots,
            summary=_summary(items, found),
            items=items,
        )

    def dry_run(self, job_id: str, submission: JobSubmission) -> DryRun:
        """Return the verdict of admission control on a submission, if it came now. Raises Refusal 422, 503."""
        if submission.identity.job_id != job_id:
            raise wrong_job_id(job_id, submission.identity.job_id)
        scheduler, now = self.present(), self.clock()
        if scheduler.state(job_id) is not None:
            scheduler.handle(ev.JobCancelled(job_id), now)  # it would be superseded
        slots = sum(node.slots for node in scheduler.nodes())
        if submission.min_workers > slots:
            return _refused_at_once(job_id, never_fits(submission.min_workers, slots))
        with self.store.read() as reader:
            job = self._job(reader, job_id, submission, now)
        asked = as_asked(job, submission.on_past_deadline, now)
        if asked is None:
            return _refused_at_once(job_id, str(passed_already(job.deadline_s or now)))
        verdict = _verdict(scheduler, asked, now)
        known = scheduler.state(job_id) is not None
        finish_s = scheduler.projected_finish_s(job_id) if known else None
        return DryRun(
            job_id=job_id,
            verdict=verdict,
            projected_finish_at=None if finish_s is None else finish_s + job.costs.tail_s,
        )

    def _take_planned(
        self, scheduler: Scheduler, reader: Reader, planned: Sequence[PlannedRun], now: float
    ) -> tuple[dict[str, JobSubmission], list[ForecastItem]]:
        """Make a copy of the scheduler expect planned runs; returns these by run id, and items decided without it."""
        keys = {run.submission.identity.recurring_key for run in planned}
        for expected in scheduler.expected_runs():
            if expected.task in keys:
                scheduler.handle(ev.RunForgotten(expected.run_id), now)
        slots = sum(node.slots for node in scheduler.nodes())
        ids: dict[str, JobSubmission] = {}
        items: list[ForecastItem] = []
        for planned_run in planned:
            identity = planned_run.submission.identity
            job = self._job(reader, identity.job_id, planned_run.submission, now)
            deadline_s = planned_run.submission.deadline_at
            assert deadline_s is not None  # checked when the request was parsed
            too_large = slots and planned_run.submission.min_workers > slots
            if too_large or job.curve is None or job.total_steps is None or deadline_s <= planned_run.due_at:
                items.append(_told_at_once(planned_run, job, deadline_s, slots))
                continue
            run = ExpectedRun(
                run_id=f"planned {identity.recurring_key}@{planned_run.due_at:.3f}",
                task=identity.recurring_key,
                due_s=planned_run.due_at,
                deadline_after_s=deadline_s - planned_run.due_at,
                steps=Spread((job.total_steps,)),
                curve=job.curve,
                costs=job.costs,
                min_workers=job.min_workers,
                max_workers=job.max_workers,
                latest_s=job.latest_deadline_s if job.on_reject.takes_later else None,
                speed_sigma=job.speed_sigma,
                speed_sigmas=job.speed_sigmas,
            )
            ids[run.run_id] = planned_run.submission
            scheduler.handle(ev.RunExpected(run), now)
        return ids, items

    def present(self) -> Scheduler:
        """Return a copy of the present scheduler. Raises Refusal 503."""
        scheduler = self.scheduler()
        if scheduler is None:
            raise Refusal(503, "no_answer_yet", "the scheduler is not there yet", "ask again in a moment")
        return scheduler

    def _job(self, reader: Reader, job_id: str, submission: JobSubmission, now: float) -> Job:
        """Return the job as the loop would submit it to the scheduler."""
        shares = logical_workers(submission)
        key = submission.identity.recurring_key
        past = task_history.past_of(
            reader.history(key, task_history.signature_of(submission, self.device_type(), shares))
        )
        speeds = task_history.speeds_to_plan_with(submission.scaling_curve, past.measured)
        steps = task_history.length_of(submission.length, submission.global_batch_size, past)
        task = reader.recurring_task(key)
        expected = task is not None and any(due - recurring_runs.POLICY.early_s <= now for due in task.due)
        return scheduler_job(
            submission,
            past,
            self.settings.scheduler_config(),
            job_id=job_id,
            submitted_at=now,
            deadline_at=None if submission.best_effort else submission.deadline_at,
            value=submission.value,
            steps=steps,
            speeds=speeds,
            costs=costs_from(self.settings, past.costs, InPlaceRecord()),
            shares=shares,
            task=key if expected else "",
        )


def _planned(item: ForecastItem, submission: JobSubmission | None) -> ForecastItem:
    """Add to the item of a planned run what its author chose for a miss; other items are unchanged."""
    if submission is None:
        return item
    instead = _INSTEAD.get(submission.on_reject, "") if item.outcome == "missed" else ""
    reason = f"{item.reason}; {instead}" if instead else item.reason
    return item.model_copy(update={"planned": True, "reason": reason})


def _told_at_once(planned: PlannedRun, job: Job, deadline_s: float, slots: int) -> ForecastItem:
    """Return the item of a planned run that can be answered without looking at the cluster's other jobs."""
    identity, least = planned.submission.identity, planned.submission.min_workers
    if slots and least > slots:
        outcome, reason = "missed", f"{never_fits(least, slots)}: it would be refused then"
    elif deadline_s <= planned.due_at:
        outcome, reason = "missed", "its deadline is not later than it is due"
    else:
        missing = "speed" if job.curve is None else "length"
        remedy = "scaling_curve=" if job.curve is None else "steps=, or samples= with epochs="
        outcome, reason = "unknown", f"its {missing} is not known: let it run once, or give {remedy}"
    return ForecastItem.model_validate(
        {
            "kind": "expected",
            "outcome": outcome,
            "task": name_of(identity.recurring_key),
            "planned": True,
            "namespace": identity.namespace,
            "dag_id": identity.dag_id,
            "due_at": planned.due_at,
            "deadline_at": deadline_s,
            "reason": reason,
        }
    )


def _refused_at_once(job_id: str, reason: str) -> DryRun:
    return DryRun(job_id=job_id, verdict=Verdict(decision="rejected", reason=reason))


def _verdict(scheduler: Scheduler, job: Job, now: float) -> Verdict:
    for decision in scheduler.handle(ev.JobSubmitted(job), now):
        match decision:
            case Admit(job_id=job.job_id):
                terms = {Terms.DEADLINE: "admitted", Terms.BEST_EFFORT: "best_effort"}
                return Verdict.model_validate(
                    {
                        "decision": terms.get(decision.terms, "renegotiated"),
                        **told(reason=decision.reason),
                        "deadline_at": decision.deadline_s,
                        "plan": plan_to_json(decision.plan),
                    }
                )
            case Reject(job_id=job.job_id):
                return Verdict(
                    decision="rejected",
                    **told(reason=decision.reason),
                    deadline_at=job.deadline_s,
                    earliest_deadline_at=decision.earliest_deadline_s,
                )
            case Wait(job_id=job.job_id):
                return Verdict(decision="undecided", **told(reason=decision.reason), deadline_at=job.deadline_s)
    reason = "its speed is not known yet: it would be measured first, and decided on then; or give scaling_curve="
    return Verdict(decision="undecided", reason=reason, deadline_at=job.deadline_s)


def identities_of(reader: Reader, job_ids: Iterable[str]) -> dict[str, JobIdentity]:
    """Return the identities of jobs, by id; unknown and empty ids are left out."""
    jobs = (reader.job(job_id) for job_id in job_ids if job_id)
    return {job.job_id: job.identity for job in jobs if job is not None}


def whose(job_id: str, key: str, identities: Mapping[str, JobIdentity]) -> tuple[str, str | None, str | None]:
    """Return task, namespace and DAG of a job, or, with an empty id, of an expected run of the task ``key``."""
    if not job_id:
        return name_of(key), *owner_of(key)
    known = identities.get(job_id)
    if known is None:
        return job_id, None, None
    return name_of(known.recurring_key), known.namespace, known.dag_id


def _item(one: Outlook, identities: Mapping[str, JobIdentity]) -> ForecastItem:
    task, namespace, dag_id = whose(one.job_id, one.task, identities)
    return ForecastItem(
        kind="job" if one.job_id else "expected",
        outcome=one.outcome.value,
        task=task,
        job_id=one.job_id or None,
        namespace=namespace,
        dag_id=dag_id,
        due_at=one.due_s,
        deadline_at=one.deadline_s,
        probability=one.probability,
        projected_at=one.projected_s,
        earliest_deadline_at=one.earliest_deadline_s,
        reason=str(one.reason),
    )


def _summary(items: list[ForecastItem], found: Forecast) -> str:
    """Return the summary as one sentence."""
    if not items:
        return "nothing with a deadline is due"
    bad = [item for item in items if item.outcome in (Outcome.AT_RISK.value, Outcome.MISSED.value)]
    unknown = sum(item.outcome in ("unknown", Outcome.UNDECIDED.value) for item in items)
    rest = f"; {unknown} cannot be predicted yet" if unknown else ""
    later = sum(item.outcome == "kept" and item.earliest_deadline_at is not None for item in items)
    rest = (f"; {later} by a later deadline, as they allow" if later else "") + rest
    if not bad:
        return f"all {len(items) - unknown} will be kept{rest}"
    if found.extra_nodes is None:
        missing = "no number of further nodes that was tried would keep them all"
    else:
        nodes = "node" if found.extra_nodes == 1 else "nodes"
        missing = f"{found.extra_nodes} more {nodes} of {found.extra_slots} slots would keep them all"
    return f"{len(bad)} of {len(items) - unknown} will not be kept: {missing}, or the deadlines that are named{rest}"
