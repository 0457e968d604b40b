"""Where the demo puts its files, and the environment in which Airflow and the scheduler service run.

Every run of the demo starts from nothing: the folder of the last one is removed first, once its service has left.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.client.embedded import SOCKET_PATH_LIMIT

DAGS = Path(__file__).resolve().parent.parent
SLOTS = 2
_MARKER = ".made-by-elasticflow-demo"


class NotOursError(Exception):
    """The output folder exists and was not made by the demo."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of one run of the demo, all below ``root`` (the state folder too, unless that path would be too long)."""

    root: Path
    state_dir: Path

    @classmethod
    def below(cls, root: Path) -> Layout:
        """Paths for an output folder. A Unix socket's path is short, so a deep folder gets a state folder elsewhere."""
        root = root.absolute()
        state_dir = root / "service"
        if len(os.fsencode(state_dir / "service.sock")) > SOCKET_PATH_LIMIT:
            state_dir = Path(tempfile.gettempdir()) / f"elasticflow-demo-{os.getuid()}"
        return cls(root, state_dir)

    @property
    def airflow_home(self) -> Path:
        """Configuration and database of the private Airflow."""
        return self.root / "airflow"

    @property
    def airflow_log(self) -> Path:
        """Everything that Airflow and the tasks print."""
        return self.root / "airflow.log"

    @property
    def happenings(self) -> Path:
        """What the process with Airflow tells the demo: one JSON object a line."""
        return self.root / "happenings.jsonl"

    @property
    def models(self) -> Path:
        """Texts, evaluations and published models: the DAG's own output."""
        return self.root / "daily_bert"

    @property
    def summary(self) -> Path:
        """The summary, as it was printed."""
        return self.root / "summary.txt"

    @property
    def service_log(self) -> Path:
        """Where the service says what it does."""
        return self.state_dir / "service.log"

    def start_afresh(self) -> None:
        """Remove what an earlier run left, and make the folders. Raises NotOursError for a stranger's."""
        if self.root.exists() and any(self.root.iterdir()):
            if not (self.root / _MARKER).exists():
                raise NotOursError(f"{self.root} exists and was not made by this demo: move it away, or use --output")
            shutil.rmtree(self.root)
        shutil.rmtree(self.state_dir, ignore_errors=True)
        for folder in (self.root, self.airflow_home, self.models):
            folder.mkdir(parents=True, exist_ok=True)
        (self.root / _MARKER).touch()

    def environment(self) -> dict[str, str]:
        """Environment of the process with Airflow: none of the caller's own Airflow, and quiet libraries."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("AIRFLOW_", "AIRFLOW__", "_AIRFLOW", "ELASTICFLOW_"))
            or name == "ELASTICFLOW_SLOT_LOCK_DIR"
        }
        return kept | {
            "AIRFLOW_HOME": str(self.airflow_home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.airflow_home / "plugins"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.airflow_home / 'airflow.db'}",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "AIRFLOW__ELASTICFLOW__STATE_DIR": str(self.state_dir),
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

    def say(self, **happening: object) -> None:
        """Tell the demo something (used by the process with Airflow)."""
        with self.happenings.open("a") as file:
            file.write(json.dumps(happening) + "\n")
