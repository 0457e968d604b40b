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
    SUBMITTED = "submitted", Tone.QUIET, "The job was submitted; whether its speed is known, or measured first."
    WAITING = "waiting", Tone.QUIET, "It cannot be promised now, and waits for capacity."
    ADMITTED = "admitted", Tone.GOOD, "Its deadline is promised, or it trains as best effort."
    REJECTED = "rejected", Tone.BAD, "Its deadline cannot be promised."
    BEST_EFFORT = "best_effort", Tone.QUIET, "Its deadline has passed, and it trains on without one."
    AMENDED = "amended", Tone.QUIET, "Its owner has changed its deadline or its value."
    AMEND_REJECTED = "amend_rejected", Tone.WARNING, "A change that its owner wanted cannot be promised."

    # Reported by the training
    SEED = "seed", Tone.QUIET, "With which seed and how many logical workers it trains."
    LENGTH = "length", Tone.QUIET, "How many steps it makes, by its script."
    LOGICAL_WORKERS = "logical_workers", Tone.QUIET, "The script has chosen how many logical workers there are."
    INITIALISED = "initialised", Tone.QUIET, "With which weights it starts."
    MEASURED = "measured", Tone.QUIET, "Its speed with so many workers is known."
    NOT_MEASURED = "not_measured", Tone.QUIET, "Its speed with so many workers could not be measured."
    TARGET_LENGTH = "target_length", Tone.QUIET, "At which step the target loss is expected."
    TARGET_REACHED = "target_reached", Tone.GOOD, "It has reached the target loss."
    TARGET_MISSED = "target_missed", Tone.WARNING, "It has made all its steps without reaching the target loss."
    CHECKPOINT = "checkpoint", Tone.QUIET, "A checkpoint is verified, and is used from now on."
    CHECKPOINT_DAMAGED = "checkpoint_damaged", Tone.BAD, "A checkpoint could not be verified, and does not count."
    WARNING = "warning", Tone.WARNING, "Something that its owner should know."

    # Its workers
    STARTED = "started", Tone.ACTIVE, "Its workers make steps."
    RESIZED = "resized", Tone.ACTIVE, "It is to have other slots, or to begin."
    RESCALED = "rescaled", Tone.ACTIVE, "Its workers have changed in place, without a restart."
    KEPT = "kept", Tone.QUIET, "It keeps the workers that it has."
    SUSPENDED = "suspended", Tone.WARNING, "It gives its slots up for now."
    RESUMED = "resumed", Tone.QUIET, "It goes on from a checkpoint."
    PARKED = "parked", Tone.WARNING, "Its Airflow task is away, and so it waits."
    UNPARKED = "unparked", Tone.QUIET, "Its Airflow task is back."
    RESTARTING = "restarting", Tone.WARNING, "Its workers have failed and are started again."
    RESTART_INSTEAD = "restart_instead", Tone.WARNING, "A change in place was not possible: it saves, and starts again."
    JOIN_FAILED = "join_failed", Tone.WARNING, "New workers could not join."
    WORKER_LOST = "worker_lost", Tone.WARNING, "A worker was lost; the others go on."
    SLOW_WORKER = "slow_worker", Tone.WARNING, "A worker is slower than the others for good."
    HANG = "hang", Tone.BAD, "Its workers made no progress any more, and were stopped."
    NOT_STARTED = "not_started", Tone.WARNING, "Its workers could not be started."

    # Its promise
    AT_RISK = "at_risk", Tone.BAD, "Its deadline may be missed."
    ON_TRACK = "on_track", Tone.GOOD, "It was at risk, and is not any more."
    DEADLINE_MISSED = "deadline_missed", Tone.BAD, "Its deadline has passed."

    # Its end
    SUCCEEDED = "succeeded", Tone.GOOD, "It has made all its steps."
    FAILED = "failed", Tone.BAD, "It has ended without success."
    CANCELLED = "cancelled", Tone.QUIET, "It was cancelled."
    ACKNOWLEDGED = "acknowledged", Tone.QUIET, "Airflow has recorded its success."
    OWNER_GONE = "owner_gone", Tone.WARNING, "Airflow says that its task is gone: it is cancelled."
    SET_ASIDE = "set_aside", Tone.BAD, "The service cannot work with it, and leaves it out."
    TRIED_AGAIN = "tried_again", Tone.QUIET, "It was set aside, and is looked at again."

    # Runs that are expected
    RUN_EXPECTED = "run_expected", Tone.QUIET, "When the next run of its task is due."
    RUN_MISSED = "run_missed", Tone.QUIET, "A run that was due has not come."

    # The cluster
    SERVICE_STARTED = "service_started", Tone.QUIET, "The service has started."
    CLOCK_JUMPED = "clock_jumped", Tone.WARNING, "The machine's clock was changed."
    NODE_LOST = "node_lost", Tone.BAD, "A node is gone."
    NODE_CHANGED = "node_changed", Tone.QUIET, "A node is there, with so many slots."
    NODE_DRAINING = "node_draining", Tone.WARNING, "A node will go away, or stays after all."
    DEVICE_FAULT = "device_fault", Tone.BAD, "A device has failed; its slot, or its node, is left alone."
    LEFTOVER = "leftover", Tone.WARNING, "Slots are held by workers that the service does not know."
    LEFTOVER_GONE = "leftover_gone", Tone.QUIET, "They have left."
    SLOT_BACK = "slot_back", Tone.QUIET, "A slot that was avoided is used again."
