"""Slots of gangs that take long to leave: nothing is planned on them until they have left.

A job that gives up its slots saves and leaves after the step that it is in; one that does not is killed after twice the
grace period. Until then its slots cannot be used, whatever was planned: a job that waits for them, perhaps with a
promise to keep, is planned on other slots.
"""

from __future__ import annotations

import math

from elasticflow_airflow.engines.port import GangState
from elasticflow_airflow.scheduler_core.model.values import Slot
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.setting_aside import slots_of

_SLOW = 0.25
"""Part of the grace period after which a gang counts as slow to leave."""
_LONGER_S = 60.0
"""How much later than it should have been killed it is expected to be gone, again and again."""


def held_by_slow_leavers(context: PassContext) -> dict[Slot, float]:
    """Return the slots of gangs that were told to leave long ago, and when each should be free (UTC seconds)."""
    grace_s = context.settings.grace_s
    found: dict[Slot, float] = {}
    for row in context.rows:
        if row.terminal or row.ending:
            continue  # The scheduler knows that the job has its slots until it is over.
        desired = context.desired(row)
        its = set() if desired is None else set(slots_of(desired))  # where its next gang waits for the one before
        for generation in context.open_of(row):
            since = generation.notes.leaving_at
            if generation.state != GangState.LEAVING or since is None or context.now - since < _SLOW * grace_s:
                continue
            late_s = max(0.0, context.now - (since + 2 * grace_s))
            until_s = since + 2 * grace_s + _LONGER_S * math.ceil(late_s / _LONGER_S)
            found |= dict.fromkeys(set(slots_of(generation)) - its, until_s)
    return found
