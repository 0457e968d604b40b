"""A script that means to train with a session, and ends with status 0 before its first step, is told of."""

from __future__ import annotations

import re

import pytest
from support.gang import Gang

from elasticflow_airflow.runtime.process.imports import file_of_module, leads_to_runtime
from elasticflow_airflow.runtime.protocol import UNTRAINED, ReportKind

BEFORE, AFTER = r"before runtime.init\(\) \(or the Trainer's train\(\)", r"after runtime.init\(\) and before its first"
IMPORT = "from elasticflow_airflow import runtime"
INIT = f"""
import os, pathlib, sys, time
{IMPORT}
session = runtime.init(steps=3)
here = pathlib.Path(__file__).parent
(here / f"joined{{session.rank}}").touch()
while not all((here / f"joined{{rank}}").exists() for rank in range(2)):
    time.sleep(0.01)
"""
"""Ends when both have joined: who still joins when the other leaves has failed, and rightly says so."""
SCRIPTS = {
    "import at the top": ("from elasticflow_airflow import runtime", BEFORE),
    "import in a function": ("def main():\n    import elasticflow_airflow.runtime.transformers as t", BEFORE),
    "import in a module": ("import helper", BEFORE),
    "sys.exit": ("import sys\nfrom elasticflow_airflow.runtime import session\nsys.exit()", BEFORE),
    "init and no step": (INIT, AFTER),
    "init, and sys.exit(0)": (f"{INIT}sys.exit(0)", AFTER),
    "plain": ("import sys\nprint('elasticflow_airflow.runtime')\nsys.exit(0)", None),
    "another part": ("from elasticflow_airflow import api", None),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_trains_nothing(tmp_path, name):
    text, told = SCRIPTS[name]
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(text)
    (code / "helper.py").write_text("import elasticflow_airflow.runtime")
    with Gang(tmp_path, code / "train.py", global_batch_size=8) as run:
        run.plan("w0", "w1")
        assert run.finish() == {"w0": 0, "w1": 0}
        reports = [report for report in run.reports() if report.kind is not ReportKind.USES_SESSION]
        assert all(report.kind is ReportKind.FAILED and report.data["kind"] == UNTRAINED for report in reports)
        assert len(reports) == (told is not None), "one worker says it for all"
        if told:
            assert re.search(told, reports[0].data["message"])


@pytest.mark.parametrize(
    ("script", "uses"),
    [
        (f"{IMPORT}\nimport os\nos._exit(0)", True),
        pytest.param(f"{INIT}os._exit(0)", True, id="init", marks=pytest.mark.slow),
        pytest.param("import os, helper\nos._exit(0)", True, marks=pytest.mark.slow),
        ("import os\nfrom package.deep import thing\nos._exit(0)", True),
        ("import os, plain, json.decoder\nos._exit(0)", False),
    ],
)
def test_a_script_that_leaves_abruptly_has_said_whether_it_means_to_train_with_a_session(tmp_path, script, uses):
    code = tmp_path / "code"
    (code / "package/deep").mkdir(parents=True)
    (code / "train.py").write_text(script)
    (code / "plain.py").write_text("import os")
    (code / "helper.py").write_text("import os, elasticflow_airflow.runtime.lightning")
    (code / "package/__init__.py").write_text("")
    (code / "package/deep/__init__.py").write_text("from .. import other as thing")
    (code / "package/other.py").write_text("def train():\n    from elasticflow_airflow import runtime")
    with Gang(tmp_path, code / "train.py", global_batch_size=8) as run:
        run.plan("w0", "w1")
        assert run.finish() == {"w0": 0, "w1": 0}
        assert [(report.kind, report.rank) for report in run.reports()] == [(ReportKind.USES_SESSION, 0)] * uses


def test_a_module_that_is_run_and_code_that_is_no_python(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__main__.py").write_text("from app.loop import train")
    (tmp_path / "app/loop.py").write_text(f"import app.loop, torn\n{IMPORT}")
    (tmp_path / "torn.py").write_text("def (")
    assert leads_to_runtime(file_of_module("app", tmp_path), tmp_path)
    assert leads_to_runtime(file_of_module("app.loop", tmp_path), tmp_path)
    assert not leads_to_runtime(file_of_module("torn", tmp_path), tmp_path)
    assert not leads_to_runtime(file_of_module("http.server", tmp_path), tmp_path)
