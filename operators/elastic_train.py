"""The operator that runs an Airflow task as an elastic training job with a deadline, and waits for it.

It submits the job, waits in the way that suits its executor, and returns a small JSON value. It never holds a GPU and
never imports torch. It talks to the service only through the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, time, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    TaskDeferralError,
    TaskDeferralTimeout,
)

from elasticflow_airflow.api import Attachment, JobStatus, State
from elasticflow_airflow.api.training_options import OPTIONS, TEMPLATE_FIELDS
from elasticflow_airflow.client import (
    PASSING,
    ElasticFlowClient,
    ElasticFlowError,
    InvalidSubmission,
    JobNotFound,
    ServiceUnavailable,
    SnapshotError,
    StaleClaim,
)
from elasticflow_airflow.deadlines.clock import now_s
from elasticflow_airflow.deadlines.dag_deadline import alerts_of, check_time_from_dag, dag_of
from elasticflow_airflow.deadlines.parse import DeadlineError, zone_name
from elasticflow_airflow.exceptions import (
    JobCancelled,
    JobFailed,
    JobRejected,
    JobTakenOver,
    ServiceAway,
    ServiceRefused,
    as_task_error,
)
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.links import ElasticFlowJobLink
from elasticflow_airflow.settings import AirflowSettings, deferrable_by_default
from elasticflow_airflow.task.alarms import RiskAlarm, describe, remember
from elasticflow_airflow.task.arguments import ArgumentError, check_arguments, present
from elasticflow_airflow.task.callables import listed, reveal
from elasticflow_airflow.task.lineage import ReportsLineage
from elasticflow_airflow.task.mapping import checked
from elasticflow_airflow.task.on_promote import carry, promote
from elasticflow_airflow.task.outcome_messages import (
    cancel_message,
    failure_message,
    rejection_message,
    result_of,
    success_line,
)
from elasticflow_airflow.task.run_deadline import ended_jobs
from elasticflow_airflow.task.submitting import InFlight, acknowledge_for_clear, attach_for_retry
from elasticflow_airflow.task.task_submission import Prepared, RunFacts, check_downstream, prepare, run_facts
from elasticflow_airflow.task.telemetry import count_ended, count_submitted
from elasticflow_airflow.times import duration
from elasticflow_airflow.triggers import ElasticFlowJobTrigger
from elasticflow_airflow.waiting.killing import KILL_WITHIN_S, Kill, come_back
from elasticflow_airflow.waiting.leased_jobs import LeasedJob, lease_renewer
from elasticflow_airflow.waiting.outages import Outage
from elasticflow_airflow.waiting.task_memory import TaskMemory
from elasticflow_airflow.waiting.worker_wait import JobWatch

if TYPE_CHECKING:
    from airflow.sdk.definitions.mappedoperator import OperatorPartial

_ANSWER_WITHIN_S = 60.0
"""How long a worker waits for an unavailable service before it releases its slot."""
_AWAY_PAUSE_S = 30.0
"""How long the task is then rescheduled for."""
_MAX_BREAKDOWNS = 3
"""How often a trigger may break in one attempt (for example, fail to load) before the attempt fails."""


class ElasticTrainOperator(ReportsLineage, BaseOperator):
    """Train by a deadline; the service decides with how many workers, and changes that while the training runs.

    Give what to train (``script`` or ``module``), how much (``steps``, or ``epochs`` of ``samples``, else as the script
    itself says), and by when: ``deadline``, ``deadline_of`` or both, or ``best_effort=True``. With ``deadline_of`` the
    training must end earlier than its target, by what recent runs took from the one end to the other. Assets among
    ``outlets`` carry the checkpoint in their event.

    :param script: Training script, relative to the DAG file's folder (then to the bundle's root), or absolute. Give
        this or ``module``.
    :param module: Module to run, like ``package.train``. It is found on the worker's Python path, and not imported
        there.
    :param script_args: List of arguments, one element each. Numbers become text. Every user of the machine can see them
        in the process list: pass secrets with ``secret_env``. The page shows ``***`` for what Airflow masks, and for
        the values of options like ``--token``.
    :param env: Environment variables. Rendered fields are shown in Airflow's UI: no secrets here.
    :param secret_env: Name to ``"conn:<connection id>.<field>"``; ``<field>`` is ``password``, ``login``, ``host``,
        ``schema``, ``port`` or ``extra.<key>``. Read at submit, stored encrypted, erased when the job ends, never
        logged. Not a template field.
    :param working_dir: Where the script runs. Relative: from the DAG file's folder.
    :param python: Interpreter. It needs torch, and nothing of this project.
    :param requirements: Packages beside those of the interpreter: a list like ``["accelerate==1.2.3"]``, or a
        requirements file (relative: from the DAG file's folder). They are installed by uv, once on each machine, before
        the training gets any slots.
    :param init_from: ``"latest"``: start from the weights of this task's last success; or the folder of a checkpoint. A
        template that renders to an empty text: from scratch.
    :param steps: Optimizer steps in all. Not beside ``epochs`` or ``samples``.
    :param epochs: Epochs, if there are no ``steps``. With neither, the script's own length counts
        (``session.epochs(4)``, ``num_train_epochs=4``, ``max_epochs=4``); a script that has none, but a loop of its own
        over the loader, ends with an error before its first step. With ``samples`` alone, one epoch.
    :param samples: Samples of one epoch. Without it the training must use our sampler, which reports it.
    :param global_batch_size: Samples of one optimizer step, over all workers. It never changes.
    :param target_loss: End the training, as a success, as soon as the smoothed loss (mean of about the last 32 steps)
        reaches this value. Give ``steps`` or ``epochs`` as well: they are the maximum length, and the promise is based
        on it. For scripts that use the session, the Trainer or Lightning.
    :param deadline: Time of day in the DAG's time zone, duration after the run is due, datetime, or text of either.
    :param deadline_of: Whose deadline that is: the id of a downstream task, or ``"dag_run"``. Without ``deadline``, the
        time comes from the DAG: its earliest ``DeadlineAlert`` that a worker can evaluate, else its next run.
    :param downstream_reserve: With ``deadline_of``: the time to reserve between the end of training and the end of that
        target, until earlier runs have shown how long this takes.
    :param best_effort: No deadline: train on what the others leave. A job has a deadline or is best effort.
    :param value: Weight of this job against others, where not all fit; greater than 0, without a unit.
    :param on_reject: When the deadline cannot be promised: ``"fail"``: fail at once, without retries, and name the
        earliest feasible deadline; ``"best_effort"``: train without a deadline; ``"wait"``: wait for capacity;
        ``"renegotiate"``: accept a later deadline, up to ``latest_deadline``; ``"late"``: the same, but the job's
        ``value`` falls linearly to zero until then.
    :param latest_deadline: Only with ``on_reject="renegotiate"`` or ``"late"``; the same forms as ``deadline``.
    :param on_past_deadline: When the deadline (or ``latest_deadline``, if given) has passed before the job is
        submitted. ``"auto"``: train as best effort in backfills, cleared tasks and runs that began after the deadline
        (such as the first after unpausing), else fail. ``"fail"``: fail. ``"best_effort"``: train as best effort. For a
        retry of a job that was admitted already, ``on_miss`` decides, except in a backfill or after a clear.
    :param on_miss: When a running job misses its deadline after all. ``"finish"``: it trains on, and the task succeeds
        late. ``"fail"``: it stops, and the task fails. ``"use_last_checkpoint"``: it stops, and the task succeeds with
        the last checkpoint.
    :param min_workers: Never fewer workers than this: a power of two.
    :param max_workers: Never more: a power of two.
    :param consistency: The trained model does not depend on how many workers there were. ``"fast"``: plain
        data-parallel training, whose result does.
    :param logical_workers: Consistent mode: into how many shares every step is cut, whatever the number of workers. A
        power of two that divides ``global_batch_size``; there are never more workers. Default, on every cluster and
        without one: 8, or ``max_workers`` if that is more, or the largest power of two below that divides the batch. A
        retry that resumes keeps it.
    :param seed: Of all that is random in the training: the first weights, the order of samples, dropout.
    :param scaling_curve: Workers to optimizer steps per second, like ``{1: 2.0, 2: 3.8}``: no profiling.
    :param progress_regex: How to read the step, and the loss, in the lines of a script that knows nothing of this
        library; it also needs ``steps``.
    :param progress_file: Or the file that such a script writes its step into.
    :param on_at_risk: Functions, notifiers or import paths, one or a list, called with Airflow's context each time the
        job comes to be at risk of missing its deadline.
    :param on_promote: A function or import path, called after a success. Its parameters decide what it gets:
        ``result``, ``checkpoint_path``, and entries of Airflow's context.
    :param deferrable: Wait in the triggerer. ``False`` blocks a worker slot. Under ``dag.test()`` a deferrable task is
        rescheduled instead, so that several jobs are in flight.
    :param elasticflow_conn_id: Connection of the service. Where the *default* one is missing, the embedded service of
        this machine is used.

    Returns a dict: job_id, verdict, deadline, finished_at, slack_s, met, steps, final_loss, checkpoint_path,
    checkpoint_digest, gpu_seconds, rescales, metrics. Raises ArgumentError and DeadlineError at DAG parse for what can
    be known then.
    """

    template_fields: Sequence[str] = TEMPLATE_FIELDS
    template_fields_renderers = {"script_args": "json", "env": "json", "requirements": "json"}  # noqa: RUF012 - Airflow's declaration
    ui_color = "#dff2e4"
    operator_extra_links = (ElasticFlowJobLink(),)

    def __init__(
        self,
        *,
        script: str | None = None,
        module: str | None = None,
        script_args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
        secret_env: Mapping[str, str] | None = None,
        working_dir: str | None = None,
        python: str | None = None,
        requirements: str | Sequence[str] | None = None,
        init_from: str | None = None,
        steps: int | str | None = None,
        epochs: int | str | None = None,
        samples: int | str | None = None,
        global_batch_size: int | str,
        target_loss: float | str | None = None,
        deadline: str | time | timedelta | datetime | None = None,
        deadline_of: str | None = None,
        downstream_reserve: timedelta = timedelta(minutes=5),
        best_effort: bool = False,
        value: float = 1.0,
        on_reject: str = "fail",
        latest_deadline: str | time | timedelta | datetime | None = None,
        on_past_deadline: str = "auto",
        on_miss: str = "finish",
        min_workers: int = 1,
        max_workers: int | None = None,
        consistency: str = "consistent",
        logical_workers: int | None = None,
        seed: int | None = None,
        scaling_curve: Mapping[int, float] | None = None,
        progress_regex: str | None = None,
        progress_file: str | None = None,
        on_at_risk: Callable[..., Any] | str | Sequence[Any] | None = None,
        on_promote: Callable[..., Any] | str | None = None,
        deferrable: bool | None = None,
        elasticflow_conn_id: str = ElasticFlowHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.script = script
        self.module = module
        self.script_args = script_args
        self.env = env
        self.secret_env = secret_env
        self.working_dir = working_dir
        self.python = python
        self.requirements = requirements
        self.init_from = init_from
        self.steps = steps
        self.epochs = epochs
        self.samples = samples
        self.global_batch_size = global_batch_size
        self.target_loss = target_loss
        self.deadline = deadline
        self.deadline_of = deadline_of
        self.downstream_reserve = downstream_reserve
        self.best_effort = best_effort
        self.value = value
        self.on_reject = on_reject
        self.latest_deadline = latest_deadline
        self.on_past_deadline = on_past_deadline
        self.on_miss = on_miss
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.consistency = consistency
        self.logical_workers = logical_workers
        self.seed = seed
        self.scaling_curve = scaling_curve
        self.progress_regex = progress_regex
        self.progress_file = progress_file
        self.on_at_risk = reveal(on_at_risk)
        self.on_promote = reveal(on_promote)
        self.deferrable = deferrable_by_default() if deferrable is None else deferrable
        self.elasticflow_conn_id = elasticflow_conn_id
        self._given = {name: getattr(self, name) for name in self.template_fields}
        """Template fields as written in the DAG, to distinguish a value that rendered to 'None' from an omitted one."""
        self._dag_alerts = alerts_of(dag_of(self))
        """The DAG's DeadlineAlerts at parse time. DAG tests remove them, because dag.test() cannot end with them."""
        self.elasticflow_job: LeasedJob | None = None
        """The job of this attempt; ``task/acknowledging.py`` acknowledges or cancels it."""
        self._in_flight: InFlight | None = None
        self._task_instance: Any = None
        self._context: Context = {}
        self._result: dict[str, Any] | None = None
        self._kill = Kill()
        self._check()

        if deadline_of is not None and self._takes_time_from_dag() and dag_of(self) is not None:
            check_time_from_dag(self.dag, self._dag_alerts, deadline_of)

    @classmethod
    def partial(cls, **kwargs: Any) -> OperatorPartial:
        """Begin a mapped task (Airflow's dynamic task mapping). Refuses arguments already known to be wrong."""
        return checked(super().partial(**kwargs), kwargs)

    # --- Airflow calls these -------------------------------------------------------------------------------------

    def resolve_template_files(self) -> None:
        """Check what requires the whole DAG. Airflow calls this once the DAG file has been read."""
        super().resolve_template_files()
        check_downstream(self.deadline_of, self)
        if self.deadline_of is not None and self._takes_time_from_dag():
            check_time_from_dag(self.dag, self._dag_alerts or alerts_of(self.dag), self.deadline_of)

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit or attach, then wait: inline, deferred or rescheduled, depending on where this runs."""
        self._task_instance, self._context = context["ti"], context
        run_id = context["ti"].run_id
        if lease_renewer().was_interrupted(run_id):
            raise AirflowFailException("dag.test() was interrupted by Ctrl-C: nothing more is trained")
        try:
            return self._train(context)
        except (ArgumentError, DeadlineError, SnapshotError, InvalidSubmission, StaleClaim) as error:
            raise AirflowFailException(str(error)) from error  # the next try would end the same way
        except ElasticFlowError as error:
            raise as_task_error(error) from error
        except KeyboardInterrupt:
            if self._in_flight is not None:
                self._in_flight.job(KILL_WITHIN_S, self.log)
            lease_renewer().interrupt(run_id)
            raise

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Resume after the trigger has fired. Relies on ``event`` alone: ``dag.test()`` passes nothing else."""
        self._task_instance, self._context = context["ti"], context
        job_id, claim, outcome = str(event["job_id"]), int(event["claim"]), str(event["outcome"])
        timezone, settings = context["dag"].timezone, AirflowSettings.read()
        try:
            endpoint = ElasticFlowHook(self.elasticflow_conn_id).endpoint()
        except ElasticFlowError as error:
            raise as_task_error(error) from error
        self.elasticflow_job = LeasedJob(endpoint=endpoint, job_id=job_id, claim=claim)
        if outcome == "stale":
            raise JobTakenOver(f"a newer attempt of this task has taken job {job_id} over: this one stops")
        if outcome == "away":
            raise ServiceAway(
                f"{endpoint} did not answer for {duration(settings.service_away_s)}; a retry attaches to job"
                f" {job_id} again"
            )
        if outcome == "refused":
            raise ServiceRefused(
                f"{event['why']}; clear the task once that is mended: it attaches to job {job_id} again"
            )
        memory = TaskMemory.load(context["task_state_store"])
        memory.job_id, memory.claim = job_id, claim
        memory.mark = replace(memory.mark, event_id=int(event.get("event_id", memory.mark.event_id)))
        try:
            with ElasticFlowClient(endpoint, retry_for_s=_ANSWER_WITHIN_S) as client:
                status = client.status(job_id)
                self._alarm(client, memory, timezone).look(status)
        except JobNotFound:
            self.log.warning("the service does not know job %s any more: submitting it again", job_id)
            return self._train_again(context, memory)
        except PASSING as error:
            self.log.warning("%s; waiting for it to come back", error)
            self._defer(memory, settings, timezone)
        except ElasticFlowError as error:
            raise as_task_error(error) from error
        if not status.state.terminal:
            # The job is at risk, or the trigger saw another incarnation end, or stopped early: keep waiting.
            memory.save(context["task_state_store"])
            self._defer(memory, settings, timezone)
        if status.orphaned:
            self.log.warning("%s while nobody could ask for it: submitting it again", status.state_reason)
            return self._train_again(context, memory)
        return self._finish(status, timezone, memory)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Cancel the job if the deferral timed out, since Airflow kills no process then; survive a broken trigger."""
        self._task_instance, self._context = context["ti"], context
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralError, TaskDeferralTimeout) as error:
            memory = TaskMemory.load(context["task_state_store"])
            if memory.job_id is None:
                raise
            endpoint = ElasticFlowHook(self.elasticflow_conn_id).endpoint(start=False)
            job = LeasedJob(endpoint=endpoint, job_id=memory.job_id, claim=memory.claim)
            self.elasticflow_job = job  # for the listener, if this was the last try
            if isinstance(error, TaskDeferralTimeout):
                self.log.warning("%s", job.cancel(f"the task's execution_timeout ({self.execution_timeout}) is over"))
                raise
            memory.breakdowns += 1
            if memory.breakdowns > _MAX_BREAKDOWNS:
                raise
            memory.save(context["task_state_store"])
            # The job keeps training, and a broken trigger is not a failure of the task: do not use up a retry.
            self.log.warning("the trigger broke (%s): attaching to job %s again", error, memory.job_id)
            return self.execute(context)

    def on_kill(self) -> None:
        """Decide what happens to the job, within the five seconds that Airflow allows. The waiting loop ends by itself.

        A kill by a user and a timeout cancel the job; a worker shutdown does not.
        """
        self._kill.strike(self._task_instance, self._find_job, self.log, self.execution_timeout)

    # --- the steps -----------------------------------------------------------------------------------------------

    def _train(self, context: Context) -> dict[str, Any]:  # noqa: RET503 - _defer always raises
        settings, store = AirflowSettings.read(), context["task_state_store"]
        memory = TaskMemory.load(store)
        present("elasticflow_conn_id", self.elasticflow_conn_id, self._given["elasticflow_conn_id"])
        hook = ElasticFlowHook(self.elasticflow_conn_id)
        facts = run_facts(
            context,
            namespace=hook.namespace,
            retries=self.retries or 0,
            dag_alerts=self._dag_alerts,
            ended_jobs=lambda identity: ended_jobs(hook, identity),
        )
        # Outside dag.test() the same try may run twice (its scheduler died): the second run is a new owner with its
        # own claim.
        is_poke = facts.is_dag_test and memory.attempt == facts.attempt and memory.job_id is not None
        # Check all arguments before the service is started or called.
        prepared = None if is_poke else self._prepare(facts, memory, settings)
        with ElasticFlowClient(hook.endpoint(), retry_for_s=_ANSWER_WITHIN_S) as client:
            look = self._alarm(client, memory, facts.timezone).look
            watch = JobWatch(client, memory, timezone=facts.timezone, log=self.log, settings=settings, on_status=look)
            if prepared is None:
                status = self._look_again(client, watch, facts, memory, settings)
            else:
                try:
                    status = self._submit(client, prepared, facts, memory)
                except ServiceUnavailable as error:
                    self._come_back_later(error, facts, memory, settings, store)
                memory.save(store)  # before anything that may fail, because a retry needs the claim
                watch.tell(status)
            memory.save(store)
            ended = status is not None and status.state.terminal
            if facts.is_dag_test and not ended:
                lease_renewer().keep(self._own(client, memory))
                if self.deferrable:
                    self._reschedule(memory)
            if not ended:
                status = watch.wait(settings.inline_wait_s if self.deferrable else None, lambda: self._kill.happened)
                if not self._kill.happened:
                    memory.save(store)
        if status is not None and status.orphaned:
            self.log.warning("%s while nobody could ask for it: submitting it again", status.state_reason)
            return self._train_again(context, memory)
        if status is not None and status.state.terminal:
            return self._finish(status, facts.timezone, memory)
        if self._kill.happened:
            self._stop_killed(f"while it waited for job {memory.job_id}")
        self._defer(memory, settings, facts.timezone)

    def _train_again(self, context: Context, memory: TaskMemory) -> dict[str, Any]:
        """Resubmit a job that was lost although nobody cancelled it; does not use up a retry."""
        memory.job_id = None
        memory.save(context["task_state_store"])
        return self.execute(context)

    def _come_back_later(
        self, error: ServiceUnavailable, facts: RunFacts, memory: TaskMemory, settings: AirflowSettings, store: Any
    ) -> NoReturn:
        """Release the worker slot while the service is unavailable and try again later; does not use up a retry."""
        outage, then = Outage(memory, settings.service_away_s, self.log), f"looking again in {_AWAY_PAUSE_S:g} s"
        if not outage.is_waited_out_at_start(error, is_dag_test=facts.is_dag_test, then=then):
            raise error
        memory.save(store)
        come_back(_AWAY_PAUSE_S)

    def _check(self) -> None:
        """Validate the arguments. Raises ArgumentError or DeadlineError."""
        check_arguments(**{name: getattr(self, name) for name in OPTIONS})

    def _takes_time_from_dag(self) -> bool:
        """Whether ``deadline_of`` is given without ``deadline``, as far as that is known."""
        return self.deadline is None and self.deadline_of is not None

    def _prepare(self, facts: RunFacts, memory: TaskMemory, settings: AirflowSettings) -> Prepared:
        """Build the submission, once per attempt. Raises ArgumentError, DeadlineError or SnapshotError."""
        return prepare(self, self._given, facts, memory, settings)

    def _alarm(self, client: ElasticFlowClient, memory: TaskMemory, timezone: tzinfo) -> RiskAlarm:
        told = listed(self.on_at_risk)
        return RiskAlarm(told, context=self._context, client=client, memory=memory, timezone=timezone, log=self.log)

    def _submit(self, client: ElasticFlowClient, prepared: Prepared, facts: RunFacts, memory: TaskMemory) -> JobStatus:
        submission, now = prepared.submission, now_s()
        for note in prepared.notes:
            self.log.info("%s", note)
        for warning in prepared.warnings:
            self.log.warning("%s", warning)
        job_id = submission.identity.job_id
        attachment = attach_for_retry(client, job_id, memory, facts.attempt, facts.max_tries)
        if attachment is None:
            attachment = self._ask(client, prepared, facts, memory)
        else:
            self.log.warning("Airflow tries a task again whose success it had recorded: it gets the result of that")
        if memory.attempt != facts.attempt:
            memory.since, memory.breakdowns, memory.told_at_risk = now, 0, False
        memory.attempt, memory.max_tries, memory.returned = facts.attempt, facts.max_tries, False
        memory.job_id, memory.claim = attachment.job.job_id, attachment.claim
        memory.away_since = None
        self._own(client, memory)
        for warning in attachment.warnings:
            self.log.warning("%s", warning)
        status = attachment.job
        count_submitted(status)
        self.log.info(
            "%s job %s (incarnation %d) at %s: %s%s",
            "submitted" if attachment.created else "attached to",
            status.job_id,
            status.incarnation,
            client.endpoint,
            status.verdict.decision if not status.state.terminal else status.state.value,
            f", {status.verdict.reason}" if status.verdict.reason else "",
        )
        if status.best_effort and submission.deadline_at is not None and submission.deadline_at < now:
            passed = duration(now - submission.deadline_at)
            self.log.warning("the deadline passed %s ago: training as best effort", passed)
        if self._kill.happened:
            self.on_kill()  # the signal arrived before there was a job to cancel
        return status

    def _ask(self, client: ElasticFlowClient, prepared: Prepared, facts: RunFacts, memory: TaskMemory) -> Attachment:
        """Submit the job, such that a kill during the call can still find it."""
        submission = prepared.submission
        if acknowledge_for_clear(client, submission.identity.job_id, memory, facts.max_tries):
            self.log.info("the task was cleared after a success that the service had not heard of: it trains anew")
        client.upload_snapshot(prepared.snapshot)
        if self._kill.happened:
            self._stop_killed("before its job was submitted")
        self._in_flight = InFlight(client.endpoint, submission, retry_for_s=client.retry_for_s, keep=facts.is_dag_test)
        return self._in_flight.answer()

    def _find_job(self) -> LeasedJob | None:
        """Find the job of this attempt, even if the response to its submission has not been received."""
        if self.elasticflow_job is None and self._in_flight is not None:
            self.elasticflow_job = self._in_flight.job(KILL_WITHIN_S, self.log)
        return self.elasticflow_job

    def _stop_killed(self, what: str) -> NoReturn:
        # Delayed for the same reason that a trigger's event is; see [elasticflow] min_deferral_s.
        self._kill.end(what, max(1.0, AirflowSettings.read().min_deferral_s), self.log)

    def _look_again(
        self,
        client: ElasticFlowClient,
        watch: JobWatch,
        facts: RunFacts,
        memory: TaskMemory,
        settings: AirflowSettings,
    ) -> JobStatus | None:
        """Poll the job that this attempt submitted in an earlier poke; None while the service is unavailable."""
        self._own(client, memory)
        try:
            status = watch.look()
        except JobNotFound:
            self.log.warning("the service does not know job %s any more: submitting it again", memory.job_id)
            return self._submit(client, self._prepare(facts, memory, settings), facts, memory)
        limit = self.execution_timeout
        if limit is not None and now_s() - memory.since > limit.total_seconds():
            # To Airflow each poke is a new execution, so its own timeout covers only this one.
            self.log.warning("%s", self._own(client, memory).cancel(f"execution_timeout ({limit}) is over"))
            raise AirflowException(f"execution_timeout={limit} is over: job {memory.job_id} was cancelled")
        return status

    def _own(self, client: ElasticFlowClient, memory: TaskMemory) -> LeasedJob:
        self.elasticflow_job = LeasedJob(endpoint=client.endpoint, job_id=str(memory.job_id), claim=memory.claim)
        return self.elasticflow_job

    def _reschedule(self, memory: TaskMemory) -> NoReturn:
        pause_s = AirflowSettings.read().dag_test_poke_s
        self.log.debug("job %s goes on; looking again in %g s", memory.job_id, pause_s)
        come_back(pause_s)

    def _defer(self, memory: TaskMemory, settings: AirflowSettings, timezone: tzinfo) -> NoReturn:
        job = self.elasticflow_job
        state_dir = None if job is None else job.endpoint.embedded_state_dir
        self.defer(
            trigger=ElasticFlowJobTrigger(
                job_id=str(memory.job_id),
                claim=memory.claim,
                elasticflow_conn_id=self.elasticflow_conn_id,
                state_dir=None if state_dir is None else str(state_dir),
                timezone=zone_name(timezone),
                poll_interval_s=settings.poll_interval_s,
                min_deferral_s=settings.min_deferral_s,
                service_away_s=settings.service_away_s,
                last_event_id=memory.mark.event_id,
                alarm=bool(self.on_at_risk),
                told=memory.told_at_risk,
            ),
            method_name="execute_complete",
            timeout=self._time_left(memory),  # Airflow does not apply execution_timeout to a deferred task
        )

    def _time_left(self, memory: TaskMemory) -> timedelta | None:
        """Return what is left of ``execution_timeout`` for a deferral; the attempt began with its submission."""
        if self.execution_timeout is None or not memory.since:
            return self.execution_timeout
        passed = timedelta(seconds=now_s() - memory.since)
        return max(timedelta(seconds=1), self.execution_timeout - passed)

    def _finish(self, status: JobStatus, timezone: tzinfo, memory: TaskMemory) -> dict[str, Any]:
        """Return the result of a success; raise for any other end, and always if the task was killed."""
        lease_renewer().forget(status.job_id)
        if self._kill.happened:
            self._stop_killed(f"when job {status.job_id} was {status.state.value}")
        remember(self._context, describe(status, timezone))
        count_ended(status)
        if status.state is State.SUCCEEDED:
            line = success_line(status, timezone)
            missed = status.result is not None and status.result.met is False
            self.log.log(30 if missed else 20, "%s", line)
            return self._hand_on(result_of(status, timezone), memory)
        self.elasticflow_job = None  # the job has ended: the listener has nothing to acknowledge or cancel
        if status.state is State.REJECTED:
            raise JobRejected(rejection_message(status, timezone, now_s()))
        if status.state is State.CANCELLED:
            raise JobCancelled(cancel_message(status))
        raise JobFailed(failure_message(status), step=status.step)

    def _hand_on(self, result: dict[str, Any], memory: TaskMemory) -> dict[str, Any]:
        """Pass the checkpoint to ``on_promote`` and the task's assets; return the result, with ``promoted`` added."""
        self._result = result
        if self.on_promote is not None:
            # A failure here fails the task before the success is acknowledged: a retry only promotes again.
            result["promoted"] = promote(self.on_promote, result, self._context)
            self.log.info("on_promote: %s", result["promoted"])
            if self._kill.happened:
                self._stop_killed("after its model was promoted")
        carried = carry(self.outlets, result, self._context)
        if carried:
            self.log.info("the checkpoint is in the events of %s", ", ".join(carried))
        memory.returned = True
        memory.save(self._context["task_state_store"])
        return result
