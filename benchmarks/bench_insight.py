"""What insight costs: a pass of the loop with and without samples, and each question of the pages.

    python benchmarks/bench_insight.py [--jobs 32] [--passes 200] [--past 1000] [--write]

The whole service in this process, in modelled time, with workers that report twice a second. Passes with and without
samples take turns, so that the machine's moods hit both; the questions are asked of a store with a past.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from results import parser_of, show, table

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.api.insight import WhatIfRequest
from elasticflow_airflow.client import snapshot_folder
from elasticflow_airflow.engines.fake.engine import FakeEngine, fake_nodes
from elasticflow_airflow.service.assembly import assemble
from elasticflow_airflow.service.loop import samples
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.settings import ServiceSettings

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
PASS_S = 1.0


class Quiet(Notifier):
    """Wakes nobody: the passes are made by hand."""

    def wake(self) -> None:
        """Nothing."""


def submission(run: str, snapshot: str, now: float, steps: int) -> JobSubmission:
    return JobSubmission(
        identity=JobIdentity(dag_id="bench", run_id=run, task_id="train"),
        command=Command(snapshot=snapshot, script="train.py"),
        length=Length(steps=steps),
        global_batch_size=32,
        deadline_at=now + 1e6,
        scaling_curve=CURVE,
        lease_s=1e7,
        max_workers=1,
    )


def milliseconds(act: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        started = time.perf_counter()
        act()
        found.append((time.perf_counter() - started) * 1000)
    return statistics.median(found)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--past", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ef-bench-") as folder:
        measure(Path(folder), options)


def measure(base: Path, options: argparse.Namespace) -> None:
    now = 1_800_000_000.0

    def clock() -> float:
        return now

    (base / "code").mkdir()
    (base / "code" / "train.py").write_text("print()\n")
    (base / "state").mkdir()
    settings = ServiceSettings(state_dir=base / "state", verdict_wait_s=0.001)
    nodes = max(1, options.jobs // 8)
    engine = FakeEngine(fake_nodes(nodes, 8), base / "state" / "jobs", clock=clock)
    parts, reconciler, candidates = assemble(settings, engine, Quiet(), clock=clock, monotonic=clock)
    snapshot = snapshot_folder(base / "code")
    incoming = parts.snapshots.incoming()
    incoming.write_bytes(snapshot.tar)
    parts.snapshots.accept(snapshot.sha256, incoming)

    def make_pass() -> None:
        nonlocal now
        now += PASS_S
        reconciler.run_once()

    made = 0
    while made < options.past:
        for _ in range(min(options.jobs, options.past - made)):
            one = submission(f"past{made}", snapshot.sha256, now, 300)
            parts.job_service.submit(one.identity.job_id, one)
            made += 1
        while any(not job.state.terminal for job in parts.job_service.list_jobs(None, None, True, 1000)):
            make_pass()
    for number in range(options.jobs):
        one = submission(f"now{number}", snapshot.sha256, now, 10**6)
        parts.job_service.submit(one.identity.job_id, one)
    for _ in range(20):
        make_pass()
    live = parts.job_service.list_jobs("running", None, True, 1000)
    assert len(live) == options.jobs, f"only {len(live)} of {options.jobs} jobs run"

    take = samples.take
    with_s: list[float] = []
    without_s: list[float] = []
    for number in range(2 * options.passes):
        off = number % 2
        samples.take = (lambda *_, **__: None) if off else take  # type: ignore[assignment]  # to compare
        started = time.perf_counter()
        make_pass()
        (without_s if off else with_s).append(time.perf_counter() - started)
    samples.take = take
    on_ms, off_ms = (1000 * statistics.median(found) for found in (with_s, without_s))
    passes = [
        ["without samples", f"{off_ms:.1f}", ""],
        ["with samples", f"{on_ms:.1f}", f"{on_ms / off_ms:.2f}"],
    ]
    said = f"A pass over {options.jobs} jobs that report, median of {options.passes} each, in turns:"
    show("passes", [said, "", *table(["", "ms", "times without"], passes)], options)
    job_id = live[0].job_id
    services, forecasts, capacity = parts.insight, parts.forecasts, parts.capacity
    assert services is not None
    assert forecasts is not None
    assert capacity is not None
    questions: dict[str, Callable[[], object]] = {
        "cluster": services.insight.cluster,
        "history of all": lambda: services.insight.history(now - 30 * 86400, now + 86400, 96),
        "history of an hour": lambda: services.insight.history(now - 3600, now + 3600, 96),
        "story": lambda: services.insight.story(job_id, None),
        "runs": lambda: services.insight.runs(job_id, 10),
        "a copy of the scheduler": reconciler.copy_scheduler,
        "forecast": lambda: forecasts.forecast(48.0),
        "capacity": lambda: capacity.capacity(48.0),
        "what if": lambda: services.what_if.ask(WhatIfRequest(extra_nodes=1)),
    }
    said = f"Questions, with {options.past} jobs of the past and {options.jobs} live ones, median of 10:"
    rows = [[name, f"{milliseconds(ask, 10):.1f}"] for name, ask in questions.items()]
    show("questions", [said, "", *table(["", "ms"], rows)], options)
    candidates.close()
    engine.close()
    parts.store.close()


if __name__ == "__main__":
    main()
