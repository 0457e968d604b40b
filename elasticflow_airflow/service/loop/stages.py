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
    checkpoint_promotion,
    introducing,
    observing,
    rescaling,
    restart_or_end,
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
            "report jobs set aside",
            "jobs on which the service failed",
            "the reason, for their owners",
            lambda context, _: setting_aside.write_down(context, parts.secrets_to_hide),
        ),
        Stage(
            "keep jobs set aside alive",
            "what the engine observed of their workers",
            "renewed leases, and ended jobs",
            lambda context, seen: setting_aside.look_after(context, seen.observations),
        ),
        Stage(
            "check the clock",
            "this machine's two clocks",
            "an event if it jumped",
            lambda context, seen: parts.notice_clock(context, seen.monotonic_s),
        ),
        Stage(
            "update nodes",
            "the engine's inventory, and drains",
            "the cluster that all decisions are for",
            lambda context, seen: tell_nodes(context, seen.nodes),
        ),
        Stage(
            "read observations",
            "what the engine observed",
            "states of gangs, steps, speeds, checkpoints",
            lambda context, seen: observing.fold(context, seen.observations, parts.inbox, parts.secrets_to_hide),
        ),
        Stage(
            "record verified checkpoints",
            "candidate checkpoints that passed verification",
            "the checkpoint to continue from",
            lambda context, seen: checkpoint_promotion.record(context, seen.looked),
        ),
        Stage(
            "find where to resume",
            "checkpoints of the previous incarnation",
            "jobs that resume instead of starting at step 0",
            lambda context, seen: resuming.record(context, seen.looked, parts.candidate_service),
        ),
        Stage(
            "handle lost workers",
            "workers that died",
            "gangs that continue without them, or restart",
            lambda context, _: rescaling.heal(context),
        ),
        Stage(
            "handle slow workers",
            "step times of the workers of each gang",
            "slots to avoid",
            lambda context, _: slow_workers.watch(context),
        ),
        Stage(
            "handle engine refusals",
            "what the engine refused in the previous pass",
            "a retry, a restart instead, or a failed job",
            lambda context, _: record_refusals(context, parts.actuator),
        ),
        Stage(
            "handle gangs that ended",
            "gangs that ended, and the checkpoint to continue from",
            "restarts, or final outcomes",
            lambda context, _: restart_or_end.settle(context),
        ),
        Stage(
            "cancel",
            "jobs to cancel",
            "slots that will be free",
            lambda context, _: introducing.cancel(context),
        ),
        Stage(
            "check leases",
            "which owners asked for their jobs",
            "jobs without an owner suspended, later cancelled",
            lambda context, seen: parts.leases.check(context, seen.monotonic_s),
        ),
        Stage(
            "reserve slots for expected runs",
            "timetables, and runs that were submitted",
            "reserved slots",
            lambda context, _: parts.recurring_runs.keep(context),
        ),
        Stage(
            "decide on new jobs",
            "submissions and amendments",
            "verdicts",
            lambda context, _: parts.hear(context),
        ),
        Stage(
            "watch deadlines",
            "deadlines that have passed",
            "what `on_miss` asks for",
            lambda context, _: watching.watch_deadlines(context),
        ),
        Stage(
            "watch for hangs",
            "when each gang made its last step",
            "gangs that are stopped, to restart",
            lambda context, seen: parts.hang_detector.watch_gangs(context, seen.monotonic_s),
        ),
        Stage(
            "wake the scheduler",
            "the time at which it asked to be called",
            "changes planned for now",
            lambda context, _: _wake(context),
        ),
        Stage(
            "break deadlocks",
            "all decisions so far",
            "one job that gives up slots where jobs wait for each other's in a circle",
            lambda context, _: rescaling.break_circles(context),
        ),
        Stage(
            "finish jobs",
            "final outcomes, and gangs that have left",
            "results",
            lambda context, _: restart_or_end.conclude(context),
        ),
        Stage(
            "update expected runs",
            "what ended jobs have shown",
            "better reservations",
            lambda context, _: parts.recurring_runs.keep(context) if context.learned else None,
        ),
        Stage(
            "request verification",
            "candidates that are not verified yet",
            "answers for the next pass",
            lambda context, _: checkpoint_promotion.ask(context, parts.candidate_service),
        ),
        Stage(
            "forget finished jobs",
            "ended jobs of which the engine has nothing left",
            "rows that no later pass reads",
            lambda context, _: record_drained(context, parts.actuator),
        ),
    )


def _wake(context: PassContext) -> None:
    if context.wake_at is not None and context.wake_at <= context.now:
        feed(context, ev.WakeUp())
