"""Those who ask for their jobs renew the leases, several at one look, each with an answer of its own."""

from __future__ import annotations

import pytest

from elasticflow_airflow.service.renewals import Renewals


def test_what_is_over_is_forgotten():
    renewals = Renewals()
    for job_id in ("a", "a", "b"):
        renewals.add(job_id, 1)
    renewals.keep({("a", 1)})
    assert (renewals.count("a", 1), renewals.count("b", 1), renewals.count("a", 2)) == (2, 0, 0)


@pytest.mark.parametrize("jobs", [1, 3])
def test_each_is_told_of_its_own_job(world, jobs):
    made = [world.submit(task=f"t{n}", within=900, steps=1500, scaling_curve={1: 10.0}) for n in range(jobs)]
    world.run(5)
    asked = [(one.job.job_id, one.claim) for one in made]
    answers = world.job_service.renew_all([*asked, ("nobody", 1), (asked[0][0], made[0].claim + 1)])
    assert answers[:jobs] == [world.status(one) for one in made]
    assert [answer.error for answer in answers[jobs:]] == ["job_not_found", "stale_claim"]
