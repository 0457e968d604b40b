"""The kinds of event in the log, with the meaning and the severity of each.

The page's colours and the table in the reference are generated from this list.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Tone(StrEnum):
    """The appearance of an event on the page; the values are CSS classes of the page."""

    GOOD = "ok"
    ACTIVE = "accent"
    QUIET = "quiet"
    WARNING = "warn"
    BAD = "bad"


class EventKind(StrEnum):
    """What has happened to a job or to the cluster.

    A service that is newer than its client may send kinds that are not listed here: :class:`Event` accepts any string.
    """

    tone: Tone
    meaning: str

    def __new__(cls, value: str, tone: Tone, meaning: str) -> Self:
        """Create a member from its string value, with a tone and a meaning as attributes."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.tone, member.meaning = tone, meaning
        return member

    # The verdict
    SUBMITTED = "submitted", Tone.QUIET, "The job was submitted; its speed is known, or measured first."
    WAITING = (
        "waiting",
        Tone.QUIET,
        "It waits: for capacity to promise its deadline, for slots to measure it on, or for a larger cluster.",
    )
    ADMITTED = "admitted", Tone.GOOD, "Its deadline is promised, or it trains as best effort."
    REJECTED = "rejected", Tone.BAD, "Its deadline cannot be promised."
    BEST_EFFORT = "best_effort", Tone.QUIET, "Its deadline has passed, and it continues without one."
    AMENDED = "amended", Tone.QUIET, "Its deadline or value was changed; once it has ended, for its next attempt."
    AMEND_REJECTED = "amend_rejected", Tone.WARNING, "A requested change of its deadline or value cannot be promised."

    # Reported by the training
    SEED = "seed", Tone.QUIET, "It trains with this seed."
    LENGTH = "length", Tone.QUIET, "Its script reported the number of steps."
    LOGICAL_WORKERS = "logical_workers", Tone.QUIET, "Its script reported the number of logical workers."
    INITIALISED = "initialised", Tone.QUIET, "It starts with the weights of an earlier checkpoint, or from scratch."
    MEASURED = "measured", Tone.QUIET, "Its speed with this number of workers was measured."
    NOT_MEASURED = "not_measured", Tone.QUIET, "Its speed with this number of workers could not be measured."
    TARGET_LENGTH = "target_length", Tone.QUIET, "The prediction of when it reaches the target loss has changed."
    TARGET_REACHED = "target_reached", Tone.GOOD, "It reached the target loss."
    TARGET_MISSED = "target_missed", Tone.WARNING, "It completed all steps without reaching the target loss."
    CHECKPOINT = "checkpoint", Tone.QUIET, "A checkpoint was verified and is used from now on."
    CHECKPOINT_DAMAGED = "checkpoint_damaged", Tone.BAD, "A checkpoint could not be verified and is not used."
    WARNING = "warning", Tone.WARNING, "There is a warning for its owner."

    # Its workers
    STARTED = "started", Tone.ACTIVE, "Its workers started to train."
    RESIZED = "resized", Tone.ACTIVE, "It was given its first slots, or different ones."
    RESCALED = "rescaled", Tone.ACTIVE, "Its workers changed in place, without a restart."
    KEPT = "kept", Tone.QUIET, "It keeps its workers."
    SUSPENDED = "suspended", Tone.WARNING, "It was suspended: it released its slots and continues later."
    RESUMED = "resumed", Tone.QUIET, "It continues from a checkpoint."
    PARKED = "parked", Tone.WARNING, "Its Airflow task does not respond, so it waits."
    UNPARKED = "unparked", Tone.QUIET, "Its Airflow task is back."
    RESTARTING = "restarting", Tone.WARNING, "Its workers failed and are restarted."
    RESTART_INSTEAD = "restart_instead", Tone.WARNING, "A change in place was not possible, so it saves and restarts."
    JOIN_FAILED = "join_failed", Tone.WARNING, "New workers could not join."
    WORKER_LOST = "worker_lost", Tone.WARNING, "A worker was lost; the others continue."
    SLOW_WORKER = "slow_worker", Tone.WARNING, "A worker is persistently slower than the others."
    HANG = "hang", Tone.BAD, "Its workers hung (no progress), and were stopped."
    NOT_STARTED = "not_started", Tone.WARNING, "Its workers could not be started."

    # Its promise
    AT_RISK = "at_risk", Tone.BAD, "Its deadline may be missed."
    ON_TRACK = "on_track", Tone.GOOD, "Its deadline is no longer at risk."
    DEADLINE_MISSED = "deadline_missed", Tone.BAD, "It missed its deadline."

    # Its end
    SUCCEEDED = (
        "succeeded",
        Tone.GOOD,
        "It succeeded: all steps are made, the target is reached, or it stopped early on purpose.",
    )
    FAILED = "failed", Tone.BAD, "It ended without success."
    CANCELLED = "cancelled", Tone.QUIET, "It was cancelled."
    ACKNOWLEDGED = "acknowledged", Tone.QUIET, "Airflow recorded its success."
    OWNER_GONE = "owner_gone", Tone.WARNING, "Airflow reported that its task is gone, so it is cancelled."
    SET_ASIDE = (
        "set_aside",
        Tone.BAD,
        "The service failed on it: its workers keep running, and nothing else is done for it.",
    )
    TRIED_AGAIN = "tried_again", Tone.QUIET, "The service manages it again after setting it aside."

    # Runs that are expected
    RUN_EXPECTED = "run_expected", Tone.QUIET, "The next runs of its task are expected at these times."
    RUN_MISSED = "run_missed", Tone.QUIET, "An expected run was not submitted."

    # The cluster
    SERVICE_STARTED = "service_started", Tone.QUIET, "The service started."
    CLOCK_JUMPED = "clock_jumped", Tone.WARNING, "The machine's clock was changed."
    NODE_LOST = "node_lost", Tone.BAD, "A node was lost."
    NODE_CHANGED = "node_changed", Tone.QUIET, "A node joined, or its number of usable slots changed."
    NODE_DRAINING = "node_draining", Tone.WARNING, "A drain of a node was announced or cancelled."
    DEVICE_FAULT = "device_fault", Tone.BAD, "A device failed: its slot, or its whole node, is avoided."
    LEFTOVER = "leftover", Tone.WARNING, "Workers that the service does not know hold slots."
    LEFTOVER_GONE = "leftover_gone", Tone.QUIET, "The unknown workers have ended."
    SLOT_BACK = "slot_back", Tone.QUIET, "A slot that was avoided is used again."
