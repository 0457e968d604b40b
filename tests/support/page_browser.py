"""A real Chromium for the tests of the page, and what they ask of every view."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
IN_A_BROWSER = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LIMIT_MS = 60_000


def wait(what: str, condition: Callable[[], Any], limit_s: float = 120.0) -> Any:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {limit_s} s: {what}")


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium, without its network services."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS, headless=True)
        yield opened
        opened.close()


def shown(page: Any) -> Any:
    """The view, once all its parts are there."""
    view = page.locator("main[aria-busy=false]")
    view.wait_for()
    wait("all parts of the view", lambda: page.locator(".loading-part").count() == 0)
    return view


def check_accessibility(page: Any, where: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]})
    problems = [
        f"{where}: {one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found.response["violations"]
    ]
    assert problems == []
