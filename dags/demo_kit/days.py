"""The process with Airflow: runs the example DAG for some days, one after the other, with ``dag.test()``.

Started by the demo in a private environment; what it prints goes into a log, and the few things that the demo
shows go through ``Layout.say``. Whoever uses Airflow already needs none of this: the DAG file is all.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.listeners import hookimpl
from airflow.sdk.definitions.dag import DAG
from airflow.sdk.listener import get_listener_manager
from airflow.utils.db import initdb

from demo_kit.layout import Layout


class TaskNews:
    """Airflow listener: tells the demo when a task starts and ends. A waiting task is poked often, but starts once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._started: set[tuple[str, str, int]] = set()

    @hookimpl
    def on_task_instance_running(self, previous_state: Any, task_instance: Any) -> None:  # noqa: ARG002 - by name
        """Tell of a start, once per try."""
        attempt = (task_instance.run_id, task_instance.task_id, task_instance.try_number)
        if attempt not in self._started:
            self._started.add(attempt)
            self._say(task_instance, "running")

    @hookimpl
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None:  # noqa: ARG002 - by name
        """Tell of a success."""
        self._say(task_instance, "success")

    @hookimpl
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any, error: Any) -> None:  # noqa: ARG002
        """Tell of a failure, with its reason."""
        self._say(task_instance, "failed", error=str(error or ""))

    def _say(self, task_instance: Any, state: str, **more: str) -> None:
        self._layout.say(at=time.time(), kind="task", task=task_instance.task_id, state=state, **more)


def run_day(layout: Layout, dag: DAG, day: date, epochs: int, quick_s: float, publish_s: float) -> bool:
    """Run the DAG for one day with deadlines so many seconds from now; False when it failed."""
    now = time.time()
    quick_by, publish_by = now + quick_s, now + publish_s
    layout.say(at=now, kind="day", day=day.isoformat(), quick_by=quick_by, publish_by=publish_by)
    due = {"quick_by": quick_by, "publish_by": publish_by}
    conf = {name: datetime.fromtimestamp(at, UTC).isoformat() for name, at in due.items()}
    run = dag.test(
        logical_date=datetime(day.year, day.month, day.day, 2, tzinfo=UTC),
        run_conf={**conf, "thorough_epochs": epochs},
    )
    state = str(run.state)
    layout.say(at=time.time(), kind="day_end", day=day.isoformat(), state=state)
    return state == "success"


def main(root: str, last_day: str, epochs: str, *due_s: str) -> int:
    """Run one day for each pair of deadlines in ``due_s`` (quick, publish), the last of them ``last_day``."""
    layout = Layout.below(Path(root))
    initdb()
    layout.say(at=time.time(), kind="database")
    # Now that there is a database: parsing the DAG looks up the provider.
    from daily_bert_finetune import dag

    get_listener_manager().add_listener(TaskNews(layout))
    pairs = [(float(quick), float(publish)) for quick, publish in zip(due_s[::2], due_s[1::2], strict=True)]
    first = date.fromisoformat(last_day) - timedelta(days=len(pairs) - 1)
    for number, (quick_s, publish_s) in enumerate(pairs):
        if not run_day(layout, dag, first + timedelta(days=number), int(epochs), quick_s, publish_s):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
