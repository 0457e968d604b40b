"""What survivors tell each other of a step that not all have heard is done; a session with a place that is made up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.checkpoints.checkpoint import save as save_checkpoint
from elasticflow_airflow.runtime.checkpoints.saving import turn_of_survivors
from elasticflow_airflow.runtime.gang.membership import Adoption, Dismissed
from elasticflow_airflow.runtime.gang.process_group import GroupBroken, WorkerGroup
from elasticflow_airflow.runtime.gang.watching import PlanWatcher
from elasticflow_airflow.runtime.protocol import Report, ReportKind, append_report, report_path
from elasticflow_airflow.runtime.session import Session
from elasticflow_airflow.runtime.session_core import Leaving
from elasticflow_airflow.runtime.stores.manifest import list_candidates, verify_candidate


class Somewhere:
    """A place where others have died; what comes of it is given."""

    def __init__(self, folder: Path, adoption: Adoption) -> None:
        self.adoption = adoption
        self.group, self.rank, self.size, self.joined = WorkerGroup(), 1, 2, True
        self.members = ("first", "second")
        self.watcher = PlanWatcher(folder, "second", lambda plan: None)
        self.told_to_stop = self.everybody_stops = False
        self.switch_is_due = True

    def recover(self, *arguments: Any) -> Adoption:
        self.said = arguments
        if self.told_to_stop or arguments[3]():
            raise Dismissed
        return self.adoption

    def switch(self, *arguments: Any) -> Adoption:
        raise GroupBroken("a later plan")

    def close(self) -> bool:
        return True


def facts(**changes: Any) -> dict[str, Any]:
    plain = {"step": 1, "loss": 0.5, "present": "3", "counts": [], "trained": 2, "track": None, "trained_s": 0.0}
    return plain | changes


@pytest.fixture
def session(tmp_path: Path):
    made = runtime.init(epochs=2, checkpoint_dir=tmp_path / "checkpoints", allow_nonfinite_loss=True)
    model = nn.Linear(2, 1)
    made.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loader = made.dataloader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), global_batch_size=4)
    with made.step() as step:
        for inputs, targets in step.split(next(iter(loader))):
            step.backward(nn.functional.mse_loss(model(inputs), targets))
        model.zero_grad()
    yield made
    made.finish()


def at(session: Session, tmp_path: Path, **adoption: Any) -> Somewhere:
    plain = Adoption(
        from_generation=1,
        generation=2,
        pause_s=0.0,
        state_bytes=0,
        recovered=True,
        top_step=1,
        took_over=None,
        committed=None,
    )
    place: Any = Somewhere(tmp_path, replace(plain, **adoption))
    session._core.member = place
    return place


def test_who_was_told_that_a_step_counts_can_tell_others(session, tmp_path):
    sums = session._core.committed
    session._core.committed = None  # it has not heard of any commit
    at(session, tmp_path, committed=facts())
    outcome = session._steps.recover(GroupBroken("dead"), replace(sums, present=[False, True]))
    assert outcome.present == [True, True]
    assert session._steps._facts()["present"] == "3"
    session._core.member = None


def test_who_took_the_state_over_can_tell_others_of_its_last_step(session, tmp_path):
    session._core.committed = None
    session._core.gradient_step.group = WorkerGroup()
    at(session, tmp_path)
    adoption = replace(session._core.member.adoption, took_over=facts(step=1, counts=[4], loss=None, trained_s=5000.0))
    session._steps._adopted(adoption)
    told = session._steps._facts()
    assert (told["present"], told["counts"], told["loss"]) == ("3", [4], None)
    assert told["trained_s"] >= 5000.0
    session._core.member = None


def test_a_loss_that_is_no_number_counts_for_all(session, tmp_path):
    sums = session._core.committed
    at(session, tmp_path, committed=facts(loss=None))
    assert math.isnan(session._steps.recover(GroupBroken("dead"), sums).loss)
    session._core.member = None


def test_a_change_that_does_not_come_about_changes_nothing(session, tmp_path):
    place = at(session, tmp_path)
    session._steps._switch()
    assert not hasattr(place, "said"), "there is nothing to recover from"
    session._core.member = None


def test_nobody_waits_for_a_plan_once_rank_0_has_finished(session, tmp_path):
    place = at(session, tmp_path)
    session._steps.recover(GroupBroken("dead"), None)
    is_over = place.said[3]
    assert not is_over()
    path = report_path(Path(session.config.incarnation_dir), session._core.context.generation, "first")
    for number in range(300):
        append_report(path, Report(kind=ReportKind.PROGRESS, generation=2, worker_id="first", rank=0, step=number))
    assert not is_over()
    append_report(path, Report(kind=ReportKind.FINISHED, generation=2, worker_id="first", rank=0, step=300))
    assert is_over()
    session._core.member = None


@pytest.fixture
def checkpoints(session) -> Iterator[Callable[[], list[int]]]:
    """The steps of the candidates that are there."""
    yield lambda: [verify_candidate(folder).step for folder in list_candidates(session._core.context.checkpoints)]
    session._core.finished = True  # it has left


def test_a_stop_that_finds_the_group_broken_is_saved_by_who_lives(session, tmp_path, checkpoints):
    place = at(session, tmp_path)
    place.told_to_stop = place.everybody_stops = True
    with pytest.raises(Leaving):
        session._steps.recover(GroupBroken("dead"), None)
    assert checkpoints() == [1]


def test_a_sigterm_that_finds_the_group_broken_is_answered_by_saving(session, tmp_path, checkpoints):
    at(session, tmp_path)
    session._core.terminated = True
    with pytest.raises(Leaving):
        session._steps.recover(GroupBroken("dead"), None)
    assert checkpoints() == [1]


def test_who_is_not_in_the_plan_of_the_survivors_saves_nothing(session, tmp_path, checkpoints):
    place = at(session, tmp_path)
    place.told_to_stop = True
    with pytest.raises(Leaving):
        session._steps.recover(GroupBroken("dead"), None)
    assert checkpoints() == []


def test_everybody_leaves_and_who_was_to_save_dies(session, tmp_path, checkpoints):
    place = at(session, tmp_path)
    place.group = Breaking(deaths=1)
    with pytest.raises(Leaving):
        session._steps._leave()
    assert checkpoints() == [1]


def test_survivors_save_one_after_the_other_and_only_what_is_newer(tmp_path, session):
    order: list[Any] = []

    def save(step: int) -> None:
        with turn_of_survivors(tmp_path / "c", 2, step) as needed:
            order.append((step, needed, "begins"))
            if needed:
                save_checkpoint(
                    session._core.registered, tmp_path / "c", incarnation=1, generation=2, step=step, metadata={}
                )
            order.append((step, needed, "ends"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, [5, 5, 5, 6]))
    assert all(a[0] == b[0] and b[2] == "ends" for a, b in itertools.pairwise(order) if a[2] == "begins")
    assert [step for step, needed, what in order if needed and what == "begins"] in ([5, 6], [6])


class Breaking(WorkerGroup):
    """A group in which others die, again and again, before all are there."""

    def __init__(self, deaths: int) -> None:
        super().__init__(1, 2)
        self.deaths, self.waited = deaths, 0

    def wait_for_all(self) -> None:
        self.waited += 1
        if self.waited <= self.deaths:
            raise GroupBroken("dead")


def test_who_saves_for_the_dead_may_die_as_well(session, tmp_path):
    place = at(session, tmp_path)
    place.group = Breaking(deaths=2)
    session.finish()
    assert place.group.waited == 3, "it must not leave before somebody has saved"
    session._core.member = None


def test_who_waits_for_the_dead_before_there_is_a_state_is_told(session, tmp_path):
    place = at(session, tmp_path)
    place.group = Breaking(deaths=1)
    registered, session._core.registered = session._core.registered, None
    with pytest.raises(GroupBroken, match="dead"):
        session.wait_for_all()
    session._core.registered, session._core.member, session._core.finished = registered, None, False


def test_without_a_service_nobody_saves_for_the_dead(session):
    session._core.lone_group = Breaking(deaths=1)
    with pytest.raises(GroupBroken):
        session.finish()
    session._core.lone_group, session._core.finished = WorkerGroup(), False
