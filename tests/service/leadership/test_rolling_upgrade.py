"""Two releases at once on one PostgreSQL: the next one has added to the tables. Jobs train on, whoever leads."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from support.replica_trial import ReplicaTrial, replicas
from support.trial import SCALING

import elasticflow_airflow
from elasticflow_airflow.service.store.tables import SCHEMA_HEAD

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(600)]

NEXT = f"{int(SCHEMA_HEAD) + 1:04}"
MIGRATION = f'''"""As the next release may have it: a column more, which this one does not know."""

import sqlalchemy as sa
from alembic import op

revision = "{NEXT}"
down_revision = "{SCHEMA_HEAD}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("job", sa.Column("of_the_next_release", sa.String(20), nullable=True))


def downgrade() -> None:
    op.drop_column("job", "of_the_next_release")
'''


@pytest.fixture
def next_release(tmp_path: Path) -> Path:
    """The folder of a release after this one: the same code, with a column more, that it writes."""
    ours = Path(elasticflow_airflow.__file__).parent
    copied = tmp_path / "next" / ours.name
    shutil.copytree(ours, copied, ignore=shutil.ignore_patterns("__pycache__"))
    store = copied / "service" / "store"
    (store / "migrations" / "versions" / f"{NEXT}_next.py").write_text(MIGRATION)
    tables = store / "tables.py"
    text = tables.read_text().replace(f'SCHEMA_HEAD = "{SCHEMA_HEAD}"', f'SCHEMA_HEAD = "{NEXT}"')
    column = '    of_the_next_release: Mapped[str | None] = mapped_column(String(20), default="written by it")\n'
    before = "    owner_known_to: Mapped[str | None]"
    assert before in text
    tables.write_text(text.replace(before, f"{column}{before}", 1))
    return copied.parent


@pytest.fixture
def trial(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaTrial]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    url = postgres_url.replace("postgresql+psycopg:", "postgresql:")
    with replicas(ReplicaTrial(tmp_path / "trial", url, SCALING, names=("old",))) as trial:
        yield trial


def test_a_release_that_adds_to_the_tables_and_this_one_lead_in_turn(trial: ReplicaTrial, next_release: Path) -> None:
    training = trial.submit("training", 45, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.trains(training)
    trial.replica("new").code = next_release
    trial.replica("new").start()
    trial.client = trial.client_of("old", "new")
    engine = sa.create_engine(trial.database_url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one() == NEXT
    assert trial.leader() == "old", "it goes on under the tables of the next release"
    trial.trains(training)
    by_old = trial.submit("by_old", 1, trial.client_of("old"), max_workers=1, scaling_curve={1: 6.0})
    trial.replica("old").kill()
    assert trial.leader() == "new"
    trial.trains(training)
    by_new = trial.submit("by_new", 1, trial.client_of("new"), max_workers=1, scaling_curve={1: 6.0})
    trial.replica("old").start()
    trial.signal("new", signal.SIGTERM)
    assert trial.leader() == "old", "this release starts, and takes over, on the tables of the next one"
    trial.trains(training)
    trial.replica("new").start()
    for job in (by_old, by_new, training):
        trial.ends(job)
    with engine.connect() as connection:
        rows = connection.execute(sa.text("SELECT job_id, of_the_next_release FROM job")).all()
    engine.dispose()
    assert dict(map(tuple, rows)) == {training: None, by_old: None, by_new: "written by it"}
