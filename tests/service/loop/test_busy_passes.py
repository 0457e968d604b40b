"""A service whose passes take seconds: what it hears late is no lateness of the jobs."""

from __future__ import annotations

from itertools import pairwise


def test_nobody_is_late_because_reports_are_read_late(make_world):
    """The job is as fast as planned; it reports every six seconds, and every seven somebody reads."""
    world = make_world(slots=1)
    job = world.submit(steps=1000, within=1000, scaling_curve={1: 10.0}, fake={"report_interval_s": 6.0})
    world.until(lambda: world.status(job).step > 0, "it trains", every=7.0)
    projected_at = []
    while not world.is_over(job):
        projected_at.append(world.status(job).projected_finish_at)
        world.step(7.0)
    assert len(projected_at) > 10
    assert all(later < earlier + 0.1 for earlier, later in pairwise(projected_at)), projected_at
