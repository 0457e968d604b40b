"""``@task.elastic_train``: a function in the DAG file decides at run time what is trained.

The function runs in the Airflow worker, so it may read XComs, connections and files. The training runs where the
service places it, and the operator submits and awaits it as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from airflow.sdk.bases.decorator import DecoratedOperator, TaskDecorator, determine_kwargs, task_decorator_factory

from elasticflow_airflow.api.training_options import OPTIONS
from elasticflow_airflow.operators.elastic_train import ElasticTrainOperator
from elasticflow_airflow.settings import AirflowSettings
from elasticflow_airflow.task.arguments import ArgumentError, check_each
from elasticflow_airflow.task.mapping import NamesCheckedFunction
from elasticflow_airflow.task.task_submission import Prepared, RunFacts
from elasticflow_airflow.waiting.task_memory import TaskMemory

DECIDED = frozenset(name for name, option in OPTIONS.items() if option.decidable)
"""Arguments that the function may return. Excludes what Airflow needs before it runs: connection, ``deadline_of``."""


class ElasticTrainDecoratedOperator(DecoratedOperator, ElasticTrainOperator):
    """An ElasticTrainOperator that takes some of its arguments from a function; see ``elastic_train_task``."""

    template_fields: Sequence[str] = (*DecoratedOperator.template_fields, *ElasticTrainOperator.template_fields)
    template_fields_renderers = {  # noqa: RUF012 - Airflow's declaration
        **DecoratedOperator.template_fields_renderers,
        **ElasticTrainOperator.template_fields_renderers,
    }
    custom_operator_name = "@task.elastic_train"
    overwrite_rtif_after_execution = True
    """The UI shows the rendered fields with the values that the function returned."""

    def __init__(self, *, global_batch_size: int | str | None = None, **kwargs: Any) -> None:
        self._is_decided = False
        super().__init__(global_batch_size=global_batch_size, **kwargs)

    def _check(self) -> None:
        """At DAG parse, check only the arguments that are given: the function may supply the missing ones."""
        if self._is_decided:
            super()._check()
        else:
            check_each({name: getattr(self, name) for name in OPTIONS})

    def _takes_time_from_dag(self) -> bool:
        """Return False until the function has run, because it may decide the deadline."""
        return self._is_decided and super()._takes_time_from_dag()

    def _prepare(self, facts: RunFacts, memory: TaskMemory, settings: AirflowSettings) -> Prepared:
        """Call the function, once per attempt, then prepare with what it returned. Raises ArgumentError."""
        if not self._is_decided:
            self._decide()
        return super()._prepare(facts, memory, settings)

    def _decide(self) -> None:
        context = self._context
        known = determine_kwargs(self.python_callable, self.op_args, {**dict(context), **self.op_kwargs})
        returned = self.python_callable(*self.op_args, **known)
        decided = self._read(returned)
        for name, value in decided.items():
            setattr(self, name, self.render_template(value, context) if name in self.template_fields else value)
            if name in self._given:
                self._given[name] = value
        self._is_decided = True
        self._check()
        self.log.info(
            "%s decided: %s", self._function_name, ", ".join(sorted(set(decided) - {"secret_env"})) or "nothing"
        )

    def _read(self, returned: Any) -> dict[str, Any]:
        """Convert the function's return value to operator arguments. Raises ArgumentError."""
        if returned is None:
            return {}
        if isinstance(returned, (list, tuple)):
            return {"script_args": list(returned)}
        if not isinstance(returned, Mapping):
            raise ArgumentError(
                f"{self._function_name} returned {returned!r}, a {type(returned).__name__}: return the list of the"
                " script's arguments, or a dict of the operator's arguments"
            )
        unknown = sorted(set(map(str, returned)) - DECIDED)
        if unknown:
            raise ArgumentError(
                f"{self._function_name} returned {', '.join(unknown)}: a function may decide"
                f" {', '.join(sorted(DECIDED))}; give anything else to @task.elastic_train(...)"
            )
        return dict(returned)

    @property
    def _function_name(self) -> str:
        return f"{getattr(self.python_callable, '__name__', 'the function')}()"


def elastic_train_task(python_callable: Callable[..., Any] | None = None, **kwargs: Any) -> TaskDecorator:
    """Make a function a training task: ``@task.elastic_train(script="train.py", global_batch_size=32, ...)``.

    ``kwargs`` are the arguments of ElasticTrainOperator. The function returns the list of the script's arguments, or a
    dict of operator arguments (templates in it are rendered), which override those given here, or None. It is called in
    the worker, once per attempt, before the job is submitted. Its parameters may be named after keys of Airflow's
    context, and its own arguments may be outputs of other tasks. The task's XCom is the training's result.
    """
    if python_callable is None:
        return cast("TaskDecorator", partial(elastic_train_task, **kwargs))
    made = task_decorator_factory(
        python_callable=python_callable, decorated_operator_class=ElasticTrainDecoratedOperator, **kwargs
    )
    return cast("TaskDecorator", NamesCheckedFunction.of(made))
