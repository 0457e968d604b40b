"""How long nobody decides when the leader of two replicas is killed, stands still, or is told to leave.

    python benchmarks/bench_failover.py [--events 30] [--write]

Two `elasticflow serve` on one PostgreSQL (a private one), two node agents, and a real training that goes on meanwhile.
An event hits whoever leads. Its time runs from the signal to the verdict on a job that is submitted at the other
replica in the same moment, so it contains the end of the lease, the take-over and the first pass. Whoever was hit is
started (or goes on) and follows before the next event. "Lease" is the part of it until the other one has the lease.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from results import parser_of, percentile, show, table
from support.postgres import postgres
from support.replica_trial import ReplicaTrial, replicas
from support.trial import SCALING

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length

KINDS = {
    "kill -9": signal.SIGKILL,
    "stands still (SIGSTOP for 8 s)": signal.SIGSTOP,
    "hand-over (SIGTERM)": signal.SIGTERM,
}
STOPPED_S = 8.0


def hopeless(trial: ReplicaTrial, number: int) -> JobSubmission:
    """Return a job that is decided on at once: nobody can keep its deadline."""
    return JobSubmission(
        identity=JobIdentity(dag_id="bench", run_id=f"run{number}", task_id="train"),
        command=Command(snapshot=trial.snapshot.sha256, script="train.py"),
        length=Length(steps=1_000_000),
        global_batch_size=8,
        max_workers=1,
        scaling_curve={1: 1.0},
        deadline_at=time.time() + 60.0,
    )


def one_event(trial: ReplicaTrial, kind: str, number: int) -> tuple[float, float]:
    """Hit the leader; returns the seconds until the lease is taken, and until a job is decided on."""
    leader, other = trial.leader(), trial.follower()
    client = trial.client_of(other)
    epoch = trial.health(leader).leadership.epoch  # type: ignore[union-attr]
    submission = hopeless(trial, number)
    trial.signal(leader, KINDS[kind])
    begun_s, taken = time.monotonic(), list[float]()

    def watch() -> None:
        while not taken:
            found = trial.health(other).leadership
            if found is not None and found.epoch > epoch:
                taken.append(time.monotonic() - begun_s)
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    client.submit(submission)
    job_id = submission.identity.job_id
    trial.wait(lambda: client.status(job_id).state.terminal, "it is decided on", 60)
    decided_s = time.monotonic() - begun_s
    watching.join()
    process = trial.replica(leader).process
    assert process is not None
    if KINDS[kind] is signal.SIGSTOP:
        time.sleep(max(0.0, STOPPED_S - (time.monotonic() - begun_s)))
        trial.signal(leader, signal.SIGCONT)
    else:
        process.wait(30)
        trial.replica(leader).start()
    trial.wait(lambda: trial.replica(leader).answers(), "it follows")
    return taken[0], decided_s


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--events", type=int, default=30, help="of each kind")
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rows, number = [], 0
    with tempfile.TemporaryDirectory(prefix="ef-over-") as folder, postgres() as server:
        server.sql("CREATE DATABASE service")
        trial = ReplicaTrial(Path(folder) / "trial", server.url.format("service"), SCALING)
        with replicas(trial):
            job = trial.submit("long", 100_000, scaling_curve={1: 6.0}, max_workers=1)
            trial.trains(job)
            for kind in KINDS:
                taken, decided = [], []
                for _ in range(options.events):
                    number += 1
                    lease_s, verdict_s = one_event(trial, kind, number)
                    taken.append(lease_s)
                    decided.append(verdict_s)
                lease = [statistics.median(taken), max(taken)]
                verdict = [statistics.median(decided), percentile(decided, 0.9), max(decided)]
                rows.append([kind, str(options.events), *(f"{value:.2f}" for value in (*lease, *verdict))])
            restarts = len(trial.events(job, "restarting")) + len(trial.events(job, "worker_lost"))
            trial.client.cancel(job, trial.claims[job], "the benchmark is over")
            trial.wait(lambda: trial.client.status(job).state.terminal, "it ends")
    heads = ["event", "events", "lease, median s", "lease, max s", "verdict, median s", "p90 s", "max s"]
    ended = f"Restarts of the training, and workers that it lost: {restarts}."
    show("failover", [*table(heads, rows), "", ended], options)


if __name__ == "__main__":
    main()
