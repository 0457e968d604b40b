"""The state that an elastic task keeps between its processes: retries, pokes and clears of one task instance.

Stored in Airflow's task state store, which survives all of these (XComs do not), under one key as one small JSON
object, for as long as the task instance exists: a clear after months must find the deadline that the run had. Only
``[state_store] clear_on_success`` deletes it earlier.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from airflow.sdk.exceptions import AirflowRuntimeError

from elasticflow_airflow.waiting.progress_lines import ProgressMark

log = logging.getLogger(__name__)

_KEY = "elasticflow"


class StateStore(Protocol):
    """The part of Airflow's ``context["task_state_store"]`` that is used."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        ...

    def set(self, key: str, value: Any) -> None:
        """Set the value of a key."""
        ...


@dataclass(slots=True, kw_only=True)
class TaskMemory:
    """The stored state. ``attempt`` is the try that owns the claim: a later try must attach again, a later poke not.

    ``deadlines`` holds, by argument, the given value and the time computed from it (UTC seconds), so that a retry or a
    clear does not move a deadline; a changed deadline in an edited DAG is computed afresh.
    """

    attempt: int | None = None
    max_tries: int | None = None
    """Airflow's ``max_tries`` at that try."""
    returned: bool = False
    """Whether that try returned its result, so that Airflow most likely recorded a success."""
    job_id: str | None = None
    claim: int = 0
    since: float = 0.0
    """When this attempt submitted or attached (UTC seconds)."""
    away_since: float | None = None
    """Since when the service has not answered (UTC seconds); see ``outages``."""
    answered: bool = False
    """Whether the service has answered a sensor in this attempt."""
    breakdowns: int = 0
    """How often a trigger broke in this attempt."""
    told_at_risk: bool = False
    """Whether ``on_at_risk`` was called since the job became at risk."""
    deadlines: dict[str, dict[str, Any]] = field(default_factory=dict)
    mark: ProgressMark = field(default_factory=ProgressMark)

    @classmethod
    def load(cls, store: StateStore) -> TaskMemory:
        """Read the stored state; return a fresh one if there is none, or if it is of an incompatible version."""
        raw = store.get(_KEY)
        if not isinstance(raw, dict):
            return cls()
        known = {name: raw[name] for name in cls.__dataclass_fields__ if name in raw}
        mark = known.pop("mark", {})
        try:
            return cls(**known, mark=ProgressMark(**mark))
        except TypeError:
            return cls()

    def save(self, store: StateStore) -> None:
        """Store the state; only warn if Airflow refuses: a retry finds its job even without it, by the job's id."""
        try:
            _set_for_good(store, _KEY, asdict(self))
        except AirflowRuntimeError as error:
            log.warning("Airflow did not keep what this task remembers: %s", error)


def _set_for_good(store: StateStore, key: str, value: Any) -> None:
    """Set a value without expiry, rather than with ``[state_store] default_retention_days``."""
    write: Callable[..., None] = store.set
    if "retention" not in inspect.signature(write).parameters:
        write(key, value)
        return
    from airflow.sdk.execution_time.context import NEVER_EXPIRE  # exists in all versions with this argument

    write(key, value, retention=NEVER_EXPIRE)
