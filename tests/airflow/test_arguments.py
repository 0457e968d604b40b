"""Every mistake that can be known at DAG parse is refused there, naming the argument, its value and the remedy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.task.arguments import ArgumentError, count, present, rendered_texts, secret_reference, target

GOOD = {"task_id": "train", "script": "train.py", "steps": 10, "global_batch_size": 8, "best_effort": True}
DEADLINE = {**GOOD, "best_effort": False, "deadline": "07:30"}


def make(**arguments):
    return ElasticTrainOperator(**arguments)


MORNING = datetime(2026, 2, 3, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({**GOOD, "best_effort": False}, "neither deadline=, deadline_of= nor best_effort=True"),
        ({**GOOD, "deadline": "07:30"}, "best_effort=True beside deadline='07:30'"),
        ({**GOOD, "deadline_of": "publish"}, "best_effort=True beside deadline_of='publish'"),
        ({**GOOD, "epochs": 2}, "steps=10 stands beside epochs=2"),
        ({**GOOD, "samples": 20}, "steps=10 stands beside .*samples=20"),
        ({**GOOD, "module": "a.b"}, "exactly one of script= and module="),
        ({**GOOD, "script": None}, "exactly one of script= and module="),
        ({**GOOD, "steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({**GOOD, "steps": 2.5}, "steps=2.5 must be a whole number"),
        ({**GOOD, "global_batch_size": 0}, "global_batch_size=0"),
        ({**GOOD, "global_batch_size": None}, "global_batch_size=None"),
        ({**GOOD, "min_workers": 3}, "min_workers=3 must be a power of two"),
        ({**GOOD, "max_workers": 6}, "max_workers=6 must be a power of two"),
        ({**GOOD, "min_workers": 4, "max_workers": 2}, "max_workers=2 is less than min_workers=4: give at least 4"),
        ({**GOOD, "max_workers": 16}, "max_workers=16 is more than global_batch_size=8"),
        ({**GOOD, "global_batch_size": 12, "min_workers": 8}, "at most 4 workers, or consistency="),
        ({**GOOD, "consistency": "sloppy"}, "consistency='sloppy' is none of 'consistent', 'fast'"),
        ({**GOOD, "logical_workers": 3}, "logical_workers=3 must be a power of two"),
        ({**GOOD, "logical_workers": 16}, "logical_workers=16 does not divide global_batch_size=8.*logical_workers=8"),
        ({**GOOD, "logical_workers": 2, "max_workers": 4}, "max_workers=4 is more than logical_workers=2"),
        ({**GOOD, "logical_workers": 2, "consistency": "fast"}, "leave one of the two out"),
        ({**GOOD, "scaling_curve": {3: 1.0}}, "a key of scaling_curve=3"),
        ({**GOOD, "scaling_curve": {2: 0.0}}, r"scaling_curve\[2\]=0.0"),
        ({**GOOD, "scaling_curve": {}}, "must map workers to steps/s"),
        ({**GOOD, "target_loss": float("inf")}, "target_loss=inf must be a finite number"),
        ({**GOOD, "target_loss": "low"}, "target_loss='low' must be a finite number"),
        ({**GOOD, "target_loss": True}, "target_loss=True must be a finite number"),
        ({**GOOD, "steps": None, "target_loss": 0.5}, "target_loss=0.5 needs steps= or epochs= as well"),
        ({**GOOD, "steps": None, "target_loss": "{{ params.loss }}"}, "target_loss= needs steps= or epochs= as well"),
        ({**GOOD, "target_loss": 0.5, "progress_regex": "(x)"}, "only a script that uses the session"),
        ({**GOOD, "on_reject": "explode"}, "on_reject='explode' is none of 'fail'"),
        ({**GOOD, "on_miss": "shrug"}, "on_miss='shrug' is none of"),
        ({**GOOD, "on_past_deadline": "no"}, "on_past_deadline='no' is none of"),
        ({**GOOD, "on_reject": "renegotiate"}, "need latest_deadline="),
        ({**DEADLINE, "on_reject": "late"}, "on_reject='late', latest_deadline=None: .*need latest_deadline="),
        (
            {**DEADLINE, "deadline": timedelta(hours=2), "on_reject": "late", "latest_deadline": timedelta(hours=2)},
            r"latest_deadline=datetime.timedelta\(seconds=7200\) is not later than deadline=",
        ),
        ({**DEADLINE, "latest_deadline": "09:00"}, "nothing else takes it"),
        ({**GOOD, "value": 0}, "value=0 must be"),
        ({**GOOD, "env": {"A-B": "1"}}, "env names 'A-B'"),
        ({**GOOD, "env": {"ELASTICFLOW_SESSION": "1"}}, "which the service itself sets"),
        ({**GOOD, "env": ["A"]}, "env must map names"),
        ({**GOOD, "env": {"A": None}}, r"env\['A'\]=None is a NoneType: give text, a number or a template"),
        ({**GOOD, "env": {"A": {"x": 1}}}, r"env\['A'\]={'x': 1} is a dict"),
        ({**GOOD, "elasticflow_conn_id": None}, "elasticflow_conn_id=None: give a value, or leave the argument out"),
        ({**DEADLINE, "deadline": timedelta.max}, "deadline=.* lies beyond the year 9999"),
        (
            {**DEADLINE, "deadline": MORNING, "on_reject": "late", "latest_deadline": MORNING},
            r"latest_deadline=datetime.datetime\(.*is not later than deadline=",
        ),
        ({**GOOD, "secret_env": {"TOKEN": "hunter2"}}, "secrets themselves do not belong in a DAG file"),
        ({**GOOD, "secret_env": {"TOKEN": "conn:hub"}}, "'conn:hub.password'"),
        ({**GOOD, "env": {"A": "1"}, "secret_env": {"A": "conn:hub.password"}}, "say it once"),
        ({**GOOD, "script_args": "--data x"}, "give a list"),
        ({**DEADLINE, "deadline": "half past"}, "deadline='half past' is not"),
        ({**DEADLINE, "deadline": 7}, "deadline=7 is a int"),
        ({**DEADLINE, "downstream_reserve": timedelta(-1)}, "downstream_reserve="),
        ({**DEADLINE, "deadline_of": 3}, "deadline_of=3"),
        ({**GOOD, "script": Path("train.py")}, "script=.*is a path object: give a str"),
        ({**GOOD, "script": ""}, "script='' is empty"),
        ({**GOOD, "script": None, "module": 3}, "module=3 is a int: give a str"),
        ({**GOOD, "working_dir": 3}, "working_dir=3 is a int"),
        ({**GOOD, "python": ["python"]}, r"python=\['python'\] is a list"),
        ({**GOOD, "requirements": 3}, "requirements=3 is a int: give a list"),
        ({**GOOD, "requirements": ["numpy", "-e ."]}, r"requirements\[1\]='-e \.': is an option of pip"),
        ({**GOOD, "requirements": ["a @ https://me:word@b/c"]}, r"'a @ https://\*\*\*@b/c': has a password"),
        ({**GOOD, "init_from": True}, "init_from=True is a bool"),
        ({**GOOD, "elasticflow_conn_id": ""}, "elasticflow_conn_id='' is empty"),
        ({**GOOD, "script_args": {"data": 3}}, "script_args={'data': 3} is a dict: give a list"),
        ({**GOOD, "script_args": ["--n", None]}, r"script_args\[1\]=None is a NoneType"),
        ({**GOOD, "script_args": [["--n", 3]]}, r"script_args\[0\]=\['--n', 3\] is a list"),
        ({**GOOD, "progress_regex": "step ("}, "progress_regex='step \\(' is no regular expression"),
        ({**GOOD, "progress_regex": "step"}, "has no group"),
        ({**GOOD, "progress_file": 3}, "progress_file=3 is a int"),
        ({**GOOD, "value": float("nan")}, "value=nan must be a finite number"),
        ({**GOOD, "value": "much"}, "value='much' must be"),
        ({**GOOD, "best_effort": "yes"}, "best_effort='yes' must be True or False"),
        ({**GOOD, "deferrable": "yes"}, "deferrable='yes' must be True or False"),
        ({**GOOD, "scaling_curve": {1: float("inf")}}, "finite and greater than 0"),
        ({**GOOD, "scaling_curve": [1.0]}, "must map workers to steps/s"),
        ({**GOOD, "min_workers": True}, "min_workers=True must be a power of two"),
        ({**GOOD, "secret_env": ["TOKEN"]}, "secret_env must map names"),
        ({**GOOD, "on_at_risk": "shout"}, "on_at_risk='shout' must be a callable, or where to import one from"),
        ({**GOOD, "on_at_risk": [print, 3]}, "on_at_risk=3 must be a callable"),
        ({**GOOD, "on_promote": "mlflow register"}, "on_promote='mlflow register' must be a callable"),
        ({**DEADLINE, "downstream_reserve": 300}, "downstream_reserve=300 must be a timedelta"),
        ({**GOOD, "on_reject": ["fail"]}, "on_reject="),
        ({**GOOD, "value": None}, "value=None: give a value, or leave the argument out for its default"),
        ({**GOOD, "min_workers": None}, "min_workers=None"),
        ({**GOOD, "value": "{{ params.value }}"}, "value is no template field: give a value, or let a function decide"),
        ({**GOOD, "on_miss": "{{ params.miss }}"}, "on_miss is no template field"),
    ],
)
def test_refused_at_parse(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        make(**arguments)
    assert "hunter2" not in str(caught.value)


def test_accepted():
    make(**GOOD)
    make(**DEADLINE, deadline_of="publish", secret_env={"A": "conn:my.hub.extra.api.key", "B": "conn:hub.login"})
    make(**{**DEADLINE, "deadline": "{{ params.by }}", "steps": "{{ params.steps }}"})
    make(**GOOD, logical_workers=4, max_workers=4)
    make(**GOOD, target_loss=0.35)
    make(**{**GOOD, "steps": None}, epochs=3, target_loss="{{ params.loss }}")
    make(**{**GOOD, "global_batch_size": 7}, consistency="fast", min_workers=4)
    make(
        **GOOD, progress_regex=r"step (?P<step>\d{{1,9}})", on_at_risk=["my_team.alerts.tell", print], on_promote=print
    )
    make(**{**GOOD, "global_batch_size": "{{ params.batch }}"}, logical_workers=64)
    late = make(
        task_id="t",
        module="a.b",
        epochs=2,
        samples="{{ ti.xcom_pull('x') }}",
        global_batch_size=1,
        deadline=timedelta(hours=1),
        on_reject="renegotiate",
        latest_deadline=timedelta(hours=2),
    )
    assert late.deferrable is True
    assert not {"secret_env", "consistency", "logical_workers"} & set(late.template_fields)
    assert secret_reference("A", "conn:my.hub.extra.api.key") == ("my.hub", "extra", "api.key")


def test_output_of_another_task_is_left_for_run_time():
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG

    with DAG("d", schedule=None):
        upstream = EmptyOperator(task_id="extract")
        task = make(**{**GOOD, "steps": None, "samples": upstream.output["rows"]})
    assert task.upstream_task_ids == {"extract"}
    with pytest.raises(ArgumentError, match="samples rendered to 'None': the upstream task 'extract' returned nothing"):
        count("samples", None, upstream.output["rows"])


def test_missing_xcom_is_named():
    given = "{{ ti.xcom_pull(task_ids='extract')['rows'] }}"
    with pytest.raises(ArgumentError, match="samples rendered to 'None': the upstream task 'extract' returned nothing"):
        count("samples", "None", given)
    with pytest.raises(ArgumentError, match=r"script_args\[1\] rendered to 'None': the upstream task 'x'"):
        rendered_texts("script_args", ["--n", "None"], ["--n", "{{ ti.xcom_pull('x') }}"])
    assert rendered_texts("script_args", ["--n", 3], ["--n", 3]) == ("--n", "3")
    present("init_from", None, None)


def test_the_text_none_that_an_author_wrote_is_taken():
    assert rendered_texts("script_args", ["--cap", "None"], ["--cap", "None"]) == ("--cap", "None")
    present("env['CAP']", "None", "None")
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG

    with DAG("d", schedule=None):
        upstream = EmptyOperator(task_id="extract")
    assert rendered_texts("script_args", ["--cap", "None"], upstream.output) == ("--cap", "None")
    with pytest.raises(ArgumentError, match=r"script_args\[1\] rendered to 'None': the upstream task 'extract'"):
        rendered_texts("script_args", ["--cap", None], upstream.output)


@pytest.mark.parametrize("value", ["12.5", "", "-1", "many", 0, True])
def test_counts_that_are_none(value):
    with pytest.raises(ArgumentError, match=r"samples=.*whole number"):
        count("samples", value, "{{ params.n }}")


def test_target():
    assert target("0.35", "{{ params.loss }}") == 0.35
    assert target(None, None) is None
    with pytest.raises(
        ArgumentError, match=r"target_loss='nan' \(rendered from '{{ params.loss }}'\) must be a finite"
    ):
        target("nan", "{{ params.loss }}")
    with pytest.raises(ArgumentError, match="target_loss rendered to 'None'"):
        target("None", "{{ ti.xcom_pull('x') }}")


def test_counts():
    assert count("samples", " 12 ", "{{ params.n }}") == 12
    assert count("samples", 12, 12) == 12
    assert count("samples", None, None) is None
