"""Ten thousand histories of leader, lease and nodes in modelled time, each from a seed, and a checker that sees flaws.

``TEST_HISTORIES`` says how many histories are made (10,000 without it), ``TEST_HISTORIES_FROM`` from which seed on.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from support.cases import slow
from support.histories.checker import Broken, check, written
from support.histories.protocol import FENCES, Flaw
from support.histories.scenario import Run, run

HISTORIES = int(os.environ.get("TEST_HISTORIES", 10_000))
FIRST = int(os.environ.get("TEST_HISTORIES_FROM", 0))
PARTS = 25
HARM = {Broken.LOST, Broken.TWICE, Broken.SLOT_SHARED, Broken.JOB_DOUBLED, Broken.UNDECIDED, Broken.CANCELLED_FINISHED}
"""What users and machines would notice."""


def judge(made: Run) -> None:
    """Fail with the history where it breaks a promise."""
    if violations := check(made.history):
        said = "\n".join(map(str, violations))
        replay = f"PYTHONPATH=.:tests python -m support.histories {made.seed}"
        pytest.fail(f"seed {made.seed}\n{written(made.history)}\n{said}\nto see it again: {replay}", pytrace=False)


@pytest.mark.parametrize("part", [*range(PARTS // 5), *slow(*range(PARTS // 5, PARTS))])
def test_no_history_breaks_a_promise(part):
    for seed in range(FIRST + HISTORIES * part // PARTS, FIRST + HISTORIES * (part + 1) // PARTS):
        judge(run(seed))


def test_a_seed_gives_the_same_history_again():
    assert run(7).history == run(7).history
    assert run(7).history != run(8).history


def test_histories_are_eventful():
    made = [run(seed) for seed in range(300)]
    whats = Counter(item[1] for one in made for item in one.history)
    expected = (
        *("killed", "stopped", "comes to a trap", "cut off", "bad network", "resigns", "no engine"),
        *("agent started again", "machine started again", "node has seen", "idle transaction ended"),
        *("database goes down", "clock of the database jumps", "to be cancelled", "published"),
    )
    assert {what: whats[what] for what in expected if whats[what] < 10} == {}
    granted = Counter(item[2] for one in made for item in one.history if item[1] == "granted")
    assert granted["TAKE"] > 3 * len(made)
    assert granted["GIVE_UP"] > len(made) / 3
    assert granted["RAISE"] > len(made) / 10
    assert sum(one.faults for one in made) > 5 * len(made)


def caught(flaws: set[Flaw], by: set[Broken], seeds: int) -> bool:
    """Return whether one of so many histories breaks one of these promises."""
    return any(violation.broken in by for seed in range(seeds) for violation in check(run(seed, flaws).history))


@pytest.mark.parametrize(
    ("flaw", "broken", "seeds"),
    [
        (Flaw.NO_BARRIER, Broken.STALE_WRITE, 1000),
        (Flaw.WRITE_WITHOUT_EPOCH, Broken.STALE_WRITE, 1000),
        (Flaw.NODE_WITHOUT_EPOCH, Broken.STALE_COMMAND, 100),
        (Flaw.NODE_WITHOUT_EPOCH, Broken.UNDECIDED, 1000),
        (Flaw.NODE_FORGETS_EPOCH, Broken.STALE_COMMAND, 1000),
        (Flaw.NODE_WITHOUT_NUMBER, Broken.STALE_COMMAND, 100),
        (Flaw.VALID_FROM_ANSWER, Broken.TWO_MANDATES, 1000),
        (Flaw.RENEW_WITHOUT_EPOCH, Broken.EPOCH_FALLS, 200),
        (Flaw.RENEW_WITHOUT_CONDITION, Broken.TWO_MANDATES, 20),
        (Flaw.RENEW_WITHOUT_CONDITION, Broken.TWICE, 1000),
        (Flaw.TAKE_BEFORE_END, Broken.TWO_MANDATES, 20),
        (Flaw.ACT_BEFORE_COMMIT, Broken.UNDECIDED, 20),
        (Flaw.ACT_BEFORE_COMMIT, Broken.TWICE, 100),
        (Flaw.ACT_BEFORE_COMMIT, Broken.SLOT_SHARED, 200),
        (Flaw.ANSWER_BEFORE_COMMIT, Broken.UNSTORED, 20),
        (Flaw.ANSWER_BEFORE_COMMIT, Broken.LOST, 100),
        (Flaw.RAISE_WITHOUT_CONDITION, Broken.EPOCH_FALLS, 100),
        (Flaw.DECIDE_ON_STALE_ROWS, Broken.CANCELLED_FINISHED, 2000),
        pytest.param(Flaw.RAISE_WITHOUT_RENEWAL, Broken.TWO_MANDATES, 50_000, marks=pytest.mark.soak),
        pytest.param(Flaw.RENEWS_AFTER_GIVING_UP, Broken.TWO_MANDATES, 50_000, marks=pytest.mark.soak),
        pytest.param(Flaw.STANDS_AGAIN_AT_ONCE, Broken.TWO_MANDATES, 50_000, marks=pytest.mark.soak),
    ],
    ids=lambda value: value.name if isinstance(value, Flaw | Broken) else str(value),
)
def test_a_broken_protocol_is_caught(flaw, broken, seeds):
    assert caught({flaw}, {broken}, seeds)


def test_a_leader_that_never_stops_is_kept_from_harm_by_the_fences():
    """The second line of defence alone: who takes himself for the leader, and is not, changes nothing."""
    found = Counter(one.broken for seed in range(500) for one in check(run(seed, {Flaw.NEVER_STOPS}).history))
    assert set(found) == {Broken.TWO_MANDATES}
    assert found[Broken.TWO_MANDATES] > 50


def test_without_fences_a_leader_that_never_stops_does_harm():
    assert caught({Flaw.NEVER_STOPS, *FENCES}, HARM, 500)


def test_without_fences_even_one_that_stops_in_time_does_harm():
    """The first line of defence alone: a process may stand still between a look at the clock and a command."""
    assert caught(set(FENCES), HARM, 1000)


def test_with_clocks_far_from_the_promise_the_fences_keep_from_harm():
    found: Counter[Broken] = Counter()
    for seed in range(500):
        found.update(one.broken for one in check(run(seed, drift=0.5).history, whatever_clocks_do=True))
    assert set(found) == {Broken.TWO_MANDATES}, found
