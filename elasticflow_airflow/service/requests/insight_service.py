"""Answers the pages: the cluster now and over time, the story of a job, and its run next to others of its task.

Runs in the threads of HTTP handlers; reads the store and the scheduler's plans, and changes neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from elasticflow_airflow import bounds
from elasticflow_airflow.api.insight import (
    Admission,
    Checkpoint,
    ClusterHistory,
    ClusterNow,
    CurvePoint,
    DagAsked,
    DagTotals,
    JobStory,
    RunOfTask,
    Sample,
    Span,
    TrainedWith,
    WorkerTimes,
)
from elasticflow_airflow.api.submission import owner_of
from elasticflow_airflow.engines.port import EngineNode
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.service.decisions.foresight import Foresight
from elasticflow_airflow.service.refusal import Refusal, no_such_job
from elasticflow_airflow.service.requests import spans
from elasticflow_airflow.service.requests.reasons import why
from elasticflow_airflow.service.secrets import shown_args
from elasticflow_airflow.service.store.documents.columns import readable
from elasticflow_airflow.service.store.documents.job_documents import Sampling
from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.held_slots import Held, gpu_seconds, holdings, rescales
from elasticflow_airflow.service.store.store import Reader, Store
from elasticflow_airflow.service.store.tables import (
    CandidateRow,
    GenerationRow,
    IncarnationRow,
    JobRow,
    SampleRow,
    WorkerTimesRow,
)
from elasticflow_airflow.service.store.views import UNREADABLE, sentence_of, slot_statuses, status_of, told

MOST_ROWS = 5000
"""The most generations and submissions in a history, the newest ones; its sums include all."""
_MOST_JOBS = 1000
LONGEST_S = 31 * 86400.0


@dataclass(frozen=True, slots=True)
class InsightService:
    """Answers the requests of the pages. ``foresee`` returns the scheduler's plans, and ``nodes`` the nodes.

    ``trained_with`` returns everything that determined the weights of an incarnation with these generations.
    """

    store: Store
    foresee: Callable[[], Foresight | None]
    nodes: Callable[[], tuple[EngineNode, ...]]
    trained_with: Callable[[IncarnationRow, Sequence[GenerationRow]], TrainedWith | None]
    clock: Callable[[], float]

    def cluster(self) -> ClusterNow:
        """Return every slot with the job that holds it, and all live jobs, each with why it has its size or waits."""
        foresight, now = self.foresee(), self.clock()
        with self.store.read() as reader:
            live = reader.list_current(state=None, dag_id=None, live=True, limit=_MOST_JOBS)
            generations = reader.live_generations()
            slots = slot_statuses(self.nodes(), reader)
        keys = _keys(job for job, _ in live)
        said = {row.job_id: sentence_of(_why(row, foresight, keys, now)) for _, row in live}
        return ClusterNow(
            at=now,
            slots=slots,
            jobs=[status_of(job, row, generations.get((row.job_id, row.incarnation), ())) for job, row in live],
            why={job_id: text for job_id, (text, _) in said.items()},
            why_names={job_id: mentions for job_id, (_, mentions) in said.items() if mentions},
        )

    def history(self, from_at: float | None, until_at: float | None, parts: int) -> ClusterHistory:
        """Return past and planned spans and the submissions; by default for the day before and the day after now.

        Raises Refusal 422.
        """
        foresight, now = self.foresee(), self.clock()
        from_at = now - 86400.0 if from_at is None else from_at
        until_at = now + 86400.0 if until_at is None else until_at
        _check_moments(from_at, until_at)
        past_until_at = min(until_at, now + 1.0)
        sums = _Held(from_at, (until_at - from_at) / parts, parts, now)
        with self.store.read() as reader:
            held = reader.generations_between(from_at, past_until_at, MOST_ROWS)
            asked = reader.incarnations_between(from_at, until_at, MOST_ROWS)
            began = reader.began_between(from_at, until_at)
            decided = reader.event_times([said for _, row in asked if (said := _decided_in(row))])
            totals = reader.totals_between(from_at, until_at)
            told = spans.by_job(held)
            all_are_told = len(held) < MOST_ROWS
            if all_are_told:
                for job, generations in told:
                    with suppress(*UNREADABLE):
                        sums.add(job.recurring_key, generations)
            else:
                for recurring_key, holdings in reader.holdings_between(from_at, past_until_at):
                    with suppress(*UNREADABLE):
                        sums.add(recurring_key, holdings)
        found: list[Span] = []
        for job, generations in told:
            with suppress(*UNREADABLE):
                found += spans.spans_of(job, generations)
        admissions: list[Admission] = []
        for job, row in asked:
            with suppress(*UNREADABLE):
                admissions.append(_admission(job, row, began, decided))
        all_are_listed = len(asked) < MOST_ROWS
        return ClusterHistory(
            from_at=from_at,
            until_at=until_at,
            now=now,
            spans=sorted(found, key=lambda span: (span.from_at, span.job_id)),
            planned=[span for span in _planned(asked, foresight, now) if span.from_at < until_at],
            admissions=admissions,
            part_s=sums.part_s,
            held_slot_s=sums.held_s,
            computing_slot_s=sums.computing_s,
            slots=sum(node.slots for node in self.nodes()),
            by_dag=_by_dag(totals, sums.by_dag_s),
            complete=all_are_told and all_are_listed,
            spans_from_at=None if all_are_told else held[0][1].holding_at,
            admissions_from_at=None if all_are_listed else asked[0][1].submitted_at,
        )

    def story(self, job_id: str, incarnation: int | None) -> JobStory:
        """Return everything about one incarnation of a job (None: the current one). Raises Refusal 404, 500."""
        try:
            return self._story(job_id, incarnation)
        except UNREADABLE as error:
            raise Refusal(
                500, "unreadable", f"what is stored of job {job_id!r} cannot be told", "cancel it, and submit it again"
            ) from error

    def _story(self, job_id: str, incarnation: int | None) -> JobStory:
        foresight, now = self.foresee(), self.clock()
        with self.store.read() as reader:
            job, row = _incarnation(reader, job_id, incarnation)
            generations = reader.generations(job_id, row.incarnation)
            samples = reader.samples(job_id, row.incarnation)
            workers = reader.worker_times(job_id, row.incarnation)
            candidates = reader.candidates(job_id, row.incarnation)
            keys = _keys(one for one, _ in reader.list_current(state=None, dag_id=None, live=True, limit=_MOST_JOBS))
        state = None
        if foresight is not None and not row.terminal and row.introduced and row.incarnation == job.incarnation:
            state = foresight.states.get(job_id)
        believed = {} if state is None or state.job.curve is None else dict(state.job.curve.steps_per_s)
        asked, sampling = readable(row.submission), readable(row.sampling) or Sampling()
        told = {} if asked is None else asked.scaling_curve or {}
        sentence, mentions = sentence_of(_why(row, foresight, keys, now))
        return JobStory(
            status=status_of(job, row, generations),
            incarnations=job.incarnation,
            why=sentence,
            why_names=mentions,
            submission=_shown(asked),
            generations=spans.spans_of(job, generations),
            planned=[] if state is None else _planned([(job, row)], foresight, now, expected=False),
            samples=[_sample(one) for one in samples],
            samples_per_s=sampling.samples_per_s,
            noise_scale=sampling.noise_scale,
            curve=_curve(readable(row.speeds) or {}, believed or told),
            workers=_worker_times(workers),
            checkpoints=[_checkpoint(one, row) for one in candidates],
            trained_with=self.trained_with(row, generations),
        )

    def runs(self, job_id: str, limit: int) -> list[RunOfTask]:
        """Return a run and the latest others of the same recurring task, newest first. Raises Refusal 404."""
        now = self.clock()
        with self.store.read() as reader:
            job, row = _incarnation(reader, job_id, None)
            found = reader.runs_of(job.recurring_key, limit)
            if all(one.job_id != job_id for one, _ in found):
                found = [*found[: limit - 1], (job, row)]
            runs: list[RunOfTask] = []
            for one, other in found:
                with suppress(*UNREADABLE):
                    runs.append(_run(reader, one, other, now))
            return runs


@dataclass(slots=True)
class _Held:
    """Sums the slot-seconds held and computed: over equal parts of the time, and by namespace and DAG."""

    from_at: float
    part_s: float
    parts: int
    now: float
    held_s: list[float] = field(init=False)
    computing_s: list[float] = field(init=False)
    by_dag_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held_s, self.computing_s = [0.0] * self.parts, [0.0] * self.parts

    def add(self, recurring_key: str, generations: Sequence[Held]) -> None:
        """Add all generations of one job."""
        held = holdings(generations, self.now)
        spans.add_up(self.held_s, held, self.from_at, self.part_s)
        spans.add_up(self.computing_s, spans.computing(generations, self.now), self.from_at, self.part_s)
        until_at = self.from_at + self.part_s * self.parts
        seconds = sum(max(0.0, min(until, until_at) - max(since, self.from_at)) for since, until in held)
        whose = owner_of(recurring_key)
        self.by_dag_s[whose] = self.by_dag_s.get(whose, 0.0) + seconds


def _by_dag(asked: Sequence[DagAsked], held_s: Mapping[tuple[str, str], float]) -> list[DagTotals]:
    """Combine both sums of each DAG; one without submissions may have held slots until its workers had left."""
    found = {(one.namespace, one.dag_id): one for one in asked}
    for whose in held_s:
        namespace, dag_id = whose
        nothing = DagAsked(namespace=namespace, dag_id=dag_id, runs=0, rejected=0, judged=0, met=0, median_wait_s=None)
        found.setdefault(whose, nothing)
    return [DagTotals(**one.model_dump(), slot_s=held_s.get(whose, 0.0)) for whose, one in sorted(found.items())]


def _why(row: IncarnationRow, foresight: Foresight | None, keys: Mapping[str, str], now: float) -> Reason:
    try:
        return why(row, foresight, keys, now)
    except UNREADABLE:
        return Reason("what is stored of it cannot be read")


def _decided_in(row: IncarnationRow) -> int | None:
    """Return the id of the event of its verdict, or None."""
    verdict = readable(row.verdict)
    event_id = None if verdict is None else verdict.event_id
    return event_id if event_id is not None and bounds.count_problem(event_id) is None else None


def _check_moments(from_at: float, until_at: float) -> None:
    if not (math.isfinite(from_at) and math.isfinite(until_at)) or until_at <= from_at:
        raise Refusal(
            422, "invalid", f"until_at={until_at} is not after from_at={from_at}", "give both in UTC seconds, in order"
        )
    if until_at - from_at > LONGEST_S:
        raise Refusal(
            422,
            "invalid",
            f"from_at={from_at} until until_at={until_at} is {(until_at - from_at) / 86400:.0f} days",
            f"ask for at most {LONGEST_S / 86400:.0f} days at once",
        )


def _incarnation(reader: Reader, job_id: str, incarnation: int | None) -> tuple[JobRow, IncarnationRow]:
    job = reader.job(job_id)
    if job is None:
        raise no_such_job(job_id)
    row = reader.incarnation(job_id, job.incarnation if incarnation is None else incarnation)
    if row is None:
        raise Refusal(
            404,
            "incarnation_not_found",
            f"job {job_id!r} has no incarnation {incarnation}",
            f"they are numbered from 1 to {job.incarnation}",
        )
    return job, row


def _keys(jobs: Iterable[JobRow]) -> dict[str, str]:
    return {job.job_id: job.recurring_key for job in jobs}


def _planned(
    rows: Sequence[tuple[JobRow, IncarnationRow]], foresight: Foresight | None, now: float, *, expected: bool = True
) -> list[Span]:
    if foresight is None:
        return []
    found: list[Span] = []
    for job, row in rows:
        if not row.terminal and row.introduced:
            reserved = foresight.planned.get(row.job_id, ())
            with suppress(*UNREADABLE):
                found += spans.planned_spans(spans.names_of(job), row.incarnation, reserved, now)
    for run, slots in foresight.expected if expected else ():
        namespace, dag_id, task_id, map_index = json.loads(run.task)
        names = {"dag_id": dag_id, "task_id": task_id, "map_index": map_index, "namespace": namespace}
        names |= {"job_id": "", "run_id": ""}
        found += spans.planned_spans(names, 1, slots, now, purpose="expected")
    return sorted(found, key=lambda span: (span.from_at, span.job_id))


def _admission(
    job: JobRow,
    row: IncarnationRow,
    began: Mapping[tuple[str, int], float],
    decided: Mapping[int, float],
) -> Admission:
    names = spans.names_of(job)
    return Admission.model_validate(
        {
            **names,
            "submitted_at": row.submitted_at,
            "decided_at": decided.get(_decided_in(row) or 0),
            "started_at": began.get((row.job_id, row.incarnation)),
            "decision": row.verdict.decision,
            "deadline_at": row.deadline_at,
            "finished_at": row.finished_at,
            "met": None if row.result is None else row.result.met,
            **told(reason=row.verdict.reason),
        }
    )


def _shown(submission: StoredSubmission | None) -> dict[str, Any]:
    """Return a submission without possible secrets: of the environment only names. Empty if it cannot be read."""
    if submission is None:
        return {}
    shown = submission.model_dump(mode="json", exclude={"secret_env": True, "command": {"args_shown"}}, warnings=False)
    shown["command"]["args"] = shown_args(submission.command.args, submission.command.args_shown)
    shown["command"]["env"] = sorted(submission.command.env)
    return shown


def _curve(measured: Mapping[int, float], reckoned: Mapping[int, float]) -> list[CurvePoint]:
    return [
        CurvePoint(workers=size, measured_steps_per_s=measured.get(size), reckoned_steps_per_s=reckoned.get(size))
        for size in sorted({*measured, *reckoned})
    ]


def _worker_times(rows: Sequence[WorkerTimesRow]) -> list[WorkerTimes]:
    """Return the times of the newest generation that has reported; workers that are gone are not part of it."""
    newest = max((row.generation for row in rows), default=0)
    return [
        WorkerTimes.model_validate(
            {"window_steps": 0, **row.window, "worker_id": row.worker_id, "rank": row.rank, "at": row.at}
        )
        for row in rows
        if row.generation == newest
    ]


def _sample(one: SampleRow, since: float = 0.0) -> Sample:
    return Sample(at=one.at - since, step=one.step, loss=one.loss, steps_per_s=one.steps_per_s, workers=one.workers)


def _checkpoint(candidate: CandidateRow, row: IncarnationRow) -> Checkpoint:
    return Checkpoint(
        step=candidate.step,
        generation=candidate.generation,
        path=candidate.path,
        digest=candidate.digest,
        at=candidate.at,
        size_bytes=candidate.size_bytes,
        promoted=row.promoted is not None and row.promoted.path == candidate.path,
        status=candidate.status,
    )


def _run(reader: Reader, job: JobRow, row: IncarnationRow, now: float) -> RunOfTask:
    generations: list[GenerationRow] = reader.generations(row.job_id, row.incarnation)
    started_at = min((g.running_at for g in generations if g.running_at is not None), default=None)
    since = row.submitted_at if started_at is None else started_at
    return RunOfTask(
        job_id=row.job_id,
        run_id=job.identity.run_id,
        incarnation=row.incarnation,
        state=row.state,
        submitted_at=row.submitted_at,
        started_at=started_at,
        finished_at=row.finished_at,
        deadline_at=row.deadline_at,
        met=None if row.result is None else row.result.met,
        steps=row.step,
        final_loss=row.loss,
        slot_s=gpu_seconds(generations, now if row.finished_at is None else row.finished_at),
        rescales=rescales(generations),
        samples=[_sample(one, since) for one in reader.samples(row.job_id, row.incarnation)],
    )
