"""The stages of a pass between observing and writing, in order.

The order has these reasons. Jobs that are set aside come first, as no other stage handles them. Facts are recorded
before anything is decided on them: the clock, the nodes, what workers did, and results about checkpoints. Next are
deviations from the plan (deaths, slow workers, refusals, ends) and what frees slots (cancels, expired leases), so that
new jobs find those slots free. Room for expected runs is reserved before new jobs, which could take it, are decided
on. Deadlines, hangs and the scheduler's wake-up follow, since a new job may have changed the plan. Last are the stages
that depend on all decisions: jobs that wait in a circle, completed ends, and requests for the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elasticflow_airflow.engines.port import EngineNode, GangObservation
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.service.decisions import resuming, setting_aside
from elasticflow_airflow.service.decisions.deciding import feed
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.recurring_runs import RecurringRuns
from elasticflow_airflow.service.job_files.candidates import CandidateService, Looked
from elasticflow_airflow.service.loop import (
    endings,
    introducing,
    observing,
    promotion,
    rescaling,
    slow_workers,
    watching,
)
from elasticflow_airflow.service.loop.actuating import Actuator, record_drained, record_refusals
from elasticflow_airflow.service.loop.cluster_nodes import tell_nodes
from elasticflow_airflow.service.store.tables import IncarnationRow


@dataclass(frozen=True, slots=True)
class Seen:
    """What a pass observed before its stages run."""

    observations: Sequence[GangObservation]
    looked: Sequence[Looked]
    """Results about candidate checkpoints."""
    nodes: tuple[EngineNode, ...]
    monotonic_s: float


@dataclass(frozen=True, slots=True)
class StageParts:
    """State that stages keep between passes, and services they use. ``hear`` decides on new submissions."""

    actuator: Actuator
    inbox: observing.Inbox
    leases: introducing.Leases
    recurring_runs: RecurringRuns
    hang_detector: watching.HangDetector
    candidate_service: CandidateService
    secrets_to_hide: Callable[[IncarnationRow], Mapping[str, str]]
    notice_clock: Callable[[PassContext, float], None]
    hear: Callable[[PassContext], None]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: what it needs, and what it provides to later stages."""

    name: str
    needs: str
    gives: str
    run: Callable[[PassContext, Seen], None]


def stages(parts: StageParts) -> tuple[Stage, ...]:
    """Return all stages, in the order explained in the module docstring."""
    return (
        Stage(
            "say who is set aside",
            "on which jobs the service has failed",
            "their reasons, for their owners",
            lambda context, _: setting_aside.write_down(context, parts.secrets_to_hide),
        ),
        Stage(
            "look after who is set aside",
            "what the engine sees of their workers",
            "workers that go on, and ends that were to come",
            lambda context, seen: setting_aside.look_after(context, seen.observations),
        ),
        Stage(
            "notice the clock",
            "this machine's two clocks",
            "an event where it has jumped",
            lambda context, seen: parts.notice_clock(context, seen.monotonic_s),
        ),
        Stage(
            "tell of nodes",
            "the engine's inventory, and drains",
            "the cluster that all decisions are made for",
            lambda context, seen: tell_nodes(context, seen.nodes),
        ),
        Stage(
            "take in what workers did",
            "what the engine has observed",
            "states of gangs, steps, speeds, checkpoints",
            lambda context, seen: observing.fold(context, seen.observations, parts.inbox, parts.secrets_to_hide),
        ),
        Stage(
            "take in what checkpoints are worth",
            "candidates that were verified",
            "the checkpoint that counts",
            lambda context, seen: promotion.record(context, seen.looked),
        ),
        Stage(
            "take in where to go on from",
            "checkpoints of the incarnation before",
            "newcomers that need not begin at step 0",
            lambda context, seen: resuming.record(context, seen.looked, parts.candidate_service),
        ),
        Stage(
            "answer to deaths",
            "workers that have died",
            "gangs that go on without them, or begin again",
            lambda context, _: rescaling.heal(context),
        ),
        Stage(
            "answer to slow workers",
            "times of the workers of each gang",
            "slots that are avoided",
            lambda context, _: slow_workers.watch(context),
        ),
        Stage(
            "answer to refusals",
            "what the engine refused in the pass before",
            "other ways, or an end",
            lambda context, _: record_refusals(context, parts.actuator),
        ),
        Stage(
            "judge ends of gangs",
            "gangs that have ended, and the checkpoint that counts",
            "restarts, or ends that are decided",
            lambda context, _: endings.settle(context),
        ),
        Stage(
            "cancel",
            "what somebody wants cancelled",
            "slots that will be free",
            lambda context, _: introducing.cancel(context),
        ),
        Stage(
            "check leases",
            "who has asked for its job",
            "jobs without an owner suspended, then cancelled",
            lambda context, seen: parts.leases.check(context, seen.monotonic_s),
        ),
        Stage(
            "expect runs",
            "timetables, and runs that have come",
            "room that is kept",
            lambda context, _: parts.recurring_runs.keep(context),
        ),
        Stage(
            "hear newcomers",
            "submissions and amendments",
            "verdicts",
            lambda context, _: parts.hear(context),
        ),
        Stage(
            "watch deadlines",
            "deadlines that have passed",
            "what their authors want then",
            lambda context, _: watching.watch_deadlines(context),
        ),
        Stage(
            "watch for hangs",
            "when each gang made its last step",
            "gangs that are stopped, to begin again",
            lambda context, seen: parts.hang_detector.watch_gangs(context, seen.monotonic_s),
        ),
        Stage(
            "wake the scheduler",
            "the moment that it has asked for",
            "changes that were planned for now",
            lambda context, _: _wake(context),
        ),
        Stage(
            "break circles",
            "all that was decided so far",
            "one that makes room, where all wait for each other's slots",
            lambda context, _: rescaling.break_circles(context),
        ),
        Stage(
            "conclude",
            "ends that are decided, and gangs that have left",
            "results",
            lambda context, _: endings.conclude(context),
        ),
        Stage(
            "expect runs anew",
            "what ended jobs have taught",
            "room that is kept by better figures",
            lambda context, _: parts.recurring_runs.keep(context) if context.learned else None,
        ),
        Stage(
            "ask about checkpoints",
            "candidates that nobody has looked at",
            "answers for the next pass",
            lambda context, _: promotion.ask(context, parts.candidate_service),
        ),
        Stage(
            "forget who is done",
            "ended jobs of which the engine has nothing left",
            "rows that no pass reads again",
            lambda context, _: record_drained(context, parts.actuator),
        ),
    )


def _wake(context: PassContext) -> None:
    if context.wake_at is not None and context.wake_at <= context.now:
        feed(context, ev.WakeUp())
