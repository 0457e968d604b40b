"""Plans that overtake each other, and deaths at bad moments: two workers' places in one process, over real groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.gang import handover, membership
from elasticflow_airflow.runtime.gang.membership import Dismissed, GroupMember, JoinerSilent
from elasticflow_airflow.runtime.gang.process_group import GroupBroken, WorkerGroup
from elasticflow_airflow.runtime.gang.transfer import receive
from elasticflow_airflow.runtime.protocol import Member, Membership, RescaleMode

LIMIT_S = 20.0


def wait(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come about"
        time.sleep(0.005)


class Crew:
    """Some workers of a job, each with its place and a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.generation = folder, 0
        self.places: dict[str, GroupMember] = {}
        self.states: dict[str, Registered] = {}
        self.threads = ThreadPoolExecutor(8)

    def plan(self, *workers: str, lost: Sequence[str] = ()) -> Membership:
        self.generation += 1
        mode = RescaleMode.IN_PLACE if self.places else RescaleMode.RESTART
        members = tuple(Member(worker_id=w, rank=r, node_id="n", slot_index=r) for r, w in enumerate(workers))
        plan = Membership(generation=self.generation, mode=mode, members=members, lost=tuple(lost))
        plan.write(self.folder)
        new = [worker for worker in workers if worker not in self.places]
        for worker in new:
            self.places[worker] = GroupMember(self.folder, worker, torch.device("cpu"), plan)
            self.states[worker] = Registered(nn.Linear(2, 2))
        for begun in [self.threads.submit(self.places[worker].begin) for worker in new]:
            begun.result(LIMIT_S)
        return plan

    def facts(self, step: int) -> dict[str, Any]:
        return {"step": step, "loss": None, "present": "0", "counts": [], "trained": 2, "track": None}

    def agreed(self, *workers: str) -> None:
        """All are ready for the newest plan, and agree to switch."""
        places = [self.places[worker] for worker in workers]
        wait(lambda: all(place.ready_for(0) == self.generation for place in places), "the handover")
        for place in places:
            place.agree([self.generation] * len(places))

    def knows(self, *workers: str) -> None:
        wait(lambda: all(self.places[w].plan.generation == self.generation for w in workers), "the news")

    def switch(self, worker: str, step: int = 3) -> Future[Any]:
        return self.threads.submit(self.places[worker].switch, self.states[worker], self.facts(step))

    def recover(self, worker: str, step: int, pending: int | None) -> Future[Any]:
        return self.threads.submit(self.places[worker].recover, self.states[worker], self.facts(step), pending)

    def join(self, worker: str) -> Future[Any]:
        return self.threads.submit(self.places[worker].join, self.states[worker], 0)

    def talk(self, *workers: str) -> None:
        """The group of these workers does its work."""
        said = [self.threads.submit(self.places[w].group.exchange_values, w) for w in workers]
        assert [one.result(LIMIT_S) for one in said] == [list(workers)] * len(workers)

    def close(self) -> None:
        for place in self.places.values():
            place.told_to_stop = True
            place.close()
        self.threads.shutdown()


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    monkeypatch.setattr(membership, "_END_LIMIT_S", 0.3)  # Some are left in the middle, and never end.
    made = Crew(tmp_path)
    yield made
    made.close()


class Held:
    """Stands for ``receive``: the first transfer begins, and goes on when it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        monkeypatch.setattr(membership, "receive", self)

    def __call__(self, contact: Any, registered: Registered) -> Any:
        self.begun.set()
        assert self.may.wait(LIMIT_S)
        return receive(contact, registered)


def test_a_group_that_was_left_is_no_group_of_one():
    group = WorkerGroup(1, 2, object(), 5)
    group.close()
    with pytest.raises(GroupBroken):
        group.exchange_values("here")
    with pytest.raises(GroupBroken):
        group.wait(group.submit(lambda _: None))
    assert group.begin_exchange(torch.zeros(1)).exception() is not None


def test_what_was_queued_before_a_death_is_not_done_after_it():
    """It would talk to survivors that are elsewhere by now, or block, and hold its memory for good."""
    group = WorkerGroup(0, 2, object(), 5)
    begun, may, done = threading.Event(), threading.Event(), []

    def wait_for_the_dead(_: Any) -> bool:
        begun.set()
        return may.wait(LIMIT_S)

    first, second = group.submit(wait_for_the_dead), group.submit(done.append)
    assert begun.wait(LIMIT_S)
    group.give_up("dead")
    group.close()
    may.set()
    assert first.result(LIMIT_S)
    assert isinstance(second.exception(LIMIT_S), GroupBroken)
    assert group.join(LIMIT_S)
    assert not done


def test_a_plan_that_overtakes_an_agreed_change(crew):
    crew.plan("a", "b")
    crew.plan("b", "a")
    crew.agreed("a", "b")
    crew.plan("a", "b")
    crew.knows("a", "b")
    for failed in [crew.switch("a"), crew.switch("b")]:
        with pytest.raises(GroupBroken):
            failed.result(LIMIT_S)
    crew.talk("a", "b")  # nobody has left the group of before
    crew.agreed("a", "b")
    for done in [crew.switch("a"), crew.switch("b")]:
        assert (done.result(LIMIT_S).from_generation, crew.generation) == (1, 3)
    crew.talk("a", "b")


def test_a_plan_that_only_one_has_heard_of_when_all_agree(crew):
    crew.plan("a", "b")
    crew.plan("b", "a")
    wait(lambda: all(crew.places[w].ready_for(0) == 2 for w in "ab"), "the handover")
    crew.places["b"].agree([2, 2])
    waiting = crew.switch("b")
    crew.plan("a", "b")
    crew.knows("a", "b")
    crew.places["a"].agree([2, 2])
    assert not crew.places["a"].switch_is_due
    with pytest.raises(GroupBroken):
        waiting.result(LIMIT_S)
    crew.talk("a", "b")


def test_a_model_of_any_number_of_layers_changes_its_workers(crew):
    """What those who train say of the step grows with the parameters and the counters of the model."""
    crew.plan("a")
    facts = crew.facts(3) | {"present": "f" * 40_000, "counts": [123_456] * 3000, "trained": 160_000}
    crew.facts = lambda step: facts
    crew.plan("a", "b")
    joined = crew.join("b")
    crew.agreed("a")
    assert crew.switch("a").result(LIMIT_S).generation == 2
    assert joined.result(LIMIT_S).took_over == facts
    crew.talk("a", "b")


def test_a_plan_that_comes_during_the_transfer(crew, monkeypatch):
    crew.plan("a")
    crew.plan("a", "b")
    joined = crew.join("b")
    crew.agreed("a")
    held = Held(monkeypatch)
    given_up = crew.switch("a")
    assert held.begun.wait(LIMIT_S)
    crew.plan("b", "a")
    with pytest.raises(GroupBroken):
        given_up.result(LIMIT_S)
    held.may.set()  # nobody serves any more
    crew.agreed("a")
    with torch.no_grad():
        crew.states["a"].model.weight.fill_(7.0)
    switched = crew.switch("a", step=9)
    assert switched.result(LIMIT_S).generation == joined.result(LIMIT_S).generation == 3
    assert joined.result().took_over["step"] == 9
    assert bool((crew.states["b"].model.weight == 7.0).all())
    crew.talk("b", "a")


def test_nobody_begins_before_everybody_has_the_state(crew, monkeypatch):
    crew.plan("a", "b")
    crew.plan("a", "b", "c", "d")
    joins = [crew.join("c"), crew.join("d")]
    crew.agreed("a", "b")
    held = Held(monkeypatch)
    switches = [crew.switch("a"), crew.switch("b")]
    assert held.begun.wait(LIMIT_S)
    crew.plan("a", "b")
    for failed in switches:
        with pytest.raises(GroupBroken):
            failed.result(LIMIT_S)
    held.may.set()
    for turned_round in joins:
        with pytest.raises(Dismissed):
            turned_round.result(LIMIT_S)
    crew.talk("a", "b")


def test_a_joiner_whose_group_does_not_form_says_so_and_waits_for_a_later_plan(crew, monkeypatch, capfd):
    said = []

    def has_said_so() -> bool:
        said.append(capfd.readouterr().err)
        return "generation 2 did not form: ZeroDivisionError" in "".join(said)

    crew.plan("w0")
    with monkeypatch.context() as broken:
        broken.setattr(handover.Handover, "_connect", lambda _: 1 / 0)
        crew.plan("w0", "w1")
        joining = crew.join("w1")
        wait(has_said_so, "what went wrong is said")
        wait(lambda: crew.places["w1"]._handover is None, "it leaves what cannot form")
    crew.plan("w0", "w1")
    crew.agreed("w0")
    switching = crew.switch("w0")
    assert {joining.result(LIMIT_S).generation, switching.result(LIMIT_S).generation} == {3}


def test_a_joiner_that_turned_round_at_the_last_moment_is_given_the_state_after_all(crew, monkeypatch):
    """Those who trained took it for one of them: the change was complete, but for what the joiner had just heard."""
    crew.plan("a")
    crew.plan("a", "b")
    take_place, heard = GroupMember._take_place, threading.Event()

    def late(place: GroupMember, entered: Any) -> None:
        if place is crew.places["b"]:
            assert heard.wait(LIMIT_S)
        take_place(place, entered)

    monkeypatch.setattr(GroupMember, "_take_place", late)
    joined = crew.join("b")
    crew.agreed("a")
    assert crew.switch("a").result(LIMIT_S).generation == 2
    crew.plan("a", "b")
    crew.knows("a", "b")
    heard.set()
    recovered = crew.threads.submit(crew.places["a"].recover, crew.states["a"], crew.facts(3), None)
    adopted = joined.result(LIMIT_S)
    assert (recovered.result(LIMIT_S).generation, adopted.generation) == (3, 3)
    assert adopted.took_over == crew.facts(3)
    assert torch.equal(crew.states["a"].model.weight, crew.states["b"].model.weight)
    crew.talk("a", "b")


@pytest.mark.parametrize("others", [[], ["a"]])
def test_who_would_leave_stays_when_who_comes_dies(crew, monkeypatch, others):
    """Where another stays, that one would have nobody to go on with."""
    crew.plan("a", "b")
    crew.plan(*others, "c")
    joined = crew.join("c")
    crew.agreed("a", "b")
    held = Held(monkeypatch)
    leaving = [crew.switch("a"), crew.switch("b")]
    assert held.begun.wait(LIMIT_S)
    crew.plan("a", "b", lost=["c"])
    for stays in leaving:
        with pytest.raises(GroupBroken):
            stays.result(LIMIT_S)
    held.may.set()
    with pytest.raises(Dismissed):
        joined.result(LIMIT_S)
    crew.talk("a", "b")


def test_a_survivor_that_had_not_heard_of_the_last_step_counts_it_as_well(crew):
    """Both have its sums, and one has heard that all have them."""
    crew.plan("a", "b", "c")
    crew.plan("a", "b", lost=["c"])
    ahead = crew.recover("a", 4, None).result
    behind = crew.recover("b", 3, 4).result
    assert (ahead(LIMIT_S).top_step, ahead().took_over, ahead().committed) == (4, None, None)
    assert (behind(LIMIT_S).top_step, behind().took_over, behind().committed) == (4, None, crew.facts(4))
    crew.talk("a", "b")


def test_a_step_that_no_survivor_has_heard_of_is_made_again(crew):
    crew.plan("a", "b", "c")
    crew.plan("a", "b", lost=["c"])
    for recovered in [crew.recover("a", 3, 4), crew.recover("b", 3, 4)]:
        assert (recovered.result(LIMIT_S).top_step, recovered.result().committed) == (3, None)


def test_who_takes_the_place_of_the_dead_gets_the_later_step(crew):
    crew.plan("a", "b", "c")
    crew.plan("a", "b", "d", lost=["c"])
    joined = crew.join("d")
    crew.recover("a", 4, None)
    behind = crew.recover("b", 3, 4)
    assert behind.result(LIMIT_S).committed == crew.facts(4)
    assert (joined.result(LIMIT_S).top_step, joined.result().took_over) == (4, crew.facts(4))


def test_who_leaves_waits_until_those_who_come_have_the_state(crew, monkeypatch):
    crew.plan("a", "b")
    crew.plan("a", "c")
    joined = crew.join("c")
    crew.agreed("a", "b")
    held = Held(monkeypatch)
    stays, leaves = crew.switch("a"), crew.switch("b")
    assert held.begun.wait(LIMIT_S)
    time.sleep(0.3)
    assert not leaves.done()
    held.may.set()
    assert isinstance(leaves.exception(LIMIT_S), Dismissed)
    assert stays.result(LIMIT_S).generation == joined.result(LIMIT_S).generation == 2
    crew.talk("a", "c")


def exchange_in_vain(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have agreed that c takes the place of b, and a is going to find that it does not take the state."""
    crew.plan("a", "b")
    crew.plan("a", "c")
    crew.join("c")
    crew.agreed("a", "b")
    monkeypatch.setattr(membership, "_die", lambda why: pytest.fail(why))  # c, in this very process
    monkeypatch.setattr(membership.StateServer, "wait", lambda *_: False)


def test_who_would_leave_stays_when_those_who_stay_give_up(crew, monkeypatch):
    exchange_in_vain(crew, monkeypatch)
    for stays in [crew.switch("a"), crew.switch("b")]:
        with pytest.raises(GroupBroken, match="did not take the state"):
            stays.result(LIMIT_S)
    crew.talk("a", "b")


def test_who_leaves_a_smaller_group_knows_that_it_was_formed(crew):
    crew.plan("a", "b")
    crew.plan("a")
    crew.agreed("a", "b")
    leaves = crew.switch("b")
    time.sleep(0.2)
    assert not leaves.done()
    assert crew.switch("a").result(LIMIT_S).generation == 2
    assert isinstance(leaves.exception(LIMIT_S), Dismissed)


class Unreachable:
    """A store whose host has died, or, with ``blocks``, is cut off: nothing comes back."""

    def __init__(self, blocks: threading.Event | None = None) -> None:
        self._blocks = blocks

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> Any:
            if self._blocks is not None:
                self._blocks.wait()
            raise torch.distributed.DistNetworkError(f"{name}: Broken pipe")

        return fail


def test_all_who_would_leave_stay_when_the_store_of_those_who_come_is_lost(crew):
    crew.plan("a", "b")
    crew.plan("c")
    wait(lambda: crew.places["c"]._handover is not None, "the handover")
    crew.places["c"]._handover.announce(0)
    crew.agreed("a", "b")
    crew.places["a"]._handover.store = Unreachable()
    for stays in [crew.switch("a"), crew.switch("b")]:
        with pytest.raises(GroupBroken, match="did not take the state"):
            stays.result(LIMIT_S)
    crew.talk("a", "b")


def test_a_store_that_is_cut_off_holds_up_nobody_who_gives_up(crew, monkeypatch):
    exchange_in_vain(crew, monkeypatch)
    wait(lambda: all(crew.places[w]._handover._beats for w in "ab"), "a sign of life of who joins")
    monkeypatch.setattr(handover, "JOINER_SILENCE_LIMIT_S", 0.5)
    again = threading.Event()
    for worker in "ab":
        crew.places[worker]._handover.store = Unreachable(blocks=again)
    for stays in [crew.switch("a"), crew.switch("b")]:
        with pytest.raises(GroupBroken):
            stays.result(LIMIT_S / 2)
    crew.talk("a", "b")
    again.set()


def test_who_hears_late_that_it_leaves_hears_that_the_others_have_settled(crew):
    crew.plan("a", "b")
    plan = crew.plan("a")
    crew.agreed("a", "b")
    left = crew.switch("b")
    crew.switch("a").result(LIMIT_S)
    assert isinstance(left.exception(LIMIT_S), Dismissed)
    late = handover.Handover(crew.folder, plan, "b", torch.device("cpu"), joins=False)
    wait(lambda: late.settled, "the news")
    assert late.ready


def test_who_was_told_why_blames_no_joiner():
    told: Any = SimpleNamespace(settled=False, given_up="enough", failure=None, silent_joiners=lambda: ["c"])
    with pytest.raises(GroupBroken, match="enough") as given_up:
        membership._wait_as_leaver(told)
    assert not isinstance(given_up.value, JoinerSilent)


class Stopped:
    """A joiner whose process is stopped once it is warm: it was announced, and says nothing more."""

    def __init__(self, crew: Crew, worker: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(handover, "JOINER_SILENCE_LIMIT_S", 0.5)
        place = crew.places[worker]
        wait(lambda: place._handover is not None, "the handover")
        place._handover.announce(0)
        wait(lambda: place._handover.ready, "its readiness")
        monkeypatch.setattr(place._handover, "_beat", lambda number: None)


def test_a_joiner_that_is_stopped_holds_nobody_up(crew, monkeypatch):
    crew.plan("a", "b")
    crew.plan("a", "b", "c", "d")
    joined = crew.join("d")
    Stopped(crew, "c", monkeypatch)
    crew.agreed("a", "b")
    held_up = [crew.switch("a"), crew.switch("b")]
    errors = [one.exception(LIMIT_S) for one in held_up]
    assert all(isinstance(error, GroupBroken) for error in errors)
    assert ["c"] in [error.workers for error in errors if isinstance(error, JoinerSilent)]
    crew.talk("a", "b")  # they go on as before
    crew.plan("a", "d", lost=["c"])
    crew.agreed("a", "b")
    switched, left = crew.switch("a"), crew.switch("b")
    assert switched.result(LIMIT_S).generation == joined.result(LIMIT_S).generation == 3
    with pytest.raises(Dismissed):
        left.result(LIMIT_S)


@pytest.mark.parametrize("others", [[], ["a"]])
def test_those_who_leave_stay_when_a_joiner_is_stopped(crew, monkeypatch, others):
    crew.plan("a", "b")
    crew.plan(*others, "c")
    Stopped(crew, "c", monkeypatch)
    crew.agreed("a", "b")
    for stays in [crew.switch("a"), crew.switch("b")]:
        with pytest.raises(GroupBroken):
            stays.result(LIMIT_S)
    crew.talk("a", "b")


@pytest.mark.parametrize("stays", [True, False])
def test_joiners_go_to_meet_those_whose_epochs_are_shorter_than_a_rehearsal(crew, stays):
    """Each would come to an epoch that is over, time and again, and never to the same one as the other."""
    crew.plan("a")
    crew.plan(*(["a"] if stays else []), "b", "c")
    place, joined, rehearsals = crew.places["a"], [], []

    def rehearse_and_join(worker: str, rehearsal_s: float) -> None:
        epoch = 0
        while crew.places[worker].join(crew.states[worker], epoch) is None:
            epoch = crew.places[worker].next_epoch_to_join(epoch)
            rehearsals.append(worker)
            time.sleep(rehearsal_s)
        joined.append((worker, epoch))

    joining = [crew.threads.submit(rehearse_and_join, *one) for one in (("b", 0.13), ("c", 0.07))]
    epoch, end_s = 0, time.monotonic() + LIMIT_S
    while not place.switch_is_due:
        assert time.monotonic() < end_s, f"epoch {epoch}: {rehearsals}"
        epoch += 1
        place.agree([place.ready_for(epoch)])
        time.sleep(0.01)
    switched = crew.switch("a")
    for one in joining:
        one.result(LIMIT_S)
    assert sorted(joined) == [("b", epoch), ("c", epoch)]
    if stays:
        switched.result(LIMIT_S)
    else:
        assert isinstance(switched.exception(LIMIT_S), Dismissed)
    crew.talk(*(["a"] if stays else []), "b", "c")


def test_joiners_that_met_each_other_alone_follow_those_who_leave(crew):
    """Their group is whole without those who leave: these may yet be in another epoch than both of them."""
    crew.plan("a")
    crew.plan("b", "c")
    place = crew.places["a"]
    joining = [crew.join("b"), crew.join("c")]
    wait(lambda: place.ready_for(0) == crew.generation, "the handover")
    assert not place.ready_for(1)
    assert [one.result(LIMIT_S) for one in joining] == [None, None]
    assert [crew.places[worker].next_epoch_to_join(0) for worker in "bc"] == [1, 1]
    joining = [crew.threads.submit(crew.places[worker].join, crew.states[worker], 1) for worker in "bc"]
    wait(lambda: place.ready_for(1) == crew.generation, "another handover")
    place.agree([crew.generation])
    assert isinstance(crew.switch("a").exception(LIMIT_S), Dismissed)
    for one in joining:
        assert one.result(LIMIT_S).top_step == 3
    crew.talk("b", "c")


def test_everybody_leaves_once_all_states_are_handed_over(crew):
    crew.plan("a", "b")
    crew.plan("c")
    joined = crew.join("c")
    crew.agreed("a", "b")
    leaving = [crew.switch("a", 4), crew.switch("b", 4)]
    for left in leaving:
        with pytest.raises(Dismissed):
            left.result(LIMIT_S)
    assert joined.result(LIMIT_S).took_over["step"] == 4


def test_a_survivor_waits_for_no_plan_when_training_is_over(crew):
    crew.plan("a", "b")
    with pytest.raises(Dismissed):
        crew.places["b"].recover(crew.states["b"], crew.facts(3), None, is_over=lambda: True)


def test_a_plan_that_cannot_be_read_now_ends_no_step(crew, monkeypatch):
    crew.plan("a")

    def fail(_: Path) -> Membership:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(membership.Membership, "read", fail)
    (crew.folder / "membership.json").touch()
    crew.places["a"].watcher.look()


def test_no_worker_breaks_up_before_the_service_would_give_it_up():
    from elasticflow_airflow.runtime.gang.process_group import COLLECTIVE_TIMEOUT_S
    from elasticflow_airflow.service.settings import ServiceSettings

    assert ServiceSettings.model_fields["tail_limit_s"].default < COLLECTIVE_TIMEOUT_S


def test_who_is_named_lost_leaves_though_it_hears_from_nobody(crew):
    """Its node was cut off, and the others are on with their work when it sees the plan."""
    crew.plan("first", "second")
    crew.plan("first", lost=["second"])
    crew.knows("second")
    with pytest.raises(Dismissed):
        crew.recover("second", 3, None).result(LIMIT_S)
