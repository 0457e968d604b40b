"""What users and machines do to a task: paths, each with a DAG of its own, so that all can be walked at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from support.airflow_stack import Stack

Path = Callable[[Stack, str], None]
"""Walks one path: the stack, and the id of the path's DAG."""

_HEAD = '''
import json
from datetime import timedelta
from airflow.sdk import DAG
from elasticflow_airflow.operators import ElasticTrainOperator

SPEED = {1: 10.0}  # steps/s

def train(steps=10**6, *, task_id="train", fake=None, **changes):
    """A training of the modelled engine; for ever, and as best effort, unless said otherwise."""
    behaviour = {"steps_per_s": SPEED, "startup_s": 0.5, **(fake or {})}
    arguments = {
        "script": "code/train.py", "steps": steps, "global_batch_size": 8, "scaling_curve": SPEED, "max_workers": 1,
        "env": {"ELASTICFLOW_FAKE": json.dumps(behaviour)}, "best_effort": "deadline" not in changes,
        "retry_delay": timedelta(seconds=1), **changes,
    }
    return ElasticTrainOperator(task_id=task_id, **arguments)

def blocking(steps=10**6, **changes):
    """The same, waiting in its worker."""
    return train(steps, deferrable=False, **changes)
'''


class Paths:
    """The DAG of each path, and the function that walks it."""

    def __init__(self) -> None:
        self.dags: dict[str, str] = {}
        self.functions: dict[str, Path] = {}

    def add(self, *tasks: str) -> Callable[[Path], Path]:
        """Register a path: ``tasks`` are the lines of its DAG."""

        def register(function: Path) -> Path:
            self.add_dag(function.__name__, *tasks)
            self.functions[function.__name__] = function
            return function

        return register

    def add_dag(self, name: str, *tasks: str) -> str:
        self.dags[name] = "\n    ".join(tasks)
        return name

    def dag_file(self) -> str:
        return _HEAD + "".join(
            f"\nwith DAG({name!r}, schedule=None):\n    {body}\n" for name, body in self.dags.items()
        )

    def start(self, stack: Stack, names: Iterable[str]) -> dict[str, Future[None]]:
        """Begin these paths now, each in a thread; a test then only waits for its own."""
        return {name: self._begin(stack, name) for name in names}

    def _begin(self, stack: Stack, name: str) -> Future[None]:
        walked: Future[None] = Future()

        def walk() -> None:
            try:
                self.functions[name](stack, name)
            except BaseException as error:  # raised by the test that waits for this path
                walked.set_exception(error)
            else:
                walked.set_result(None)

        threading.Thread(target=walk, name=name, daemon=True).start()
        return walked


PATHS = Paths()
"""Those of the test files that were collected."""
