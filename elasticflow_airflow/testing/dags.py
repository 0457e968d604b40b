"""DAGs for a test: read from a file or used as given, and registered in the metadata database.

Imports Airflow inside its functions: this module is loaded before the private home exists.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.sdk import DAG

_BUNDLE = "dags-folder"


class DagError(Exception):
    """There is no DAG to run; the message says what was found instead."""


def find_dag(source: Any, dag_id: str | None = None) -> DAG:
    """Return a DAG as given, or read it from a file. Raises DagError.

    ``dag_id`` selects the DAG of a file that defines several.
    """
    from airflow.sdk import DAG

    if isinstance(source, DAG):
        return source
    if isinstance(source, (str, Path)):
        return _read(Path(source).expanduser().absolute(), dag_id)
    if isinstance(source, ModuleType) and source.__file__ is not None:
        return _read(Path(source.__file__), dag_id)
    if callable(source):
        name = getattr(source, "__name__", "it")
        raise DagError(f"{name} is a function, not a DAG: decorated with @dag it makes one when called: {name}()")
    raise DagError(f"{source!r} is a {type(source).__name__}: give a DAG, or the path of a file that defines one")


def _read(path: Path, dag_id: str | None) -> DAG:
    from airflow.dag_processing.dagbag import DagBag

    if not path.exists():
        raise DagError(f"there is no file {path}; relative paths count from {Path.cwd()}")
    bag = DagBag(path, safe_mode=False, bundle_path=path if path.is_dir() else path.parent, bundle_name=_BUNDLE)
    if bag.import_errors:
        said = "\n".join(f"{file}: {trace}" for file, trace in bag.import_errors.items())
        raise DagError(f"{path} cannot be imported:\n{said}")
    if not bag.dags:
        raise DagError(
            f"{path} defines no DAG: a function decorated with @dag must be called, and the DAG must stand at the top"
            " level of the module"
        )
    known = ", ".join(sorted(bag.dags))
    if dag_id is None and len(bag.dags) > 1:
        raise DagError(f"{path} defines several DAGs ({known}): say which one with dag_id=")
    if dag_id is not None and dag_id not in bag.dags:
        raise DagError(f"{path} defines no DAG {dag_id!r}, only {known}")
    return bag.dags[dag_id] if dag_id is not None else next(iter(bag.dags.values()))


def store_dag(dag: DAG) -> None:
    """Write the serialized DAG to the database: ``dag.test()`` requires it there."""
    from airflow.dag_processing.collection import update_dag_parsing_results_in_db
    from airflow.models.dagbundle import DagBundleModel
    from airflow.serialization.serialized_objects import LazyDeserializedDAG
    from airflow.utils.session import create_session

    errors: dict[tuple[str, str], str] = {}
    with create_session() as session:
        session.merge(DagBundleModel(name=_BUNDLE))
        session.flush()
        parsed = [LazyDeserializedDAG.from_dag(dag)]
        update_dag_parsing_results_in_db(_BUNDLE, None, parsed, errors, None, set(), session)
    if errors:
        said = "\n".join(errors.values())
        raise DagError(f"the DAG {dag.dag_id} cannot be serialized, as every Airflow does with it:\n{said}")


def without_deadline_alerts(dag: DAG) -> DAG:
    """Return the DAG, or a copy without its deadline alerts, with which ``dag.test()`` would fail.

    ``dag.test()`` fails at the end of a run of a DAG with ``deadline=DeadlineAlert(...)`` ("'dict' object has no
    attribute 'hex'", seen in 3.3.2). The tasks are shared and still see the DAG with its alerts: deadlines derived from
    them work as usual.
    """
    if not getattr(dag, "deadline", None):
        return dag
    shadow = copy.copy(dag)
    shadow.deadline = None
    return shadow


@contextmanager
def without_retry_delays(dag: DAG) -> Iterator[None]:
    """Retry failed tasks at once: the delay would pass in real time."""
    before = [(task, task.retry_delay) for task in dag.task_dict.values() if task.retries]
    try:
        for task, _ in before:
            task.retry_delay = timedelta(0)
        yield
    finally:
        for task, delay in before:
            task.retry_delay = delay
