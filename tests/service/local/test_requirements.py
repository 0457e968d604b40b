"""``elasticflow submit --requirements``: the real service installs what a script needs, and no other job sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.wheels import make_wheel, requirement
from typer.testing import CliRunner

from elasticflow_airflow.cli.main import app
from elasticflow_airflow.engines.local.machine.virtual_environments import FOLDER

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")


@pytest.mark.slow
def test_a_script_trains_with_what_it_requires(daemons, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ELASTICFLOW_STATE_DIR", str(daemons.state_dir("state")))
    monkeypatch.delenv("ELASTICFLOW_URL", raising=False)
    daemons.popen("state", engine="local", slots=2)
    wheel = make_wheel(tmp_path, "extra_package", module="STEPS = 3\n", requires="torch")
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.write_text(
        "import extra_package, torch\nfor step in range(extra_package.STEPS):\n    print('step', step + 1)\n"
    )
    listed = tmp_path / "requirements.txt"
    listed.write_text(f"# what the script imports\n{requirement(wheel)}\n")
    common = (
        "submit",
        script,
        "--steps",
        3,
        "--batch",
        8,
        "--best-effort",
        "--wait",
        "--progress-regex",
        r"step (\d+)",
    )

    def submit(*words: object) -> str:
        return CliRunner().invoke(app, [str(word) for word in (*common, *words)]).output

    said = submit("--requirements", listed)
    assert "not decided yet" not in said, "nobody decides on a job of best effort"
    assert "succeeded after 3 steps" in said
    assert len(list((daemons.state_dir("state") / FOLDER).iterdir())) == 1
    assert "No module named 'extra_package'" in submit("--name", "without")
    wheel.unlink()
    listed.write_text(f"{requirement(wheel)}\nnumpy<2\n")
    said = submit("--name", "gone", "--requirements", listed)
    assert "the environment for requirements= could not be built" in said
    assert wheel.name in said
    listed.write_text("-i https://example.org\n")
    assert "is an option of pip" in submit("--requirements", listed)
