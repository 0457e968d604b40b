"""The page in a real Chromium with 500 jobs on 512 slots, with long names, and over a service that is slow or away."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.crowded_cluster import DAGS, ENDED, RUNNING, WAITING, CrowdedCluster
from support.page_browser import IN_A_BROWSER, LIMIT_MS, check_accessibility, shown, wait
from support.page_site import served

pytestmark = IN_A_BROWSER


@pytest.fixture
def cluster() -> CrowdedCluster:
    return CrowdedCluster()


@pytest.fixture
def address(manager: Any, source: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the page is served; Airflow knows all DAGs of the large cluster."""
    from elasticflow_airflow.ui import api_app

    monkeypatch.setattr(api_app, "_known_dags", lambda: frozenset(DAGS))
    monkeypatch.setattr(manager, "get_authorized_dag_ids", lambda **_: set(DAGS), raising=False)
    with served(source) as found:
        yield found


@pytest.fixture
def look(address: str, manager: Any, chromium: Any) -> Iterator[Callable[..., Any]]:
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

    opened: list[Any] = []

    def open_page(path: str, *, width: int = 1440, scheme: str = "light", routes: Any = None) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(context)
        context.set_default_timeout(LIMIT_MS)
        session = manager.generate_jwt(SimpleAuthManagerUser(username="admin", role="admin", teams=None))
        context.add_cookies([{"name": "_token", "value": session, "url": address}])
        page = context.new_page()
        for pattern, answer in (routes or {}).items():
            page.route(pattern, answer)
        page.goto(address + path)
        return page

    yield open_page
    for context in opened:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")
        context.close()


def overflow(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize(("width", "scheme"), [(1440, "dark"), (820, "light"), (390, "light")])
def test_a_large_cluster_fits_every_width(look: Any, width: int, scheme: str) -> None:
    for path, words in {
        "#/cluster": ["Needs attention", "Jobs on slots", "Last 7 days"],
        "#/jobs": ["Running", "Admitted", "late"],
        "#/what-if": ["Deadlines", "Capacity"],
    }.items():
        page = look(path, width=width, scheme=scheme)
        text = shown(page).inner_text()
        for word in words:
            assert word in text, (path, word)
        assert overflow(page) <= 0, path
        if width == 820:
            check_accessibility(page, f"{path} with 500 jobs")
        page.context.close()


def asks(page: Any) -> list[float]:
    """When the page asks for the cluster from now on."""
    times: list[float] = []
    page.on("request", lambda request: times.append(time.monotonic()) if request.url.endswith("/api/cluster") else None)
    return times


def test_an_event_is_shown_at_once_and_little_else_is_asked_for(look: Any, cluster: CrowdedCluster) -> None:
    page = look("#/cluster")
    shown(page)
    wait("the service's events are followed", lambda: cluster.followed)
    page.wait_for_timeout(5_000)  # the answer to the opened stream
    times, began = asks(page), time.monotonic()
    cluster.happened += 1
    page.wait_for_timeout(9_500)
    assert times
    assert times[0] - began < 6.0, "by the event: unasked, the next look is due ten seconds after the last one"
    assert len(times) <= 2, "and not every three seconds"


def test_without_a_stream_the_page_asks_every_few_seconds(look: Any, cluster: CrowdedCluster) -> None:
    page = look(
        "#/cluster", routes={"**/api/changes": lambda route: route.fulfill(status=503, json={"detail": "too many"})}
    )
    shown(page)
    times = asks(page)
    page.wait_for_timeout(10_000)
    assert len(times) >= 2
    assert not cluster.followed


def test_what_is_in_trouble_stands_on_top_with_what_can_be_done(look: Any, cluster: CrowdedCluster) -> None:
    page = look("#/cluster")
    card = shown(page).get_by_role("region", name="Needs attention")
    card.wait_for()
    first = card.get_by_role("listitem").first
    assert "Late" in first.inner_text()
    assert re.search(r"Is projected to finish \d+ min after its deadline\.", first.inner_text())
    late = next(job for job in cluster.jobs() if job.job_id in first.inner_html())
    assert first.get_by_role("link", name="What if").get_attribute("href") == f"#/what-if?job={late.job_id}"
    asked = len(cluster.asked)
    first.get_by_role("button", name="Best effort").click()
    page.get_by_role("dialog").get_by_role("button", name="Best effort").click()
    wait("the service is asked", lambda: any(verb == "PATCH" for verb, _, _ in cluster.asked[asked:]))
    (change,) = [told for verb, _, told in cluster.asked[asked:] if verb == "PATCH"]
    assert change["best_effort"] is True
    page.get_by_text("The job is best effort now.").first.wait_for()


def test_a_rejected_job_says_which_deadline_could_be_kept(look: Any) -> None:
    page = look("#/cluster")
    card = shown(page).get_by_role("region", name="Needs attention")
    card.locator("summary").click()
    refused = card.get_by_role("listitem").filter(has_text="Rejected").first
    assert "earliest feasible deadline: " in refused.inner_text()
    assert refused.get_by_role("link", name="Open the task to rerun it").count() == 1


@pytest.mark.parametrize("part", ["forecast*", "history*", "attention"])
def test_no_part_of_the_cluster_waits_for_another(look: Any, part: str) -> None:
    """Nor does the whole: the slots are drawn at once, whatever is slow."""
    held: list[Any] = []
    page = look("#/cluster", routes={f"**/api/{part}": lambda route: held.append(route)})
    view = page.locator("main[aria-busy=false]")
    view.wait_for()
    page.locator(".gantt .slot").first.wait_for()
    if part == "attention":
        page.get_by_text("Next 24 hours").first.wait_for()
    else:
        page.get_by_text("Still loading").first.wait_for()
    if part != "history*":
        page.locator(".gantt a.bar").first.wait_for()
        page.get_by_role("heading", name="Last 7 days", exact=True).wait_for()
    for route in held:
        route.continue_()


def test_a_part_that_failed_is_asked_for_again_by_a_button(look: Any) -> None:
    broken = {"now": True}

    def answer(route: Any) -> None:
        if broken["now"]:
            route.fulfill(status=503, json={"message": "it has too much to do"})
        else:
            route.continue_()

    page = look("#/cluster", routes={"**/api/history*": answer})
    said = page.get_by_role("status").filter(has_text="Not loaded: it has too much to do").first
    said.wait_for()
    broken["now"] = False
    said.get_by_role("button", name="Try again").click()
    page.locator(".gantt a.bar").first.wait_for()


def test_jobs_are_sorted_filtered_and_paged(look: Any) -> None:
    page = look("#/jobs")
    rows = shown(page).get_by_role("row")
    assert page.get_by_role("button", name="Live").inner_text() == f"Live {RUNNING + WAITING}"
    more = page.get_by_role("button", name="Show 100 more")
    for count in (100, 200, RUNNING + WAITING):
        wait("more of them", lambda count=count: rows.count() == 1 + count)
        if count < RUNNING + WAITING:
            more.click()
    assert more.count() == 0
    page.get_by_role("button", name="Slack").click()
    slacks = page.locator("td[data-label=Slack]").all_inner_texts()
    assert "late" in slacks[0]
    page.get_by_role("button", name="Slack").click()
    assert page.get_by_role("columnheader", name="Slack").get_attribute("aria-sort") == "descending"
    assert "late" not in page.locator("td[data-label=Slack]").all_inner_texts()[0]
    page.get_by_role("button", name="Ended", exact=False).click()
    wait("a page of those that ended", lambda: rows.count() == 101)
    more.click()
    wait("all that ended", lambda: rows.count() == 1 + ENDED)
    assert more.count() == 0
    page.get_by_label("State", exact=True).select_option("rejected")
    wait("those that were rejected", lambda: rows.count() == 1 + ENDED // 10)
    page.get_by_label("State", exact=True).select_option("")
    page.get_by_label("Filter jobs").fill("part_301")
    wait("one job", lambda: rows.count() == 2)
    assert overflow(page) <= 0


def test_a_phone_shows_some_cards_at_a_time(look: Any) -> None:
    page = look("#/jobs", width=390)
    rows = shown(page).get_by_role("row")
    assert rows.count() == 20  # without a heading
    page.get_by_role("button", name="Show 20 more").click()
    wait("more of them", lambda: rows.count() == 40)


def test_a_row_is_one_line_and_says_all_when_asked(look: Any) -> None:
    page = look("#/jobs")
    row = shown(page).get_by_role("row").nth(1)
    box = row.bounding_box()
    assert box is not None
    assert box["height"] < 50
    name = row.get_by_role("link")
    assert "…" in name.inner_text()
    whole = name.get_attribute("aria-label")
    assert whole.partition(" · ")[0] in DAGS
    name.hover()
    assert whole in page.locator("#tip").inner_text()


def test_nodes_are_folded_to_fit_a_screen_and_unfolded_on_demand(look: Any) -> None:
    page = look("#/cluster")
    picture = shown(page).locator(".gantt")
    page.locator(".gantt a.bar").first.wait_for()
    folded = picture.bounding_box()
    assert folded is not None
    assert folded["height"] < 900
    node = page.get_by_role("button", name="gpu-02: its slots one by one")
    assert node.get_attribute("aria-expanded") == "false"
    node.focus()
    page.keyboard.press("Enter")
    wait("it is unfolded", lambda: node.get_attribute("aria-expanded") == "true")
    unfolded = picture.bounding_box()
    assert unfolded is not None
    assert 100 < unfolded["height"] - folded["height"] < 250
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.node") == "gpu-03"


def test_the_time_is_zoomed_and_moved_by_wheel_drag_keys_and_buttons(look: Any, cluster: CrowdedCluster) -> None:
    asked: list[tuple[float, float]] = []

    def note(route: Any) -> None:
        found = re.search(r"from_at=([\d.]+)&until_at=([\d.]+)&parts=120", route.request.url)
        if found:
            asked.append((float(found[1]), float(found[2])))
        route.continue_()

    page = look("#/cluster", routes={"**/api/history*": note})
    shown(page)
    page.get_by_role("button", name="6 hours").click()
    wait("six hours", lambda: asked and asked[-1][1] - asked[-1][0] == pytest.approx(9 * 3600))

    def check(what: str, act: Callable[[], Any], span_h: float, moved: int) -> None:
        """The next question is about so many hours, that begin later (1), at the same time (0) or earlier (-1)."""
        before = asked[-1]
        act()

        def done() -> bool:
            page.wait_for_timeout(50)  # Playwright tells of requests only meanwhile.
            begin, end = asked[-1]
            shift = begin - before[0]
            way = 0 if abs(shift) < 600 else 1 if shift > 0 else -1
            return asked[-1] != before and abs((end - begin) / 3600 - span_h) < 0.1 and way == moved

        wait(what, done, 30)

    def button(name: str) -> Callable[[], Any]:
        return page.get_by_role("button", name=name).click

    def drag() -> None:
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x - 200, y, steps=4)
        page.mouse.up()

    def wheel() -> None:
        page.keyboard.down("Control")
        page.mouse.move(box["x"] + 118, y)
        page.mouse.wheel(0, -462)  # half as much, from the left end
        page.keyboard.up("Control")

    check("half as much", button("Zoom in"), 4.5, 1)
    check("earlier", button("Earlier"), 4.5, -1)
    picture = page.locator(".gantt")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    assert box is not None
    x, y = box["x"] + 800, box["y"] + 200
    check("dragged to later", drag, 4.5, 1)
    assert page.url.endswith("#/cluster"), "no job was opened by the drag"
    page.locator(".gantt .fold-node").first.focus()
    check("twice as much", lambda: page.keyboard.press("-"), 9.0, -1)
    check("later", lambda: page.keyboard.press("Shift+ArrowRight"), 9.0, 1)
    check("closer", wheel, 4.5, 0)
    check("back to now", button("24 hours"), 36.0, -1)


def test_a_run_is_compared_with_an_earlier_one(look: Any, cluster: CrowdedCluster) -> None:
    job = next(job for job in cluster.jobs() if job.state == "running")
    page = look(f"#/job/{job.identity.dag_id}/{job.job_id}")
    card = page.get_by_role("region", name="Compared with recent runs")
    page.locator("#chart-runs .main-svg").first.wait_for()
    curves = page.locator("#chart-runs .scatterlayer .trace")
    assert curves.count() > 2
    choice = card.get_by_label("Compare with")
    choice.select_option(index=2)
    wait("two curves", lambda: curves.count() == 2)
    assert card.locator("tr.beside").count() == 1
    check_accessibility(page, "two runs side by side")
    choice.select_option(index=0)
    wait("all curves", lambda: curves.count() > 2)


def test_who_is_used_keeps_the_focus_when_others_leave_the_list(look: Any) -> None:
    page = look("#/cluster")
    shown(page)
    focused = """async () => {
      const { h, show } = await import('./static/dom.js');
      const into = document.body.appendChild(h('div', {}));
      const input = (key) => h('input', { type: 'range', 'aria-label': key, 'data-key': key });
      const items = (...keys) => keys.map((key) => h('p', { 'data-key': key }, input(key)));
      show(into, items('a', 'b', 'c', 'd'));
      const used = into.querySelector('[aria-label=c]');
      used.focus();
      show(into, items('a', 'c', 'd', 'e'));
      return [document.activeElement === used, into.querySelectorAll('p').length];
    }"""
    assert page.evaluate(focused) == [True, 4]


def test_each_dag_keeps_its_colour(look: Any, cluster: CrowdedCluster) -> None:
    page = look("#/cluster")
    shown(page)
    colours = "async (dags) => { const found = await import('./static/palette.js'); return dags.map(found.colourOf); }"
    first = page.evaluate(colours, list(DAGS))
    page.goto("about:blank")
    page.go_back()
    shown(page)
    assert page.evaluate(colours, [*reversed(DAGS)]) == [*reversed(first)], "whoever is seen first"


def test_the_page_has_airflows_brand_colour_if_one_is_set(look: Any) -> None:
    shades = dict.fromkeys(("100", "300", "700", "900", "950"), "oklch(0.505 0.213 27.518)")
    route = {"**/api/me": lambda route: route.fulfill(json={**route.fetch().json(), "brand": shades})}
    page = look("#/cluster", routes=route)
    shown(page)
    accent = "getComputedStyle(document.documentElement).getPropertyValue('--accent').trim()"
    assert page.evaluate(accent) == "oklch(0.505 0.213 27.518)"
