"""How long a user's test of a DAG takes on the simulated cluster, after the first one of the process.

    python benchmarks/bench_dag_test.py [--tasks 5] [--repeat 3] [--write]

Airflow's first ``dag.test()`` of a process pays for its imports and its API; what a test costs after that is what a
team waits for. Prints medians over ``--repeat`` runs of DAGs with one and with ``--tasks`` training tasks in parallel.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from results import parser_of, show, table

from elasticflow_airflow.client import Endpoint
from elasticflow_airflow.testing.cluster import SimulatedCluster
from elasticflow_airflow.testing.home import Home
from elasticflow_airflow.testing.running import RunDag

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def make_dag(dag_id: str, tasks: int, folder: Path):
    from airflow.sdk import DAG

    from elasticflow_airflow.operators import ElasticTrainOperator

    with DAG(dag_id, schedule=None) as dag:
        for number in range(tasks):
            ElasticTrainOperator(
                task_id=f"train_{number}",
                script="train.py",
                steps=6_000 * (number + 1),
                global_batch_size=32,
                deadline=timedelta(hours=2),
                scaling_curve=CURVE,
            )
    dag.fileloc = str(folder / "dag.py")
    return dag


def refuse(slots: int) -> Endpoint:
    raise AssertionError(f"nothing trains really here, and {slots} slots were asked for")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    os.environ["AIRFLOW__LOGGING__LOGGING_LEVEL"] = "ERROR"
    home = Home()
    folder = Path(tempfile.mkdtemp(dir=home.path))
    (folder / "train.py").write_text("no interpreter ever reads this")

    def seconds(dag) -> tuple[float, float, float]:
        """(seconds, seconds of CPU, simulated seconds) of one test: a cluster of its own, and a run."""
        began, cpu = time.perf_counter(), time.process_time()
        clusters: list[SimulatedCluster] = []

        def cluster(start_at: float | None) -> SimulatedCluster:
            if not clusters:
                empty = home.path / "empty.db"
                clusters.append(SimulatedCluster(home.new_folder(), start_at=start_at, empty_store=empty))
            return clusters[0]

        result = RunDag(lambda: home.ensure_database(None), cluster, refuse)(dag)
        assert result.succeeded, result
        jobs = result.jobs.values()
        simulated = max(job.finished for job in jobs if job.finished is not None) - min(job.submitted for job in jobs)
        clusters[0].close()
        return time.perf_counter() - began, time.process_time() - cpu, simulated.total_seconds()

    first, cpu, _ = seconds(make_dag("first", 1, folder))
    rows = [["the first of the process, with imports and migrations", f"{first:.1f}", f"{cpu:.1f}", ""]]
    for tasks in (1, arguments.tasks):
        took = [seconds(make_dag(f"again_{tasks}_{turn}", tasks, folder)) for turn in range(arguments.repeat)]
        ours, cpu, simulated = (statistics.median(column) for column in zip(*took, strict=True))
        what = "one training task" if tasks == 1 else f"{tasks} training tasks in parallel"
        rows.append([what, f"{ours:.2f}", f"{cpu:.2f}", f"{simulated / 60:.0f}"])
    show("dag_test", table(["dag.test() of", "s", "CPU s", "simulated min"], rows), arguments)


if __name__ == "__main__":
    main()
