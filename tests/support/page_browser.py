"""A real Chromium for the tests of the page, and what they ask of every view."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
"""The shell comes first: it has no windows, tabs and menus, which cost as much as the pages."""
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


TEXTS = """() => {
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const texts = [];
  while (walk.nextNode()) {
    const node = walk.currentNode;
    const said = node.parentElement.closest('pre, code, script, noscript, option, details:not([open]), .run');
    if (!said) texts.push(node.data);
  }
  return texts;
}"""
STYLE = {
    r"\b\d{3,}(\.\d+)? s\b": "100 s and more is minutes and seconds",
    r"\b([6-9]\d|\d{3,})(\.\d+)? min\b": "60 min and more is hours and minutes",
    r"\b(4[89]|[5-9]\d|\d{3,})(\.\d+)? h\b": "48 h and more is days and hours",
    r"\b\d+(\.\d+)? ?(secs?|seconds?|mins|minutes?|hrs?)\b": "units are min and s (a range may be 24 hours)",
    r"\b\d+(s|min|h|d)\b": "there is a space between a number and its unit",
    r"\b\d{4}-\d\d-\d\d|\bUTC\b|[+-]\d\d:\d\d\b": "times are local, and their days in words",
    r"\b\d(\.\d+)?e[+-]?\d+\b|\bNaN\b|\bInfinity\b|\bundefined\b|\bnull\b": "numbers are for people",
}
"""How no time, duration or number may look on any view, and why."""


def check_style(page: Any, where: str) -> None:
    """Times, durations and numbers have one style on all views; what a job itself wrote is its own."""
    wrong = [
        f"{where}: {text.strip()!r}: {why}"
        for text in page.evaluate(TEXTS)
        for pattern, why in STYLE.items()
        if re.search(pattern, text)
    ]
    assert not wrong, "\n".join(wrong)


def check_accessibility(page: Any, where: str) -> None:
    """Axe finds nothing to complain of; nor does :func:`check_style`."""
    check_style(page, where)
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]})
    problems = [
        f"{where}: {one['id']}: {one['help']}: {[node['html'][:160] for node in one['nodes'][:3]]}"
        for one in found.response["violations"]
    ]
    assert problems == []
