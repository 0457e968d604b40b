"""A script that means to train with a session, and ends with status 0 before its first step, is told of."""

from __future__ import annotations

import re

import pytest
from support.gang import Gang

from elasticflow_airflow.runtime.protocol import UNTRAINED, ReportKind

BEFORE, AFTER = r"before runtime.init\(\) \(or the Trainer's train\(\)", r"after runtime.init\(\) and before its first"
SCRIPTS = {
    "import at the top": ("from elasticflow_airflow import runtime", BEFORE),
    "import in a function": ("def main():\n    import elasticflow_airflow.runtime.transformers as t", BEFORE),
    "import in a module": ("import helper", BEFORE),
    "sys.exit": ("import sys\nfrom elasticflow_airflow.runtime import session\nsys.exit()", BEFORE),
    "init and no step": ("from elasticflow_airflow import runtime\nruntime.init(steps=3)", AFTER),
    "init, and sys.exit(0)": (
        "import sys\nfrom elasticflow_airflow import runtime\nruntime.init()\nsys.exit(0)",
        AFTER,
    ),
    "plain": ("import sys\nprint('elasticflow_airflow.runtime')\nsys.exit(0)", None),
    "another part": ("from elasticflow_airflow import wire", None),
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
        reports = run.reports()
        assert all(report.kind is ReportKind.FAILED and report.data["kind"] == UNTRAINED for report in reports)
        assert len(reports) == (told is not None), "one worker says it for all"
        if told:
            assert re.search(told, reports[0].data["message"])
