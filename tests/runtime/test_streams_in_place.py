"""Workers come, go and die while they train on a stream; the optimizer counts each sample's uses. Real processes.

See tests/support/train_stream.py for how it counts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from support.gang import Gang

from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.runtime.stores.manifest import promote, verify_candidate

SCRIPT = Path(__file__).parents[1] / "support" / "train_stream.py"
EPOCHS = 30


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    draw = random.Random(1)
    for shard in range(5):
        rows = [
            {"number": number, "inputs": [draw.gauss(0, 1) for _ in range(6)], "label": draw.randrange(3)}
            for number in range(shard * 25, shard * 25 + 25)
        ]
        (folder / f"{shard}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


class Paced(Gang):
    """A gang whose steps take as long as the test says, and may say anew."""

    def __init__(self, name: str, files: Path, *, kind: str, fetchers: int) -> None:
        env = {"TEST_FILES": str(files), "TEST_STREAM": kind, "TEST_FETCHERS": str(fetchers), "TEST_PACE": name}
        self._pace = files / name
        super().__init__(
            files.parent / name,
            SCRIPT,
            env,
            epochs=EPOCHS,
            global_batch_size=16,
            logical_workers=4,
            checkpoint_interval_s=0.2,
        )

    def pace(self, step_s: float) -> None:
        """From the next steps on."""
        fresh = self._pace.with_suffix(".new")
        fresh.write_text(str(step_s))
        fresh.replace(self._pace)


def weights(run: Gang) -> set[str]:
    return {line.split()[1] for line in run.output() if line.startswith("WEIGHTS")}


def books(run: Gang) -> dict[int, set[tuple[str, str]]]:
    found: dict[int, set[tuple[str, str]]] = {}
    for line in run.output():
        if line.startswith("EPOCH"):
            _, epoch, _, least, most = line.split()
            found.setdefault(int(epoch), set()).add((least, most))
    return found


def go_on_after(run: Gang, steps: int) -> None:
    """Let it train that many more steps."""
    target = run.step() + steps
    run.wait(lambda: run.step() >= target or bool(run.reports(ReportKind.FINISHED)), "progress")
    assert not run.reports(ReportKind.FINISHED), "it was over too soon\n" + run.story()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fetchers"), [("files", 0), ("datasets", 1)])
def test_a_stream_is_used_exactly_once_whatever_happens_to_its_workers(files, kind, fetchers):
    if kind == "datasets":
        pytest.importorskip("datasets", reason="Hugging Face datasets are not installed")
    with (
        Paced("alone", files, kind=kind, fetchers=0) as alone,
        Paced("many", files, kind=kind, fetchers=fetchers) as run,
    ):
        alone.pace(0.0)
        alone.plan("alone")
        run.pace(0.1)
        run.plan("a", "b")
        go_on_after(run, 5)
        run.kill("a")
        run.wait(lambda: run.processes["a"].poll() is not None, "its death")
        run.plan("b", lost=["a"])
        run.wait_until_begun()
        go_on_after(run, 2)
        run.plan("b", "c")
        run.wait_until_begun()
        go_on_after(run, 3)
        run.plan("c")
        run.wait_until_begun()
        # All die, and the last checkpoint counts.
        run.wait(lambda: any(r.worker_id == "c" for r in run.reports(ReportKind.CHECKPOINT)), "a checkpoint")
        run.kill("c")
        run.wait(lambda: all(p.poll() is not None for p in run.processes.values()), "their end")
        saved = max(run.reports(ReportKind.CHECKPOINT), key=lambda report: report.step)
        promote(run.folder / "checkpoints", verify_candidate(run.folder / "checkpoints" / saved.data["path"]))
        run.plan("d", mode=RescaleMode.RESTART)
        run.wait_until_begun()
        run.pace(0.0)
        codes = run.finish()
        assert codes["d"] == 0, run.story()
        assert alone.finish() == {"alone": 0}, alone.story()
        expected = {epoch: {(f"{epoch + 1:.6f}",) * 2} for epoch in range(EPOCHS)}
        assert books(alone) == expected
        assert books(run) == expected, run.story()
        assert weights(run) == weights(alone), run.story()
        warned = [r.data["message"] for r in run.reports(ReportKind.WARNING)]
        assert not [message for message in warned if "reading through" in message], warned
