"""What users and machines do to a task: paths, each with a DAG of its own, so that all can be walked at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from support.airflow_stack import Stack

_AT_ONCE = 8
"""So many paths are walked at the same time: they mostly wait, for Airflow or for a clock. More keep its API from
answering."""

Path = Callable[[Stack, str], None]
"""Walks one path: the stack, and the id of the path's DAG."""

_HEAD = '''
import json
from datetime import timedelta
import pendulum
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, AsyncCallback, DeadlineAlert, DeadlineReference
from elasticflow_airflow.operators import ElasticTrainOperator, ElasticTrainSensor

SPEED = {1: 10.0}  # steps/s

def train(steps=10**6, *, task_id="train", fake=None, **changes):
    """A training of the modelled engine; for ever, and as best effort, unless said otherwise."""
    behaviour = {"steps_per_s": SPEED, "startup_s": 0.5, **(fake or {})}
    arguments = {
        "script": "code/train.py", "steps": steps, "global_batch_size": 8, "scaling_curve": SPEED, "max_workers": 1,
        "env": {"ELASTICFLOW_FAKE": json.dumps(behaviour)}, "retry_delay": timedelta(seconds=1),
        "best_effort": not {"deadline", "deadline_of"} & set(changes), **changes,
    }
    return ElasticTrainOperator(task_id=task_id, **arguments)

async def tell(**_):
    """A deadline alert's callback."""

ALERT = DeadlineAlert(
    reference=DeadlineReference.DAGRUN_QUEUED_AT, interval=timedelta(hours=2), callback=AsyncCallback(tell), name="slo"
)

def blocking(steps=10**6, **changes):
    """The same, waiting in its worker."""
    return train(steps, deferrable=False, **changes)
'''


class Paths:
    """The DAG of each path, and the function that walks it."""

    def __init__(self) -> None:
        self.dags: dict[str, str] = {}
        self.options: dict[str, str] = {}
        self.functions: dict[str, Path] = {}

    def add(self, *tasks: str, dag: str = "schedule=None") -> Callable[[Path], Path]:
        """Register a path: ``tasks`` are the lines of its DAG, ``dag`` the DAG's own arguments."""

        def register(function: Path) -> Path:
            self.add_dag(function.__name__, *tasks, dag=dag)
            self.functions[function.__name__] = function
            return function

        return register

    def add_dag(self, name: str, *tasks: str, dag: str = "schedule=None") -> str:
        self.dags[name] = "\n    ".join(tasks)
        self.options[name] = dag
        return name

    def dag_file(self) -> str:
        return _HEAD + "".join(
            f"\nwith DAG({name!r}, {self.options[name]}):\n    {body}\n" for name, body in self.dags.items()
        )

    def start(self, stack: Stack, names: Iterable[str]) -> dict[str, Future[None]]:
        """Begin these paths now, some at a time; a test then only waits for its own."""
        walkers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="path")
        walked = {name: walkers.submit(self.functions[name], stack, name) for name in names}
        walkers.shutdown(wait=False)
        return walked


PATHS = Paths()
"""Those of the test files that were collected."""
