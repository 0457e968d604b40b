"""Answers what-if questions: the outlook with other deadlines or nodes, next to the present outlook.

Runs in the threads of HTTP handlers, on copies of the scheduler: nothing is changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elasticflow_airflow.api import ForecastAnswer, Verdict
from elasticflow_airflow.api.insight import DeadlineChange, WhatIf, WhatIfRequest, WhatIfVerdict
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Amended, AmendRejected, Decision, Reject
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.outlook.forecast import joining
from elasticflow_airflow.service.refusal import Refusal, no_such_job
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.store.documents.scheduler_values import plan_to_json
from elasticflow_airflow.service.store.views import told

_BUDGET_S = 5.0
"""The longest computation for one question: its time is taken from the loop that decides."""


@dataclass(slots=True)
class _Budget:
    """The time that a question may take; checked before each of its steps, none of which takes long."""

    monotonic: Callable[[], float]
    ends_s: float
    done: int = 0

    def take(self, steps: int) -> None:
        """Count one more of ``steps`` steps, before it runs. Raises Refusal 422 when the time is up."""
        if self.monotonic() > self.ends_s:
            raise Refusal(
                422,
                "too_large",
                f"after {_BUDGET_S:g} s {self.done} of {steps} changes of nodes and deadlines were worked out",
                f"ask for fewer at once: some {max(1, self.done // 2)} are worked out in time",
            )
        self.done += 1


@dataclass(frozen=True, slots=True)
class WhatIfService:
    """Answers what-if requests."""

    forecasts: ForecastService
    monotonic: Callable[[], float] = time.monotonic

    def ask(self, request: WhatIfRequest) -> WhatIf:
        """Answer a request. Raises Refusal 404, 409, 422, 503."""
        as_is, now = self.forecasts.present(), self.forecasts.clock()
        self._check(request, as_is)
        would_be = as_is.twin()
        before = self._outlook(as_is, request.hours, now)
        budget = _Budget(self.monotonic, self.monotonic() + _BUDGET_S)
        nodes, changes = _node_events(would_be, request), request.changes
        would_be.handle(ev.WakeUp(), now)
        for event in nodes:
            budget.take(len(nodes) + len(changes))
            would_be.handle(event, now)
        verdicts = []
        for change in changes:
            budget.take(len(nodes) + len(changes))
            verdicts.append(_amend(would_be, change, now))
        return WhatIf(verdicts=verdicts, before=before, after=self._outlook(would_be, request.hours, now))

    def _outlook(self, scheduler: Scheduler, hours: float, now: float) -> ForecastAnswer:
        return replace(self.forecasts, scheduler=lambda: scheduler, clock=lambda: now).forecast(hours)

    def _check(self, request: WhatIfRequest, scheduler: Scheduler) -> None:
        known = {node.node_id for node in scheduler.nodes()}
        for node_id in request.without_nodes:
            if node_id not in known:
                nodes = ", ".join(sorted(known))
                raise Refusal(422, "invalid", f"without_nodes: there is no node {node_id!r}", f"nodes are: {nodes}")
        if request.extra_nodes and not known:
            raise Refusal(
                422, "invalid", f"extra_nodes={request.extra_nodes}: there is no node that they could be like", ""
            )
        live = {state.job.job_id for state in scheduler.states()}
        asked: set[str] = set()
        for change in request.changes:
            if change.job_id in asked:
                raise Refusal(422, "invalid", f"changes: job {change.job_id!r} is there twice", "give it once")
            asked.add(change.job_id)
            if change.job_id not in live:
                with self.forecasts.store.read() as reader:
                    job = reader.job(change.job_id)
                if job is None:
                    raise no_such_job(change.job_id)
                raise Refusal(
                    409, "not_live", f"job {change.job_id!r} is over, or not decided on yet", "ask for others"
                )


def _node_events(scheduler: Scheduler, request: WhatIfRequest) -> list[ev.NodeLost | ev.NodeJoined]:
    largest = max(scheduler.nodes(), key=lambda node: node.slots, default=None)
    lost = [ev.NodeLost(node_id) for node_id in dict.fromkeys(request.without_nodes)]
    if largest is None:
        return [*lost]
    more = Node(node_id="~more", slots=largest.slots, gpu_type=largest.gpu_type)
    return [*lost, *joining(more, range(request.extra_nodes))]


def _amend(scheduler: Scheduler, change: DeadlineChange, now: float) -> WhatIfVerdict:
    job_id, deadline_at = change.job_id, change.deadline_at
    if all(state.job.job_id != job_id for state in scheduler.states()):
        verdict = Verdict(decision="rejected", reason="it would be rejected with these nodes", deadline_at=deadline_at)
        return WhatIfVerdict(job_id=job_id, verdict=verdict)
    event = ev.JobAmended(job_id, deadline_s=deadline_at, best_effort=deadline_at is None)
    return WhatIfVerdict(job_id=job_id, verdict=_verdict(scheduler, scheduler.handle(event, now), change))


def _verdict(scheduler: Scheduler, decisions: Sequence[Decision], change: DeadlineChange) -> Verdict:
    state = next((one for one in scheduler.states() if one.job.job_id == change.job_id), None)
    for decision in decisions:
        if getattr(decision, "job_id", None) != change.job_id:
            continue
        if isinstance(decision, AmendRejected | Reject):
            return Verdict(
                decision="rejected",
                **told(reason=decision.reason),
                deadline_at=change.deadline_at,
                earliest_deadline_at=decision.earliest_deadline_s,
            )
        if isinstance(decision, Amended | Admit):
            if decision.deadline_s is None:
                return Verdict(decision="best_effort", reason="runs on slots that no promise needs")
            if state is not None and state.phase in (Phase.PROFILING, Phase.WAITING):
                continue
            reason = decision.reason if isinstance(decision, Admit) else Reason("can be promised")
            return Verdict(
                decision="admitted",
                **told(reason=reason),
                deadline_at=decision.deadline_s,
                plan=plan_to_json(decision.plan),
            )
    waits = "not decided on yet: it is still measured, or waits"
    return Verdict(decision="undecided", reason=waits, deadline_at=change.deadline_at)
