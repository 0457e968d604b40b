"""Into how many shares the steps of a job are cut: chosen once, kept by retries, and never fewer than its workers."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

CURVE = {1: 10.0, 2: 18.0, 4: 32.0, 8: 56.0}


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, 8),  # As where the script runs alone, whatever the cluster has ...
        ({"global_batch_size": 6}, 2),  # ... if they share the batch equally ...
        ({"global_batch_size": 7}, 1),
        ({"max_workers": 2}, 8),
        ({"max_workers": 16}, 16),  # ... and more only where more workers are wanted.
        ({"global_batch_size": 24, "max_workers": 16}, 8),
        ({"logical_workers": 32}, 32),
        ({"logical_workers": 2}, 2),
        ({"consistency": "fast"}, None),
    ],
)
def test_the_number_of_shares_is_chosen_once(make_world, given, chosen):
    world = make_world(nodes=1, slots=6)
    job = world.submit(scaling_curve=CURVE, **given)
    assert world.row(job).logical_workers == world.status(job).logical_workers == chosen
    world.step(1)
    (gang,) = world.engine.world.gangs.values()
    assert gang.spec.session.logical_workers == chosen
    assert gang.spec.session.consistency == given.get("consistency", "consistent") == world.status(job).consistency


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"global_batch_size": 6}, 2),
        ({"logical_workers": 4}, 4),
        ({"logical_workers": 1}, 1),
        ({"consistency": "fast", "global_batch_size": 7}, 4),
        ({"consistency": "fast"}, 8),
    ],
)
def test_there_are_never_more_workers_than_shares(make_world, given, most):
    world = make_world(nodes=1, slots=8)
    job = world.submit(within=900, steps=100 * most, scaling_curve=CURVE, **given)
    assert world.ended(job).state == "succeeded"
    assert max(g.workers for g in world.generations(job)) == most


def test_a_cluster_that_grows_later_gives_more_workers_to_the_same_shares(make_world):
    world = make_world(nodes=1, slots=2)
    job = world.submit(steps=900, scaling_curve=CURVE)
    world.run(5)
    world.restart()
    world.engine.add_node(world.engine.inventory()[0].__class__(node_id="n2", slots=8, device="cpu", device_type="x"))
    world.run(20)
    assert world.row(job).logical_workers == 8
    assert world.generations(job)[-1].workers == 8


def failed(world, **given):
    job = world.submit(steps=400, scaling_curve=CURVE, fake={"fail_at_step": 150, "report_interval_s": 0.1}, **given)
    assert world.ended(job).state == "failed"
    assert world.row(job).promoted.step > 0
    return job


def test_a_retry_that_resumes_keeps_what_its_checkpoint_was_made_with(make_world):
    world = make_world(nodes=1, slots=4, checkpoint_interval_s=1.0)
    failed(world, logical_workers=2)
    again = world.submit(steps=400, scaling_curve=CURVE)
    assert again.created
    world.step()
    assert world.row(again).step > 0, "it goes on"
    assert world.row(again).logical_workers == 2
    assert world.ended(again).state == "succeeded"
    assert max(g.workers for g in world.generations(again)) <= 2


def test_asking_for_other_shares_trains_anew(make_world):
    world = make_world(nodes=1, slots=4, checkpoint_interval_s=1.0)
    failed(world, logical_workers=2)
    again = world.submit(steps=400, scaling_curve=CURVE, logical_workers=8)
    assert (world.row(again).step, world.row(again).logical_workers) == (0, 8)


def test_a_retry_that_wants_more_workers_than_its_checkpoint_has_shares_is_told(make_world):
    world = make_world(nodes=1, slots=4, checkpoint_interval_s=1.0)
    failed(world, logical_workers=2)
    again = world.submit(steps=400, scaling_curve=CURVE, min_workers=4)
    done = world.ended(again)
    assert done.state == "failed"
    assert "was trained with 2 logical workers" in done.failure
    assert "logical_workers=" in done.failure


def test_another_consistency_is_another_training(world):
    first = world.submit(steps=900, scaling_curve=CURVE)
    world.run(3)
    same = world.submit(steps=900, scaling_curve=CURVE, logical_workers=8)
    assert not same.created
    other = world.submit(steps=900, scaling_curve=CURVE, consistency="fast")
    assert other.created
    assert first.job.job_id == other.job.job_id


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"logical_workers": 3}, "logical_workers=3 is not a power of two"),
        ({"logical_workers": 64}, "does not divide global_batch_size=32"),
        ({"logical_workers": 2, "max_workers": 4}, "give at least 4 logical workers"),
        ({"logical_workers": 2, "min_workers": 4}, "give at least 4 logical workers"),
        ({"max_workers": 64}, "some would have no sample"),
        ({"global_batch_size": 6, "min_workers": 4}, "at most 2 workers"),
        ({"consistency": "fast", "logical_workers": 2}, "leave one of the two out"),
        ({"consistency": "quick"}, "consistent"),
    ],
)
def test_shares_that_do_not_come_out_even_are_refused(world, given, words):
    with pytest.raises(ValidationError, match=words):
        world.submission(**given)


@pytest.mark.parametrize("said", [2, 16])
def test_what_the_script_says_counts_where_nothing_was_submitted(make_world, said):
    """Also where more workers were started than it has shares; and it stays so when they change."""
    world = make_world(nodes=2, slots=8)
    job = world.submit(steps=3000, scaling_curve={**CURVE, 16: 90.0}, fake={"logical_workers": said})
    world.until(lambda: world.row(job).step > 0, "it trains")
    assert world.row(job).logical_workers == world.status(job).logical_workers == said
    (event,) = world.events(job, "logical_workers")
    assert f"the script says how many logical workers it has, {said}" in event.reason
    world.restart()
    assert world.ended(job).state == "succeeded"
    trained = [g.workers for g in world.generations(job) if g.first_step is not None]
    assert max(trained) <= said
    (*_, last) = world.events(job, "started")
    assert "begins again" not in last.reason


@pytest.mark.parametrize("given", [{"logical_workers": 8}, {"max_workers": 8}, {"min_workers": 2}])
def test_what_was_submitted_goes_before_what_the_script_says(make_world, given):
    world = make_world(nodes=1, slots=8)
    job = world.submit(steps=900, scaling_curve=CURVE, fake={"logical_workers": 2}, **given)
    world.until(lambda: world.row(job).step > 0, "it trains")
    assert world.row(job).logical_workers == 8
    assert world.events(job, "logical_workers") == []


def test_a_number_that_cannot_be_is_not_adopted(make_world):
    world = make_world(nodes=1, slots=2)
    job = world.submit(steps=900, scaling_curve=CURVE, fake={"logical_workers": 3})
    world.until(lambda: world.row(job).step > 0, "it trains")
    assert world.row(job).logical_workers == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "at most 8 workers train it, one for each of its logical_workers: max_workers= raises both"),
        ({"global_batch_size": 24, "max_workers": 16}, "at most 8 workers can share its global_batch_size=24 equally"),
        ({"global_batch_size": 6}, "at most 2 workers can share its global_batch_size=6 equally"),
        ({"logical_workers": 4}, "at most 4 workers train it, one for each of its logical_workers"),
        ({"max_workers": 4}, None),
        ({"max_workers": 16}, None),
        ({"logical_workers": 4, "max_workers": 4}, None),
    ],
)
@pytest.mark.parametrize("within", [None, 600, 0.5])
def test_the_verdict_says_when_they_limit_the_workers(make_world, given, said, within):
    world = make_world(nodes=2, slots=8)
    asked = given if within is None else {**given, "within": within}
    verdict = world.submit(steps=900, scaling_curve=CURVE, **asked).job.verdict
    assert verdict.decision == {None: "best_effort", 600: "admitted", 0.5: "rejected"}[within]
    assert ("at most" in verdict.reason) == (said is not None)
    assert said is None or said in verdict.reason


def test_of_a_job_that_is_measured_first_the_verdict_says_it_in_the_end(make_world):
    world = make_world(nodes=2, slots=8)
    job = world.submit(steps=900, within=900)
    assert job.job.verdict.decision == "undecided"
    world.until(lambda: world.status(job).verdict.decision != "undecided", "a verdict")
    assert "at most 8 workers train it" in world.status(job).verdict.reason
