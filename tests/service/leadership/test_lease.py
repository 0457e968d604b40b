"""The rules of the lease by themselves, with a clock that the test moves."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from elasticflow_airflow.service.leadership.lease import Ask, Lease, LeaseTerms
from elasticflow_airflow.service.leadership.lease_table import LeaseTable
from elasticflow_airflow.service.settings import ServiceSettings, problems_of


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(LeaseTerms(lease_s=5.0, renew_s=1.0), clock)


def elected(lease: Lease, epoch: int = 3) -> None:
    lease.answered(lease.request(), epoch)
    assert lease.may_decide(epoch)


def test_who_has_no_lease_asks_for_one_and_decides_nothing(lease):
    assert lease.request().ask is Ask.TAKE
    assert not lease.may_decide()
    lease.answered(lease.request(), None)
    assert not lease.may_decide()


def test_the_right_counts_from_before_the_request_and_ends_before_the_lease(lease, clock):
    request = lease.request()
    clock.now_s += 2.0  # the answer takes its time
    lease.answered(request, 1)
    assert lease.may_decide(1)
    clock.now_s += 1.49
    assert lease.may_decide(1)
    clock.now_s += 0.02
    assert not lease.may_decide(1)
    assert lease.terms.stop_s < lease.terms.lease_s


def test_an_answer_that_comes_after_the_lease_is_no_right(lease, clock):
    request = lease.request()
    clock.now_s += 10.0
    lease.answered(request, 1)
    assert not lease.may_decide()


def test_a_renewal_lengthens_it_and_one_without_an_answer_does_not(lease, clock):
    elected(lease)
    clock.now_s += 3.0
    lease.request()  # whose answer is lost
    clock.now_s += 0.4
    assert lease.may_decide()
    renewal = lease.request()
    assert (renewal.ask, renewal.epoch) == (Ask.RENEW, 3)
    lease.answered(renewal, 3)
    clock.now_s += 3.4
    assert lease.may_decide(3)


def test_who_stood_still_goes_on_only_if_nobody_came_between(lease, clock):
    elected(lease)
    clock.now_s += 60.0  # as after SIGSTOP, or a suspended machine
    assert not lease.may_decide()
    lease.answered(lease.request(), 3)
    assert lease.may_decide(3)
    clock.now_s += 60.0
    lease.answered(lease.request(), None)
    assert lease.epoch is None
    assert lease.request().ask is Ask.TAKE


def test_an_answer_about_an_earlier_lease_changes_nothing(lease, clock):
    elected(lease, 3)
    late = lease.request()
    lease.answered(lease.request(), None)
    elected(lease, 5)
    lease.answered(late, 3)
    assert (lease.epoch, lease.may_decide(3)) == (5, False)
    lease.answered(late, None)
    assert lease.may_decide(5)


def test_who_resigns_decides_nothing_from_that_moment_on_and_gives_the_lease_up(lease):
    elected(lease)
    lease.resign()
    assert not lease.may_decide()
    request = lease.request()
    assert request.ask is Ask.GIVE_UP
    lease.answered(request, 3)
    assert lease.epoch is None
    lease.stand_again()
    elected(lease, 4)


def test_a_lease_that_was_taken_while_its_taker_resigned_gives_no_right(lease):
    request = lease.request()
    lease.resign()
    lease.answered(request, 7)
    assert not lease.may_decide()
    assert lease.request().ask is Ask.GIVE_UP


@pytest.mark.parametrize(("lease_s", "renew_s"), [(5.0, 2.0), (2.0, 2.0), (5.0, 0.0)])
def test_a_lease_that_one_late_renewal_would_end_is_refused(lease_s, renew_s):
    with pytest.raises(ValueError, match="Let it last"):
        LeaseTerms(lease_s, renew_s)


def test_the_settings_say_what_is_wrong_with_such_a_lease(monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_LEADER_LEASE_S", "3")
    monkeypatch.setenv("ELASTICFLOW_LEADER_RENEW_S", "2")
    with pytest.raises(ValidationError) as found:
        ServiceSettings()
    assert "a lease of 3 s cannot be held with a renewal every 2 s" in problems_of(found.value)[0]


def test_who_stands_again_asks_for_another_epoch(lease, clock):
    """The request that gave it up was not answered: another replica may lead, or it may arrive yet."""
    elected(lease, 3)
    lease.resign()
    late = lease.request()
    assert late.ask is Ask.GIVE_UP
    clock.now_s += 1.0
    lease.stand_again()
    assert not lease.may_decide()
    assert lease.request().ask is Ask.TAKE
    elected(lease, 4)
    lease.answered(late, 3)
    assert lease.may_decide(4)


def test_the_row_is_asked_one_request_at_a_time():
    """An epoch is raised in another thread than leases are renewed in; both use one connection, and may lose it."""
    table = LeaseTable("sqlite://", "one", LeaseTerms(), own_url=None, card={}, channel="")
    inside, most, gate = [0], [0], threading.Lock()

    class Connection:
        def execute(self, *_: object) -> None:
            with gate:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.05)
            with gate:
                inside[0] -= 1
            raise sa.exc.OperationalError(None, None, RuntimeError("the server went away"))

        def invalidate(self) -> None: ...

        def close(self) -> None: ...

    def ask(_: int) -> str:
        with pytest.raises(sa.exc.OperationalError):
            table.raise_epoch(1, 2)
        return "told"

    table._connect = Connection
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(8))) == ["told"] * 8
    assert most == [1]
