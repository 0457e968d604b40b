"""Every night: fine-tune a pretrained BERT on yesterday's text, twice, each by its deadline; publish the better one.

``finetune_quick`` is the safety net: half of the layers, one pass, ready early. ``finetune_thorough`` trains
everything for longer and is due when ``publish`` must be done. Both start from yesterday's weights of the same task.
They run side by side on whatever slots there are; nobody says how many workers, the service decides and changes it.

``make demo`` runs this file for two days under ``dag.test()``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

from elasticflow_airflow.operators import ElasticTrainOperator

CODE = Path(__file__).parent / "bert"
TEST_ROWS = 300
QUICK_TOKENS, THOROUGH_TOKENS = 32, 48
WIDE_MARGIN = 0.15
"""By how much a model must beat the majority class to be published."""


def home() -> Path:
    """Where the texts, results and published models go."""
    default = Path(os.environ.get("AIRFLOW_HOME", "~/airflow")) / "daily_bert"
    return Path(os.environ.get("DAILY_BERT_HOME", default)).expanduser()


with DAG(
    dag_id="daily_bert_finetune",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    params={
        "quick_by": Param("06:30", type="string", description="when the quick model must be there"),
        "train_rows": Param(1152, type="integer", minimum=96, description="how many texts a day trains on"),
        "thorough_epochs": Param(3, type="integer", minimum=1, description="how long the thorough model trains"),
        "publish_by": Param("07:30", type="string", description="when the better model must be published"),
    },
    default_args={"retries": 1, "retry_delay": timedelta(seconds=10)},
    tags=["elasticflow", "example"],
    doc_md=__doc__,
) as dag:

    @task
    def extract() -> dict[str, Any]:
        """Collect yesterday's docstrings; the models never see a module of the test split."""
        from bert import docstrings

        context = get_current_context()
        run, train_rows = context["dag_run"], context["params"]["train_rows"]
        day: date = (run.logical_date or run.run_after).date()
        rows = docstrings.extract(day, train_rows=train_rows, test_rows=TEST_ROWS)
        folder = home() / "data" / day.isoformat()
        docstrings.write(rows.train, folder / "train.jsonl")
        docstrings.write(rows.test, folder / "test.jsonl")
        modules = len({row.module for row in rows.train})
        print(f"{len(rows.train)} docstrings of {modules} modules, {len(rows.test)} to test on, in {folder}")
        return {"day": day.isoformat(), "path": str(folder), "rows": len(rows.train)}

    data = "{{ ti.xcom_pull('extract')['path'] }}"
    rows = "{{ ti.xcom_pull('extract')['rows'] }}"

    quick = ElasticTrainOperator(
        task_id="finetune_quick",
        script="bert/train_bert.py",
        script_args=["--data", data, "--max-length", QUICK_TOKENS, "--top-layers", 3, "--lr", 3e-4],
        epochs=1,
        samples=rows,
        global_batch_size=32,
        deadline="{{ params.quick_by }}",
        init_from="latest",
    )

    thorough = ElasticTrainOperator(
        task_id="finetune_thorough",
        script="bert/train_bert.py",
        script_args=["--data", data, "--max-length", THOROUGH_TOKENS, "--top-layers", 6, "--lr", 2e-4],
        epochs="{{ params.thorough_epochs }}",
        samples=rows,
        global_batch_size=32,
        deadline="{{ params.publish_by }}",
        deadline_of="publish",
        downstream_reserve=timedelta(minutes=1),
        init_from="latest",
    )

    @task
    def evaluate(source: dict[str, Any], quick: dict[str, Any], thorough: dict[str, Any]) -> dict[str, Any]:
        """Compare both models with guessing and with a probe; fails unless fine-tuning was worth it."""
        out = Path(source["path"]) / "evaluation.json"
        # A process of its own: torch and its threads have no place in an Airflow worker.
        command = [sys.executable, str(CODE / "evaluate.py"), "--data", source["path"], "--out", str(out)]
        command += ["--checkpoint", f"quick={quick['checkpoint_path']}:{QUICK_TOKENS}"]
        command += ["--checkpoint", f"thorough={thorough['checkpoint_path']}:{THOROUGH_TOKENS}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        print(done.stdout)
        if done.returncode:
            raise RuntimeError(f"evaluate.py ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        for name, accuracy in result["models"].items():
            if accuracy < result["majority"] + WIDE_MARGIN:
                raise AirflowFailException(
                    f"the {name} model is right on {accuracy:.1%} of the test texts, and always guessing the most"
                    f" frequent package on {result['majority']:.1%}: not {WIDE_MARGIN:.0%} better, so it is not"
                    " published. Look at the losses in the log of its fine-tuning."
                )
        return result

    @task
    def publish(source: dict[str, Any], result: dict[str, Any], trained: dict[str, dict[str, Any]]) -> str:
        """Put the better model and its card where others find it, in one rename."""
        name = max(result["models"], key=result["models"].get)
        target = home() / "published" / source["day"]
        staging = target.with_name(f".{target.name}.new")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        checkpoint = Path(trained[name]["checkpoint_path"])
        copy = shutil.copytree if checkpoint.is_dir() else shutil.copy2
        copy(checkpoint, staging / checkpoint.name)
        card = {"day": source["day"], "model": name, "checkpoint": checkpoint.name, "evaluation": result}
        card["training"] = trained[name]
        (staging / "card.json").write_text(json.dumps(card, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        staging.rename(target)
        print(f"published the {name} model, accuracy {result['models'][name]:.1%}, at {target}")
        return str(target)

    source = extract()
    source >> [quick, thorough]
    result = evaluate(source, quick.output, thorough.output)
    publish(source, result, {"quick": quick.output, "thorough": thorough.output})
