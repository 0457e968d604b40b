"""In which epoch joiners wait for those who train."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticflow_airflow.runtime.gang.handover import EpochAim


def test_a_joiner_that_missed_the_end_of_a_long_epoch_waits_for_no_other():
    aim = EpochAim()
    assert aim.misses(3, 4)
    assert aim.choose(4) == 4
    assert not aim.misses(4, 4)
    assert not aim.misses(4, None)
    assert aim.choose(4) == 4, "the guess was wrong, not the epochs short"


def test_a_joiner_waits_ahead_of_those_it_chases():
    aim = EpochAim()
    assert aim.choose(10) == 10
    assert aim.choose(13) == 20, "three went by: the second multiple of four from here"
    assert not aim.misses(20, 14)
    assert not aim.misses(20, 20)
    assert aim.misses(20, 21)


def test_those_who_train_were_set_back():
    aim = EpochAim()
    aim.choose(10)
    aim.choose(13)
    assert aim.misses(20, 9)


def test_the_guess_of_another_joiner_leads_nobody_astray():
    aim = EpochAim()
    aim.choose(10)
    assert aim.choose(13, [400]) == 20
    assert not aim.misses(20, 14, [400])
    assert aim.choose(14, [17]) == 17


@given(
    epoch_s=st.floats(0.01, 2.0),
    rehearsals_s=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=8),
    late_s=st.floats(0.0, 0.05),
)
def test_all_joiners_come_to_wait_in_one_epoch_soon(epoch_s, rehearsals_s, late_s):
    """Whatever their speeds; ``late_s`` is how old everybody's news of the others is."""
    count = len(rehearsals_s)
    aims, said = [EpochAim() for _ in rehearsals_s], [[(-1.0, 0)] for _ in rehearsals_s]
    at_s, there = list(rehearsals_s), [0] * count
    tick_s = min(0.01, epoch_s / 2)

    def heard(now_s: float) -> list[int]:
        return [next(epoch for when_s, epoch in reversed(words) if when_s <= now_s) for words in said]

    for tick in range(int(60 / tick_s)):
        now_s = tick * tick_s
        epoch, others = int(now_s / epoch_s), heard(now_s - late_s)
        if all(other == epoch for other in others) and all(here == epoch for here in there):
            assert now_s <= 20 * max(epoch_s, *rehearsals_s, late_s) + 1.0
            return
        for joiner, aim in enumerate(aims):
            if at_s[joiner] > now_s:
                continue
            said[joiner].append((now_s, there[joiner])) if said[joiner][-1][1] != there[joiner] else None
            if aim.misses(there[joiner], int(max(0.0, now_s - late_s) / epoch_s), others):
                there[joiner] = aim.choose(int(max(0.0, now_s - late_s) / epoch_s), others)
                at_s[joiner] = now_s + rehearsals_s[joiner]
    raise AssertionError("they never met")
