"""Make the pictures of the page that README and docs show: ``make pictures``. Needs Chromium.

    python docs/pictures.py [NAME ...]

The still ones show a scripted cluster that the tests use, too. The moving one shows a real service on its fake engine,
as jobs come, shrink and grow. Each is the real page, in Airflow's application, in a browser.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "how-to" / "images"
sys.path.insert(0, str(DOCS.parent / "tests"))

WIDTH = 1200
COLOURS = 96
FRAMES, FRAME_S = 24, 2.0
"""Of the moving picture, and how far apart they are taken; it plays four times as fast."""
SPEEDUP = 4
CURVE = {1: 10.0, 2: 18.0, 4: 32.0, 8: 52.0}
ARRIVALS = (
    (0.0, "nightly_reviews", 1500, 8, 75.0),
    (4.0, "fraud_daily", 300, 4, 90.0),
    (12.0, "search_ranker", 260, 4, 40.0),
    (20.0, "vision", 2600, 8, 150.0),
)
"""Seconds from the beginning, DAG, steps, most workers, and seconds until the deadline."""


def prepare_airflow(home: Path) -> None:
    """Give Airflow a home of its own; must happen before anything imports it."""
    from support.page_site import airflow_settings

    os.environ.update(airflow_settings(home))
    os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS"] = "True"
    os.environ["AIRFLOW__API_AUTH__JWT_SECRET"] = secrets.token_urlsafe(64)
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.db import initdb
    from airflow.utils.session import create_session
    from support.scripted_cluster import TASKS

    initdb()
    with create_session() as session:
        session.merge(DagBundleModel(name="pictures"))
        session.flush()
        for dag_id in TASKS:
            session.merge(DagModel(dag_id=dag_id, bundle_name="pictures", is_stale=False))


def signed_in() -> str:
    """Return the session of a user who may see all."""
    from airflow.api_fastapi.app import create_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    return str(create_auth_manager().generate_jwt(SimpleAuthManagerUser(username="admin", role="admin", teams=None)))


def save(picture: bytes, name: str) -> None:
    """Write a screenshot with few colours: it is a tenth of the size, and looks the same."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(IMAGES / f"{name}.png", optimize=True)


def take_stills(chromium: Any, wanted: Callable[[str], bool]) -> None:
    """Take the pictures of the four views."""
    from support.page_site import scripted_source, served
    from support.scripted_cluster import ScriptedCluster, identity

    job = identity("fraud_daily")
    views = {
        "page-cluster": ("#/cluster", 930),
        "page-jobs": ("#/jobs", 470),
        "page-job": (f"#/job/{job.dag_id}/{job.job_id}", 1240),
        "page-what-if": ("#/what-if", 860),
    }
    session = signed_in()
    with served(scripted_source(ScriptedCluster())) as address:
        for name, (path, height) in views.items():
            if not wanted(name):
                continue
            page = _open(chromium, address, session, path, height)
            if name == "page-what-if":
                page.get_by_role("button", name="fraud_daily · finetune: deadline 30 minutes earlier").click()
            page.wait_for_timeout(3000)
            save(page.screenshot(), name)
            page.context.close()


def _open(chromium: Any, address: str, session: str, path: str, height: int) -> Any:
    context = chromium.new_context(viewport={"width": WIDTH, "height": height}, color_scheme="light")
    context.add_cookies([{"name": "_token", "value": session, "url": address}])
    page = context.new_page()
    page.goto(address + path)
    page.locator("main[aria-busy=false]").wait_for(timeout=60_000)
    while page.locator(".loading-part").count():
        page.wait_for_timeout(100)
    return page


def take_moving(chromium: Any, folder: Path) -> None:
    """Take the moving picture: the timeline of a real service on the fake engine, for most of a minute."""
    from PIL import Image
    from support.page_site import served

    from elasticflow_airflow.client import ElasticFlowClient, Endpoint
    from elasticflow_airflow.hooks import Address
    from elasticflow_airflow.ui.source import Source

    state = folder / "s"
    endpoint = Endpoint(socket_path=state / "service.sock")
    environment = os.environ | {
        "ELASTICFLOW_ENGINE": "fake",
        "ELASTICFLOW_VIRTUAL_NODES": "2x4",
        "ELASTICFLOW_STATE_DIR": str(state),
        "ELASTICFLOW_SLOT_LOCK_DIR": str(folder / "locks"),
    }
    service = subprocess.Popen([sys.executable, "-m", "elasticflow_airflow.service"], env=environment)
    frames: list[Any] = []
    try:
        with ElasticFlowClient(endpoint, retry_for_s=60.0) as client:
            client.health()
            with served(Source(lambda: Address(endpoint, "default"))) as address:
                session = signed_in()
                begun = time.monotonic()
                waiting = list(ARRIVALS)
                page = None
                for number in range(FRAMES):
                    while waiting and time.monotonic() - begun >= waiting[0][0]:
                        _submit(client, *waiting.pop(0)[1:])
                    page = page or _open(chromium, address, session, "#/cluster", 900)
                    page.wait_for_timeout(max(0.0, (begun + number * FRAME_S - time.monotonic()) * 1000))
                    card = page.get_by_role("region", name="Jobs on slots")
                    frames.append(Image.open(io.BytesIO(card.screenshot())).convert("RGB"))
    finally:
        service.terminate()
        service.wait(30)
    size = frames[-1].size
    shown = [frame.crop((0, 0, *size)).quantize(COLOURS, dither=Image.Dither.NONE) for frame in frames]
    pause_ms = int(FRAME_S / SPEEDUP * 1000)
    lasts = [pause_ms] * (len(shown) - 1) + [4 * pause_ms]
    shown[0].save(
        IMAGES / "page-live.gif", save_all=True, append_images=shown[1:], duration=lasts, loop=0, optimize=True
    )


def _submit(client: Any, dag_id: str, steps: int, max_workers: int, due_s: float) -> None:
    from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
    from elasticflow_airflow.client.snapshot import snapshot_script

    code = snapshot_script(Path(__file__))
    client.upload_snapshot(code)
    behaviour = {"steps_per_s": CURVE, "startup_s": 1.0}
    client.submit(
        JobSubmission(
            identity=JobIdentity(dag_id=dag_id, run_id="scheduled__today", task_id="train"),
            command=Command(snapshot=code.sha256, script=code.entry, env={"ELASTICFLOW_FAKE": json.dumps(behaviour)}),
            length=Length(steps=steps),
            global_batch_size=32,
            scaling_curve=CURVE,
            max_workers=max_workers,
            deadline_at=time.time() + due_s,
        )
    )


def main() -> None:
    """Make all pictures, or those named."""
    names = set(sys.argv[1:])
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="ef-pic-")))
        prepare_airflow(folder)
        from support.page_browser import browser
        from support.quiet_network import quiet_network

        ending.enter_context(quiet_network())
        chromium = ending.enter_context(browser())
        if names != {"page-live"}:
            take_stills(chromium, lambda name: not names or name in names)
        if not names or "page-live" in names:
            take_moving(chromium, folder)


if __name__ == "__main__":
    main()
