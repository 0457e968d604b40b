"""Every place that takes or describes an option of a training knows all that ``training_options`` lists, alike.

Whoever adds an option and forgets a place is told here which one, and what to do.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from typer.models import OptionInfo
from typer.utils import get_params_from_function

from elasticflow_airflow.api import Command, JobSubmission, Length
from elasticflow_airflow.api.training_options import DEFAULTS, GROUPS, OPTIONS, REQUIRED, Option, ValueKind, on_wire
from elasticflow_airflow.cli.submit import submit
from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.operators.decorators import DECIDED, ElasticTrainDecoratedOperator
from elasticflow_airflow.task import arguments
from elasticflow_airflow.task.task_submission import ElasticTask

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/reference/operator.md").read_text()
SIGNATURE = inspect.signature(ElasticTrainOperator.__init__).parameters
FLAGS = {p.default.param_decls[0]: p for p in get_params_from_function(submit).values() if p.default.param_decls}
OF_THE_COMMAND = {"--url", "--state-dir", "--name", "--run", "--dry-run", "--wait/--no-wait"}
"""Flags of ``elasticflow submit`` that are no options of a training."""
OF_THE_SUBMITTER = {
    *("identity", "lease_s", "orphan_s", "due_at", "next_run_at", "next_runs_at", "labels"),
    *("command.snapshot", "command.args_shown"),
}
"""Fields of a submission that nobody asks for: who submits knows them."""
OTHER_ON_THE_WIRE = {"on_past_deadline": "on_miss"}
"""Its default there: "auto" is decided before."""

each = pytest.mark.parametrize("option", OPTIONS.values(), ids=list(OPTIONS))


@each
def test_the_operator_takes_it(option: Option) -> None:
    remedy = f"add `{option.name}: {option.annotation}` to ElasticTrainOperator.__init__, and set self.{option.name}"
    assert option.name in SIGNATURE, remedy
    parameter = SIGNATURE[option.name]
    default = REQUIRED if parameter.default is parameter.empty else parameter.default
    assert (parameter.annotation, default) == (option.annotation, option.default), remedy
    made = ElasticTrainOperator(task_id="train", script="a.py", steps=1, global_batch_size=8, best_effort=True)
    assert hasattr(made, option.name), remedy


@each
def test_a_value_of_its_kind_is_checked(option: Option) -> None:
    assert option.kind in arguments._CHECKS, (
        f"write a check for {option.kind} in task/arguments.py, and add it to _CHECKS"
    )
    assert (option.kind is ValueKind.CHOICE) == bool(option.choices)
    with pytest.raises(ValueError, match=re.escape(option.name)):
        arguments.check_each({option.name: object()})


@each
def test_what_is_no_template_field_refuses_a_template(option: Option) -> None:
    assert option.template == (option.name in ElasticTrainOperator.template_fields)
    assert option.template == (option.name in ElasticTrainDecoratedOperator.template_fields)
    if not option.template and option.kind is not ValueKind.PATTERN:
        with pytest.raises(arguments.ArgumentError, match=f"{option.name} is no template field"):
            arguments.check_each({option.name: "{{ params.one }}"})


@each
def test_the_wire_has_a_field_for_it(option: Option) -> None:
    if option.wire is None:
        assert not option.flag, "what a command line takes must be sent"
        return
    *group, name = option.wire.split(".")
    fields = {"command": Command, "length": Length}[group[0]].model_fields if group else JobSubmission.model_fields
    assert name in fields, f"add {name} to the wire's model (api/submission.py), and `make reference`"
    field, default = fields[name], DEFAULTS[option.name]
    if get_origin(field.annotation) is Literal and option.name not in OTHER_ON_THE_WIRE:
        assert get_args(field.annotation) == option.choices
    if field.is_required():
        assert option.default is REQUIRED
    else:
        said = field.get_default(call_default_factory=True)
        assert (said or None) == (OTHER_ON_THE_WIRE.get(option.name, default) or None)


@each
def test_the_command_line_has_its_flag(option: Option) -> None:
    if option.flag is None:
        return
    assert option.flag in FLAGS
    told = FLAGS[option.flag].default
    assert isinstance(told, OptionInfo)
    assert option.help, f"{option.flag} has no help: give the option help="
    assert told.help == option.help
    assert (None if told.default == [] else told.default) == option.default


@each
def test_its_page_and_the_docstring_describe_it(option: Option) -> None:
    remedy = "write what it means below the option in api/training_options.py, then `make reference`"
    mark = " **T**" if option.template else ""
    assert f"| `{option.name}`{mark} | `" in PAGE, remedy
    assert f":param {option.name}: " in (inspect.getdoc(ElasticTrainOperator) or ""), remedy


def test_no_place_knows_more() -> None:
    own = {name for name, one in SIGNATURE.items() if one.kind is one.KEYWORD_ONLY} & set(OPTIONS)
    taken = {name for name in SIGNATURE if name not in ("self", "kwargs")}
    assert taken == own == set(OPTIONS), "describe it in api/training_options.py"
    assert set(FLAGS) - OF_THE_COMMAND == {one.flag for one in OPTIONS.values() if one.flag}
    assert set(re.findall(r"^\| `(\w+)`(?: \*\*T\*\*)? \| `", PAGE, re.MULTILINE)) == set(OPTIONS)
    asked = {one.wire for one in OPTIONS.values() if one.wire}
    nested: dict[str, Any] = {"command": Command, "length": Length}
    fields = {
        f"{name}.{inner}" if name in nested else name
        for name in JobSubmission.model_fields
        for inner in (nested[name].model_fields if name in nested else [""])
    }
    assert fields - OF_THE_SUBMITTER == asked
    assert sum(len([o for o in vars(g).values() if isinstance(o, Option)]) for g in GROUPS) == len(OPTIONS)


def test_a_function_decides_what_airflow_need_not_know_before() -> None:
    undecided = {"deadline_of", "on_at_risk", "on_promote", "deferrable", "elasticflow_conn_id"}
    assert set(OPTIONS) - DECIDED == undecided


def test_what_a_submission_reads_of_a_task_are_options() -> None:
    read = {name for kind in ElasticTask.__mro__ for name in vars(kind).get("__annotations__", {})} - {"task_id"}
    assert read <= set(OPTIONS)


def test_values_go_to_their_fields() -> None:
    values = {"steps": 5, "python": "/usr/bin/python3", "deadline": 7.0, "seed": 1, "deferrable": True}
    assert on_wire(values) == {
        "length": {"steps": 5},
        "command": {"python": "/usr/bin/python3"},
        "deadline_at": 7.0,
        "seed": 1,
    }


def test_flags_read_what_they_take() -> None:
    read = {name: FLAGS[name].annotation for name in ("--steps", "--value", "--best-effort", "--env", "--deadline")}
    assert read == {
        "--steps": int | None,
        "--value": float,
        "--best-effort": bool,
        "--env": list[str],
        "--deadline": str | None,
    }
