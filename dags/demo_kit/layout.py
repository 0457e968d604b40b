"""Where the demo puts its files, the environment in which Airflow and the service run, and the end of all of it.

Every run of the demo starts from nothing: the folder of the last one is removed first, once its service has left.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from demo_kit.database import Database
from elasticflow_airflow.client import Endpoint
from elasticflow_airflow.client.embedded import SOCKET_PATH_LIMIT

DAGS = Path(__file__).resolve().parent.parent
SLOTS = 2
_MARKER = ".made-by-elasticflow-demo"
_LEAVE_WITHIN_S = 20.0


class DemoPaths:
    """Paths of one run of the demo, all below ``root`` (the state folder too, unless that path would be too long)."""

    def __init__(self, root: Path) -> None:
        self.root = root = root.absolute()
        self.airflow_home, self.airflow_log = root / "airflow", root / "airflow.log"
        self.models, self.summary = root / "daily_bert", root / "summary.txt"
        self.page = root / "page.json"
        self.accidents, self.replicas_dir = root / "accidents.txt", root / "replicas"
        self.state_dir = root / "service"
        if len(os.fsencode(self.state_dir / "service.sock")) > SOCKET_PATH_LIMIT:
            self.state_dir = Path(tempfile.gettempdir()) / f"elasticflow-demo-{os.getuid()}"
        # Outside: the user that PostgreSQL runs as need not get into the output folder.
        name = f"elasticflow-pg-{hashlib.sha256(os.fsencode(root)).hexdigest()[:8]}"
        self.database_dir = Path(tempfile.gettempdir()) / name

    def page_server(self) -> psutil.Process | None:
        """The api-server of this run, if it runs: it renames itself, so that its command does not tell."""
        if not self.page.exists():
            return None
        noted = json.loads(self.page.read_text())
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(noted["pid"])
            return server if server.create_time() == noted["created_at"] else None
        return None

    def start_afresh(self) -> None:
        """Remove what an earlier run left, and make the folders. Raises FileExistsError for a stranger's."""
        if self.root.exists() and any(self.root.iterdir()) and not (self.root / _MARKER).exists():
            raise FileExistsError(f"{self.root} exists and was not made by this demo: move it away, or use --output")
        for folder in (self.root, self.state_dir):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.airflow_home, self.models):
            folder.mkdir(parents=True)
        (self.root / _MARKER).touch()

    def environment(self) -> dict[str, str]:
        """Environment of the process with Airflow: none of the caller's own Airflow, and quiet libraries."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "ELASTICFLOW_SLOT_LOCK_DIR" or not name.startswith(("AIRFLOW_", "_AIRFLOW", "ELASTICFLOW_"))
        }
        return kept | {
            "AIRFLOW_HOME": str(self.airflow_home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "DAILY_BERT_HOME": str(self.models),
            "ELASTICFLOW_STATE_DIR": str(self.state_dir),
            "ELASTICFLOW_SLOTS": str(SLOTS),
            # Two cores that the rest of the machine uses, too: their speed changes more than a GPU's.
            "ELASTICFLOW_THROUGHPUT_ERROR": "0.25",
            "ELASTICFLOW_IDLE_EXIT_S": "60",
            # What the training script imports takes longer than a short training on two cores.
            "ELASTICFLOW_WARM_IMPORTS": "transformers.models.bert.modeling_bert",
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
        }

    def endpoint(self, environment: Mapping[str, str]) -> Endpoint:
        """Where the service of this run answers: the replicas, if the environment names them, else the socket."""
        if "ELASTICFLOW_URL" in environment:
            return Endpoint.from_url(environment["ELASTICFLOW_URL"], token=environment["ELASTICFLOW_TOKEN"])
        return Endpoint(socket_path=self.state_dir / "service.sock")


def bring_down(layout: DemoPaths) -> None:
    """End the demo's service or replicas, supervisors, workers, api-server and database.

    A worker saves when it is told to end; who takes long is killed. The service, or its replicas, and the supervisors
    are known by the folder among their arguments, workers as children of those, the api-server by what was noted when
    it started.
    """
    while ours := _processes_of(layout):
        for end in (psutil.Process.terminate, psutil.Process.kill):
            for process in ours:
                with suppress(psutil.NoSuchProcess):
                    end(process)
            ours = psutil.wait_procs(ours, _LEAVE_WITHIN_S)[1]
    Database(layout.database_dir).stop()


def _processes_of(layout: DemoPaths) -> list[psutil.Process]:
    ours: set[psutil.Process] = set()
    folders = (f"{layout.state_dir}/", f"{layout.replicas_dir}/")
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []  # None for one that has ended, or is nobody's business
        module = any(argument.startswith("elasticflow_airflow.") for argument in command)
        if module and any(f"{argument}/".startswith(folders) for argument in command):
            with suppress(psutil.NoSuchProcess):
                ours |= {process, *process.children(recursive=True)}
    if (server := layout.page_server()) is not None:
        with suppress(psutil.NoSuchProcess):
            ours |= {server, *server.children(recursive=True)}
    return list(ours)
