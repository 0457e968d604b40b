"""The demo: honest data, a DAG that parses without torch, a real fine-tuning, and the whole of ``make demo``."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from support import postgres

DAGS = Path(__file__).resolve().parents[2] / "dags"


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docstrings() -> Iterator[ModuleType]:
    yield load("demo_docstrings", DAGS / "bert" / "docstrings.py")
    del sys.modules["demo_docstrings"]


def test_the_data_of_a_day_are_always_the_same(docstrings: ModuleType) -> None:
    first = docstrings.extract(date(2026, 3, 1), train_rows=60, test_rows=30)
    again = docstrings.extract(date(2026, 3, 1), train_rows=60, test_rows=30)
    other = docstrings.extract(date(2026, 3, 2), train_rows=60, test_rows=30)
    assert first == again
    assert first.test == other.test
    assert first.train != other.train


def test_no_module_is_trained_on_and_tested_on(docstrings: ModuleType) -> None:
    extract = docstrings.extract(date(2026, 3, 1), train_rows=200, test_rows=100)
    assert not {row.module for row in extract.train} & {row.module for row in extract.test}
    assert {row.label for row in extract.train} == set(range(len(docstrings.PACKAGES)))


def test_the_text_does_not_name_its_package(docstrings: ModuleType) -> None:
    extract = docstrings.extract(date(2026, 3, 1), train_rows=200, test_rows=100)
    for row in (*extract.train, *extract.test):
        name = docstrings.PACKAGES[row.label]
        assert name not in row.text.lower(), (name, row.text)


def test_the_dag_is_parsed_without_torch() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import daily_bert_finetune as m; "
        "assert 'torch' not in sys.modules; "
        "print(sorted(t.task_id for t in m.dag.tasks))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(DAGS)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"},
    )
    tasks = done.stdout.strip().splitlines()[-1]
    assert tasks == "['evaluate', 'extract', 'finetune_quick', 'finetune_thorough', 'publish']"


def test_deadlines_are_stretched_on_slow_machines_only() -> None:
    pace = load("demo_pace", DAGS / "demo_kit" / "pace.py")
    assert pace.stretch_for(pace.REFERENCE_GFLOPS * 2) == 1.0
    assert pace.stretch_for(pace.REFERENCE_GFLOPS / 2) == 2.0
    assert pace.stretch_for(0.0) == pace.MOST
    assert pace.measure(2) > 0


def test_a_slow_machine_has_less_to_train() -> None:
    pace = load("demo_pace", DAGS / "demo_kit" / "pace.py")
    ordinary = pace.REFERENCE_GFLOPS
    work = [(pace.rows_for(speed), pace.epochs_for(speed)) for speed in (0.0, ordinary / 2, ordinary, 2 * ordinary)]
    assert work == [(576, 2), (576, 2), (1152, 2), (1152, 2)]
    assert pace.rows_for(0.75 * ordinary) % 96 == 0


def test_nothing_but_the_dag_is_parsed_as_one() -> None:
    program = (
        "import sys; from airflow.dag_processing.dagbag import DagBag; "
        "bag = DagBag(sys.argv[1], collect_dags=False); bag.collect_dags(sys.argv[1]); "
        "assert not bag.import_errors, bag.import_errors; print(sorted(bag.dags), len(bag.dagbag_stats))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(DAGS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == "['daily_bert_finetune'] 1"


@pytest.fixture
def database() -> Iterator[ModuleType]:
    yield load("demo_database", DAGS / "demo_kit" / "database.py")
    del sys.modules["demo_database"]


def test_without_postgresql_the_demo_says_what_to_install(
    database: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(database, "_PACKAGED", tmp_path)
    assert database.why_not() == "PostgreSQL is not there (apt-get install postgresql)"
    database.Database(tmp_path / "never-made").stop()


@pytest.mark.postgres
def test_the_database_of_the_demo_serves_and_leaves_nothing(database: ModuleType) -> None:
    if (reason := postgres.why_not()) is not None:
        pytest.skip(reason)
    import sqlalchemy as sa

    folder = Path(tempfile.mkdtemp(prefix="ef-demo-pg-"))  # Short, as its socket is below it.
    folder.rmdir()
    server = database.Database(folder)
    server.start()
    try:
        engine = sa.create_engine(server.url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.connect() as connection:
            assert connection.execute(sa.text("SELECT 6 * 7")).scalar_one() == 42
        engine.dispose()
        with pytest.raises(FileExistsError):
            database.Database(folder).start()
    finally:
        database.Database(folder).stop()  # As a later run does that finds it.
    assert not folder.exists()
    assert [p for p in _processes() if str(folder) in p] == []


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_fine_tuning_alone_beats_the_majority_class(docstrings: ModuleType, tmp_path: Path) -> None:
    extract = docstrings.extract(date(2026, 3, 1), train_rows=384, test_rows=120)
    docstrings.write(extract.train, tmp_path / "train.jsonl")
    docstrings.write(extract.test, tmp_path / "test.jsonl")
    environment = {**os.environ, "ELASTICFLOW_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    train = [sys.executable, str(DAGS / "bert/train_bert.py"), "--data", str(tmp_path), "--epochs", "2"]
    subprocess.run([*train, "--max-length", "32"], check=True, env=environment, timeout=580)
    promoted = json.loads((tmp_path / "checkpoints/promoted.json").read_text())
    checkpoint = tmp_path / "checkpoints" / promoted["path"]
    out = tmp_path / "result.json"
    evaluate = [sys.executable, str(DAGS / "bert/evaluate.py"), "--data", str(tmp_path), "--out", str(out)]
    subprocess.run([*evaluate, "--checkpoint", f"m={checkpoint}:32"], check=True, env=environment, timeout=580)
    result = json.loads(out.read_text())
    assert result["models"]["m"] > result["majority"] + 0.15


@contextmanager
def demo(tmp_path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``make demo`` into ``tmp_path``. However the block ends, nothing of it is left to keep others waiting."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "ELASTICFLOW"))}
    environment |= {"ELASTICFLOW_SLOT_LOCK_DIR": str(tmp_path / "slots"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, str(DAGS / "demo.py"), "--output", str(tmp_path / "demo"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()
    page = tmp_path / "demo" / "page.json"
    assert not page.exists() or not psutil.pid_exists(json.loads(page.read_text())["pid"])
    database = _database_dir(tmp_path / "demo")
    assert [p for p in _processes() if str(tmp_path / "demo") in p or str(database) in p] == []
    assert not database.exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_whole_demo(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        said, _ = process.communicate(timeout=1440)
    assert process.returncode == 0, said[-8000:]
    assert "All deadlines met" in said
    summary = (tmp_path / "demo" / "summary.txt").read_text()
    assert re.search(r"workers over time", summary)
    assert "accuracy: quick" in summary
    assert "watch it at http://127.0.0.1:" in said
    meanwhile = summary.partition("What happened meanwhile")[2]
    # A busy machine trains on less, which may be over, or be faster with one worker, before any of it has happened.
    is_busy = "slow, or busy" in said
    happened = ["refused at once; the earliest deadline", "finetune_thorough makes room", "kill -9", "has gone on"]
    for what in () if is_busy else happened:
        assert what in meanwhile, summary
    assert ("kill -9" in meanwhile) == ("goes on from memory" in said)
    assert "4 of 4 deadlines met" in meanwhile or (is_busy and not meanwhile)
    assert "measured: measured" not in said
    assert "1 workers" not in said


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_the_whole_demo_on_a_cluster_that_loses_a_node_and_its_leader(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install elasticflow-airflow[ray]")
    if (reason := postgres.why_not()) is not None:
        pytest.skip(reason)
    with demo(tmp_path, "--cluster") as process:
        said, _ = process.communicate(timeout=2000)
    assert process.returncode == 0, said[-8000:]
    assert "killing node1, on which a worker of " in said
    assert "node node1 is lost" in said
    killed, successor = _kill_of_the_leader(said)
    assert killed != successor
    assert "All deadlines met" in said
    summary = (tmp_path / "demo" / "summary.txt").read_text()
    meanwhile = summary.partition("What happened meanwhile")[2]
    for what in ("killing node1", f"killing {killed}, the replica that leads", f"{successor} decides, ", "to step "):
        assert what in meanwhile, summary
    assert "4 of 4 deadlines met" in meanwhile


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ctrl_c_leaves_no_process_of_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install elasticflow-airflow[ray]")
    if (reason := postgres.why_not()) is not None:
        pytest.skip(reason)
    said = ""
    with demo(tmp_path, "--cluster") as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "generation 1 trains" in line:
                process.send_signal(signal.SIGINT)
                break
        said += process.communicate(timeout=240)[0]
    assert process.returncode == 130, said
    assert " leads\n" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    said = ""
    with demo(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if "generation 1 trains" in line:
                process.send_signal(signal.SIGINT)
                break
        said += process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    assert "Traceback" not in said


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_longer_fine_tuning_beats_a_probe_on_the_frozen_encoder(docstrings: ModuleType, tmp_path: Path) -> None:
    extract = docstrings.extract(date(2026, 3, 1), train_rows=2100, test_rows=600)
    docstrings.write(extract.train, tmp_path / "train.jsonl")
    docstrings.write(extract.test, tmp_path / "test.jsonl")
    environment = {**os.environ, "ELASTICFLOW_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    train = [sys.executable, str(DAGS / "bert/train_bert.py"), "--data", str(tmp_path), "--epochs", "5"]
    subprocess.run([*train, "--max-length", "64"], check=True, env=environment)
    promoted = json.loads((tmp_path / "checkpoints/promoted.json").read_text())
    checkpoint = tmp_path / "checkpoints" / promoted["path"]
    out = tmp_path / "result.json"
    evaluate = [sys.executable, str(DAGS / "bert/evaluate.py"), "--data", str(tmp_path), "--out", str(out)]
    subprocess.run([*evaluate, "--checkpoint", f"m={checkpoint}:64"], check=True, env=environment)
    result = json.loads(out.read_text())
    assert result["models"]["m"] > result["probe"]


def _kill_of_the_leader(said: str) -> tuple[str, str]:
    """Names of the replica that was killed while it led, and of the one that decided next."""
    killed = re.search(r"killing (replica\d), the replica that leads, while finetune_\w+ trains", said)
    assert killed is not None, said[-8000:]
    decided = re.search(r"(replica\d) decides, [\d.]+ s after " + killed[1] + " was killed", said)
    assert decided is not None, said[-8000:]
    return killed[1], decided[1]


def _database_dir(output: Path) -> Path:
    """Where the demo with this output folder has its PostgreSQL."""
    program = (
        "import sys; from pathlib import Path; from demo_kit.layout import DemoPaths; "
        "print(DemoPaths(Path(sys.argv[1])).database_dir)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(output)], cwd=DAGS, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


def _processes() -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            except OSError:
                continue  # It has ended meanwhile.
    return found
