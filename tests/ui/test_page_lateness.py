"""When a job ends at the latest, by how its speed has varied."""

from __future__ import annotations

import pytest
from support.scripted_cluster import ScriptedCluster

from elasticflow_airflow.api import State
from elasticflow_airflow.api.insight import JobStory, Sample
from elasticflow_airflow.ui.lateness import latest_finish_at


def story(speeds: list[float], *, workers: int = 4, **status: object) -> tuple[JobStory, float]:
    cluster = ScriptedCluster(now=1_000_000.0)
    told = cluster.story(cluster.jobs()[0])
    samples = [Sample(at=n, step=n, steps_per_s=speed, workers=workers) for n, speed in enumerate(speeds)]
    changed = told.status.model_copy(update={"projected_finish_at": 1_001_000.0, **status})
    return told.model_copy(update={"samples": samples, "status": changed}), cluster.now


def test_the_work_that_is_left_at_the_speed_of_the_slow_tail() -> None:
    told, now = story([8.0] * 10 + [10.0] * 80 + [12.0] * 10)
    assert latest_finish_at(told, now) == pytest.approx(now + 1000.0 * 10.0 / 8.0)


def test_an_even_speed_leaves_the_projection_as_it_is() -> None:
    told, now = story([10.0] * 50)
    assert latest_finish_at(told, now) == pytest.approx(now + 1000.0)


@pytest.mark.parametrize(
    "given",
    [
        {"speeds": [10.0] * 10},
        {"speeds": [10.0] * 50, "workers": 2},
        {"speeds": [10.0] * 50, "state": State.SUCCEEDED},
        {"speeds": [10.0] * 50, "projected_finish_at": None},
    ],
)
def test_where_nothing_can_be_said(given: dict[str, object]) -> None:
    told, now = story(**given)  # type: ignore[arg-type]  # each case has its own
    assert latest_finish_at(told, now) is None
