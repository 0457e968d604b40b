"""The operator that turns an Airflow task into an elastic training job with a deadline, and waits for it.

It submits, waits by the way that fits where it runs, and returns a small JSON. It never holds a GPU and never
imports torch; everything it needs to know of the service is the client.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta, tzinfo
from datetime import time as time_of_day
from typing import Any, NoReturn

import pendulum
from airflow.sdk import BaseOperator, Context
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    TaskDeferralTimeout,
)

from elasticflow_airflow.arguments import ArgumentError, check_arguments, present
from elasticflow_airflow.client import (
    ElasticFlowClient,
    ElasticFlowError,
    InvalidSubmission,
    JobNotFound,
    SnapshotError,
    StaleClaim,
)
from elasticflow_airflow.clock import now_s
from elasticflow_airflow.dag_deadline import alerts_of, check_time_from_dag, dag_of
from elasticflow_airflow.deadlines import DAG_RUN, DeadlineError, show_duration, zone_name
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.leases import OwnedJob, keeper
from elasticflow_airflow.outcomes import (
    cancel_message,
    failure_message,
    past_deadline_message,
    rejection_message,
    result_of,
    success_line,
)
from elasticflow_airflow.run_deadline import ended_jobs
from elasticflow_airflow.settings import AirflowSettings, deferrable_by_default
from elasticflow_airflow.submission import Prepared, RunFacts, check_downstream, prepare, run_facts
from elasticflow_airflow.task_memory import TaskMemory
from elasticflow_airflow.triggers import ElasticFlowJobTrigger
from elasticflow_airflow.waiting import JobWatch
from elasticflow_airflow.wire import Attachment, JobStatus, JobSubmission, State

_KILL_WITHIN_S = 4.0
"""Airflow sends SIGKILL five seconds after SIGTERM."""


class ElasticTrainOperator(BaseOperator):
    """Train by a deadline; the service decides with how many workers, and changes that while the training runs.

    What: ``script`` (relative to the DAG file) or ``module``, ``script_args``, ``env``, ``secret_env`` (name to
    ``"conn:<connection id>.<field>"``; resolved at submit, stored nowhere in plain text), ``working_dir``, ``python``
    (the interpreter; it needs torch only).

    How much: ``steps``, or ``epochs`` (default 1) of ``samples``; ``global_batch_size`` samples make a step.
    ``target_loss`` ends the training early, once the smoothed loss is there; ``steps`` or ``epochs`` is then the most
    that it trains, and what its deadline is promised on.

    By when: ``deadline`` (time of day in the DAG's time zone, timedelta after the run is due, datetime, or a
    template) of this training, or with ``deadline_of`` of a downstream task or ``"dag_run"``: the training must then
    end earlier by what recent runs took from its end to the target's, or by ``downstream_reserve`` until there are
    any. ``deadline_of`` alone takes the time from the DAG: its earliest DeadlineAlert, else its next run. Or
    ``best_effort=True``. ``value`` weighs jobs against each other.

    When it cannot be: ``on_reject`` ("fail", "best_effort", "wait", or "renegotiate" up to ``latest_deadline``),
    ``on_past_deadline`` ("auto": best effort for backfills and clears, else fail; "fail"; "best_effort"), ``on_miss``
    ("finish", "fail", "use_last_checkpoint").

    Further: ``init_from`` ("latest": weights of this task's last success, or the folder of a checkpoint),
    ``min_workers`` and ``max_workers`` (powers of two), ``consistency`` ("consistent": the result does not depend on
    the number of workers; "fast": plain data-parallel training), ``logical_workers`` (consistent mode: into how many
    shares each step is cut, a power of two that divides the global batch; at most that many workers), ``scaling_curve``
    (workers to steps/s: no profiling),
    ``progress_regex`` or ``progress_file`` for scripts that know nothing of this library, ``deferrable``,
    ``elasticflow_conn_id``.

    Returns a dict: job_id, verdict, deadline, finished_at, slack_s, met, steps, final_loss, checkpoint_path,
    gpu_seconds, rescales, metrics. Raises ArgumentError and DeadlineError at DAG parse for what can be known then.
    """

    template_fields: Sequence[str] = (
        "script",
        "module",
        "script_args",
        "env",
        "working_dir",
        "python",
        "steps",
        "epochs",
        "samples",
        "global_batch_size",
        "target_loss",
        "deadline",
        "latest_deadline",
        "init_from",
        "elasticflow_conn_id",
    )
    template_fields_renderers = {"script_args": "json", "env": "json"}  # noqa: RUF012 - Airflow's declaration
    ui_color = "#dff2e4"

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
        steps: int | str | None = None,
        epochs: int | str | None = None,
        samples: int | str | None = None,
        global_batch_size: int | str,
        target_loss: float | str | None = None,
        deadline: str | time_of_day | timedelta | datetime | None = None,
        deadline_of: str | None = None,
        downstream_reserve: timedelta = timedelta(minutes=5),
        best_effort: bool = False,
        value: float = 1.0,
        on_reject: str = "fail",
        latest_deadline: str | time_of_day | timedelta | datetime | None = None,
        on_past_deadline: str = "auto",
        on_miss: str = "finish",
        init_from: str | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        consistency: str = "consistent",
        logical_workers: int | None = None,
        scaling_curve: Mapping[int, float] | None = None,
        progress_regex: str | None = None,
        progress_file: str | None = None,
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
        self.init_from = init_from
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.consistency = consistency
        self.logical_workers = logical_workers
        self.scaling_curve = scaling_curve
        self.progress_regex = progress_regex
        self.progress_file = progress_file
        self.deferrable = deferrable_by_default() if deferrable is None else deferrable
        self.elasticflow_conn_id = elasticflow_conn_id
        self._given = {name: getattr(self, name) for name in self.template_fields}
        """As written in the DAG: what rendered to 'None' must be told from what was left out."""
        self._dag_alerts = alerts_of(dag_of(self))
        """The DAG's DeadlineAlerts at parse: who tests a DAG takes them off, as dag.test() cannot end with them."""
        self.elasticflow_job: OwnedJob | None = None
        """The job of this attempt, for the listener that acknowledges or cancels it."""
        self._submitted: Future[Attachment] | None = None
        self._killed = False
        check_arguments(
            script=script,
            module=module,
            steps=steps,
            epochs=epochs,
            samples=samples,
            global_batch_size=global_batch_size,
            deadline=deadline,
            deadline_of=deadline_of,
            downstream_reserve=downstream_reserve,
            best_effort=best_effort,
            latest_deadline=latest_deadline,
            value=value,
            on_reject=on_reject,
            on_past_deadline=on_past_deadline,
            on_miss=on_miss,
            min_workers=min_workers,
            max_workers=max_workers,
            consistency=consistency,
            logical_workers=logical_workers,
            scaling_curve=scaling_curve,
            env=env,
            secret_env=secret_env,
            script_args=script_args,
            target_loss=target_loss,
            progress_regex=progress_regex,
            progress_file=progress_file,
        )

        if deadline is None and deadline_of is not None and dag_of(self) is not None:
            check_time_from_dag(self.dag, self._dag_alerts, deadline_of)

    # --- Airflow calls these -------------------------------------------------------------------------------------

    def resolve_template_files(self) -> None:
        """Airflow calls this when the DAG file has been read: what only the whole DAG can tell is checked here."""
        super().resolve_template_files()
        if self.deadline_of not in (None, DAG_RUN, self.task_id):
            check_downstream(self.deadline_of, set(self.get_flat_relative_ids(upstream=False)), self.task_id)
        if self.deadline is None and self.deadline_of is not None:
            check_time_from_dag(self.dag, self._dag_alerts or alerts_of(self.dag), self.deadline_of)

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit or attach, then wait by the way that fits where this runs."""
        run_id = context["ti"].run_id
        if keeper().was_interrupted(run_id):
            raise AirflowFailException("dag.test() was interrupted by Ctrl-C: nothing more is trained")
        try:
            return self._train(context)
        except (ArgumentError, DeadlineError, SnapshotError, InvalidSubmission, StaleClaim) as error:
            raise AirflowFailException(str(error)) from error  # the next try would end the same way
        except ElasticFlowError as error:
            raise AirflowException(str(error)) from error
        except KeyboardInterrupt:
            self._await_submission()
            keeper().interrupt(run_id)
            raise

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Go on when the trigger has fired. What is needed is in ``event``: ``dag.test()`` passes nothing else."""
        job_id, claim, outcome = str(event["job_id"]), int(event["claim"]), str(event["outcome"])
        timezone, settings = context["dag"].timezone, AirflowSettings.read()
        endpoint = ElasticFlowHook(self.elasticflow_conn_id).endpoint()
        self.elasticflow_job = OwnedJob(endpoint=endpoint, job_id=job_id, claim=claim)
        if outcome == "stale":
            raise AirflowFailException(f"a newer attempt of this task has taken job {job_id} over: this one stops")
        if outcome == "away":
            raise AirflowException(
                f"{endpoint} did not answer for {show_duration(settings.service_away_s)}; a retry attaches to job"
                f" {job_id} again"
            )
        try:
            with ElasticFlowClient(endpoint) as client:
                status = client.status(job_id)
        except ElasticFlowError as error:
            raise AirflowException(str(error)) from error
        if not status.state.terminal:
            # The trigger saw another incarnation end, or gave up early: look on.
            memory = TaskMemory.load(context["task_state_store"])
            memory.job_id, memory.claim = job_id, claim
            self._defer(memory, settings, timezone)
        return self._finish(status, timezone)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Cancel the job when the deferral timed out: Airflow does not kill the trigger then."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout:
            memory = TaskMemory.load(context["task_state_store"])
            if memory.job_id is not None:
                endpoint = ElasticFlowHook(self.elasticflow_conn_id).endpoint(start=False)
                job = OwnedJob(endpoint=endpoint, job_id=memory.job_id, claim=memory.claim)
                self.log.warning("%s", job.cancel(f"the task's execution_timeout ({self.execution_timeout}) is over"))
            raise

    def on_kill(self) -> None:
        """Cancel the job, within the five seconds that Airflow gives. The waiting loop ends by itself."""
        self._killed = True
        if self.elasticflow_job is not None:
            self.log.warning("%s", self.elasticflow_job.cancel("the Airflow task was killed", within_s=_KILL_WITHIN_S))

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
            ended_jobs=lambda: ended_jobs(hook, context["ti"]),
        )
        is_poke = memory.attempt == facts.attempt and memory.job_id is not None
        # Whatever can be wrong with the arguments is said before the service is started or asked.
        prepared = None if is_poke else prepare(self, self._given, facts, memory, settings)
        with ElasticFlowClient(hook.endpoint()) as client:
            watch = JobWatch(client, memory, timezone=facts.timezone, log=self.log, settings=settings)
            if prepared is None:
                status = self._look_again(client, watch, facts, memory, settings)
            else:
                status = self._submit(client, prepared, facts, memory)
                memory.save(store)  # before anything that may fail: a retry must find the claim
                watch.say(status)
            memory.save(store)
            ended = status is not None and status.state.terminal
            if facts.is_dag_test and not ended:
                keeper().keep(self._own(client, memory))
                if self.deferrable:
                    self._reschedule(memory)
            if not ended:
                status = watch.wait(settings.inline_wait_s if self.deferrable else None, lambda: self._killed)
                memory.save(store)
        if status is not None and status.state.terminal:
            return self._finish(status, facts.timezone)
        if self._killed:
            raise AirflowException(f"the task was killed while it waited for job {memory.job_id}")
        self._defer(memory, settings, facts.timezone)

    def _submit(self, client: ElasticFlowClient, prepared: Prepared, facts: RunFacts, memory: TaskMemory) -> JobStatus:
        submission, now = prepared.submission, now_s()
        for note in prepared.notes:
            self.log.info("%s", note)
        for warning in prepared.warnings:
            self.log.warning("%s", warning)
        past_s = 0.0 if submission.deadline_at is None else now - submission.deadline_at
        is_late = past_s > 0 and not _can_attach(client, submission.identity.job_id)
        gives_in = self.on_past_deadline == "best_effort" or (self.on_past_deadline == "auto" and facts.replays)
        if is_late and gives_in:
            self.log.warning("the deadline passed %s ago: training as best effort", show_duration(past_s))
            changes = {"deadline_at": None, "best_effort": True, "on_reject": "fail", "latest_deadline_at": None}
            submission = submission.model_copy(update=changes)
        elif is_late:
            # Submitted all the same: the service knows the earliest deadline that it could promise.
            submission = submission.model_copy(update={"on_reject": "fail", "latest_deadline_at": None})
        client.upload_snapshot(prepared.snapshot)
        attachment = self._submit_whatever_comes(client, submission, keep=facts.is_dag_test)
        memory.attempt, memory.job_id, memory.claim = facts.attempt, attachment.job.job_id, attachment.claim
        memory.since, memory.away_since = now, None
        job = self._own(client, memory)
        for warning in attachment.warnings:
            self.log.warning("%s", warning)
        status = attachment.job
        self.log.info(
            "%s job %s (incarnation %d) at %s: %s%s",
            "submitted" if attachment.created else "attached to",
            status.job_id,
            status.incarnation,
            client.endpoint,
            status.verdict.decision if not status.state.terminal else status.state.value,
            f", {status.verdict.reason}" if status.verdict.reason else "",
        )
        if self._killed:
            self.on_kill()  # the signal came before there was a job to cancel
        if is_late and not gives_in and status.state is not State.REJECTED:
            self.log.warning("%s", job.cancel("its deadline had passed before it was submitted"))
            raise AirflowFailException(past_deadline_message(prepared.submission, facts.timezone, now))
        return status

    def _submit_whatever_comes(self, client: ElasticFlowClient, submission: JobSubmission, *, keep: bool) -> Attachment:
        """Submit in a thread: Ctrl-C between request and answer must not lose the claim to a job that now trains.

        With ``keep``, the thread hands the job to the lease keeper, which cancels it when this process leaves, however
        often Ctrl-C was pressed.
        """
        submitted: Future[Attachment] = Future()

        def submit() -> None:
            try:
                attachment = client.submit(submission)
                if keep and not attachment.job.state.terminal:
                    job_id = attachment.job.job_id
                    keeper().keep(OwnedJob(endpoint=client.endpoint, job_id=job_id, claim=attachment.claim))
                submitted.set_result(attachment)
            except BaseException as error:  # noqa: BLE001 - raised by result(), in the thread that waits
                submitted.set_exception(error)

        self._submitted = submitted
        threading.Thread(target=submit, name="elasticflow-submit").start()
        return submitted.result()

    def _await_submission(self) -> None:
        """Give a submission that is under way the time to be answered."""
        if self._submitted is None:
            return
        try:
            self._submitted.result(timeout=_KILL_WITHIN_S)
        except (ElasticFlowError, TimeoutError) as error:
            self.log.warning("interrupted while submitting: %s", error or "the service has not answered yet")

    def _look_again(
        self,
        client: ElasticFlowClient,
        watch: JobWatch,
        facts: RunFacts,
        memory: TaskMemory,
        settings: AirflowSettings,
    ) -> JobStatus | None:
        """Look at the job that this attempt has submitted in an earlier poke; None while the service is away."""
        self._own(client, memory)
        try:
            status = watch.look()
        except JobNotFound:
            self.log.warning("the service does not know job %s any more: submitting it again", memory.job_id)
            return self._submit(client, prepare(self, self._given, facts, memory, settings), facts, memory)
        limit = self.execution_timeout
        if limit is not None and now_s() - memory.since > limit.total_seconds():
            # Each poke is a new execution to Airflow, whose own timeout sees only this one.
            self.log.warning("%s", self._own(client, memory).cancel(f"execution_timeout ({limit}) is over"))
            raise AirflowException(f"execution_timeout={limit} is over: job {memory.job_id} was cancelled")
        return status

    def _own(self, client: ElasticFlowClient, memory: TaskMemory) -> OwnedJob:
        self.elasticflow_job = OwnedJob(endpoint=client.endpoint, job_id=str(memory.job_id), claim=memory.claim)
        return self.elasticflow_job

    def _reschedule(self, memory: TaskMemory) -> NoReturn:
        pause_s = AirflowSettings.read().dag_test_poke_s
        self.log.debug("job %s goes on; looking again in %g s", memory.job_id, pause_s)
        poke_at = pendulum.now("UTC").add(seconds=pause_s)
        raise AirflowRescheduleException(poke_at)  # type: ignore[no-untyped-call]  # Airflow has no types here

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
            ),
            method_name="execute_complete",
            timeout=self.execution_timeout,  # Airflow does not apply it to a deferred task by itself
        )

    def _finish(self, status: JobStatus, timezone: tzinfo) -> dict[str, Any]:
        """Return the result of a success; raise for every other end, and always once the task was killed."""
        keeper().forget(status.job_id)
        if self._killed:
            raise AirflowException(f"the task was killed; job {status.job_id} is {status.state.value}")
        if status.state is State.SUCCEEDED:
            line = success_line(status, timezone)
            missed = status.result is not None and status.result.met is False
            self.log.log(30 if missed else 20, "%s", line)
            return result_of(status, timezone)
        self.elasticflow_job = None  # it has ended: there is nothing left for the listener to acknowledge or cancel
        if status.state is State.REJECTED:
            raise AirflowFailException(rejection_message(status, timezone, now_s()))
        if status.state is State.CANCELLED:
            raise AirflowFailException(cancel_message(status))
        raise AirflowException(failure_message(status))


def _can_attach(client: ElasticFlowClient, job_id: str) -> bool:
    """Whether a job lives, or has succeeded unacknowledged: an attempt may come late to it."""
    try:
        status = client.status(job_id)
    except JobNotFound:
        return False
    return not status.state.terminal or (status.state is State.SUCCEEDED and not status.acknowledged)
