"""What Prometheus sees: counters out of the event log that a restart does not set back, and who may look."""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import service_parts

from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.parts import ServiceParts
from elasticflow_airflow.service.settings import ServiceSettings
from elasticflow_airflow.service.telemetry.tallies import TallyHistogram

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def parts_of(world) -> ServiceParts:
    return service_parts.parts_of(world, notifier=world.reconciler._notifier, started_at=time.time())


async def get(app, path: str = "/metrics", token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        return await client.get(path, headers=headers)


async def scrape(world) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels."""
    answer = await get(build_app(parts_of(world), None))
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_an_empty_service_has_every_counter_at_zero(world):
    world.step()
    seen = await scrape(world)
    for name in ("deadline", "best_effort", "renegotiated"):
        assert seen["elasticflow_admissions_total", name] == 0
    assert seen["elasticflow_rejections_total",] == 0
    assert seen["elasticflow_deadlines_total", "missed"] == 0
    assert seen["elasticflow_slots", "total"] == 4
    assert seen["elasticflow_slots", "held"] == 0
    assert seen["elasticflow_healthy",] == 1
    assert seen["elasticflow_jobs", "running"] == 0


async def test_a_job_is_seen_while_it_trains_and_when_it_has_ended(world):
    job = world.submit(steps=2000, within=600.0, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 5, "it trains")
    world.submit(task="impossible", steps=10**6, within=60.0, scaling_curve=CURVE)
    seen = await scrape(world)
    assert seen["elasticflow_admissions_total", "deadline"] == 1
    assert seen["elasticflow_rejections_total",] == 1
    assert seen["elasticflow_jobs", "running"] == 1
    assert seen["elasticflow_slots", "held"] == seen["elasticflow_slots", "computing"] > 0
    status = world.status(job)
    assert seen["elasticflow_slack_seconds", "daily", "train"] == pytest.approx(status.slack_s)
    assert seen["elasticflow_start_wait_seconds_count",] == 1
    held = seen["elasticflow_slot_seconds_total",]
    assert held > 0
    world.ended(job)
    seen = await scrape(world)
    assert seen["elasticflow_deadlines_total", "met"] == 1
    assert seen["elasticflow_jobs_ended_total", "succeeded"] == 1
    assert seen["elasticflow_jobs_ended_total", "rejected"] == 1
    assert seen["elasticflow_spare_seconds_sum",] == pytest.approx(world.status(job).result.slack_s)
    assert seen["elasticflow_slot_seconds_total",] == pytest.approx(world.status(job).result.gpu_seconds)
    assert seen["elasticflow_slot_seconds_total",] >= held
    assert ("elasticflow_slack_seconds", "daily", "train") not in seen
    assert seen["elasticflow_decision_seconds_count", "JobSubmitted"] >= 2
    assert any(name[0] == "elasticflow_store_statement_seconds_count" for name in seen)


async def test_a_restart_sets_no_counter_back(world):
    world.ended(world.submit(steps=50, within=600.0, scaling_curve=CURVE))
    running = world.submit(task="long", steps=5000, within=3600.0, scaling_curve=CURVE)
    world.until(lambda: world.status(running).step > 5, "it trains")
    before = await scrape(world)
    world.restart()
    world.step()
    after = await scrape(world)
    counters = [key for key in before if key[0].startswith("elasticflow_") and key[0].endswith("_total")]
    assert len(counters) > 10
    for key in counters:
        assert after[key] >= before[key], key
    assert after["elasticflow_deadlines_total", "met"] == 1


async def test_a_late_job_counts_as_late(world):
    job = world.submit(steps=2000, within=600.0, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 5, "it trains")
    with world.store.write() as tx:
        tx.incarnation(job.job.job_id, 1).deadline_at = world.now_s + 1.0
    world.ended(job)
    seen = await scrape(world)
    assert seen["elasticflow_deadlines_total", "missed"] == 1
    assert seen["elasticflow_lateness_seconds_count",] == 1
    assert seen["elasticflow_lateness_seconds_sum",] == pytest.approx(-world.status(job).result.slack_s)


@pytest.mark.postgres
async def test_the_same_on_postgresql(make_world, postgres_url):
    world = make_world(url=postgres_url)
    world.ended(world.submit(steps=50, within=600.0, scaling_curve=CURVE))
    seen = await scrape(world)
    assert seen["elasticflow_deadlines_total", "met"] == 1
    world.restart()
    world.step()
    assert (await scrape(world))["elasticflow_deadlines_total", "met"] == 1
    world.step()
    assert (await scrape(world))["elasticflow_store_statement_seconds_count", "lock"] > 0


async def test_the_metrics_token_opens_the_metrics_and_nothing_else(world):
    world.step()
    app = build_app(parts_of(world), "owner", "prometheus")
    assert (await get(app, token="prometheus")).status_code == 200
    assert (await get(app, token="owner")).status_code == 200
    assert (await get(app)).status_code == 401
    assert (await get(app, token="wrong")).status_code == 401
    assert (await get(app, "/v1/health", token="prometheus")).status_code == 401
    assert (await get(app, "/v1/jobs", token="prometheus")).status_code == 401
    assert (await get(build_app(parts_of(world), "owner"), token="prometheus")).status_code == 401


def test_the_metrics_token_may_stand_in_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert ServiceSettings(state_dir=tmp_path, metrics_token_file=file).read_metrics_token() == "secret"
    file.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        ServiceSettings(state_dir=tmp_path, metrics_token_file=file).read_metrics_token()


def test_a_spread_is_cumulative():
    spread = TallyHistogram((1.0, 10.0))
    for value in (0.5, 1.0, 5.0, 100.0, float("nan")):
        spread.add(value)
    assert spread.buckets() == [("1.0", 2.0), ("10.0", 3.0), ("+Inf", 4.0)]
    assert spread.total == 106.5
