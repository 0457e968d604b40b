"""The base of policies that admit a job when its booking is worth more than it costs at the prices of the moment.

What is common to OASiS (INFOCOM 2018) and AOnline (TCC 2022): the utility of an end, and the test of a pay-off above 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Self

from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Job, Node
from elasticflow_airflow.scheduler_core.model.work import INFINITY, Course, Work
from elasticflow_airflow.scheduler_core.simulator.baselines.common.booking import BookingPolicy, rising
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.prices import (
    Bill,
    PriceRange,
    Stretch,
    slot_seconds,
    stretches,
)

HALF_LIFE_S = 86_400.0
"""A best-effort job has lost half of its value when it ends so long after its submission."""


def utility(job: Job, end_s: float) -> float:
    """What an end at ``end_s`` is worth: the whole value until the deadline and nothing after it.

    That is the sigmoid of OASiS (section V) in the limit of a time-critical job. Without a deadline: falling slowly.
    """
    if job.deadline_s is not None:
        return job.value if end_s <= job.deadline_s else 0.0
    late = max(0.0, end_s - job.submitted_s)
    return job.value / (1.0 + late / HALF_LIFE_S)


class PricedPolicy(BookingPolicy):
    """Books what is worth its price. Subclasses say what there is to choose from."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, prices: PriceRange | None = None
    ) -> None:
        super().__init__(config, nodes)
        self.prices = prices or PriceRange()

    @abstractmethod
    def choices(self, work: Work, book: Bookings, over: list[Stretch]) -> Iterator[Course]:
        """Bookings to choose from; ``over`` is the time from now to the limit with free slots and prices."""

    def horizon_s(self, work: Work, book: Bookings) -> float:
        """Until when prices matter: the limit, or where all that is booked and the job at its slowest have ended."""
        slowest = work.startup_s + work.remaining / work.speeds[rising(work)[0]] + work.tail_s
        return min(work.limit_s, max(book.now, book.times[-1]) + slowest + 1.0)

    def offer(self, job: JobView, work: Work, book: Bookings) -> Course | str:
        """The booking of the greatest pay-off, if that is above 0."""
        found = self.best(job, work, book)
        return found if isinstance(found, str) else found[1]

    def best(self, job: JobView, work: Work, book: Bookings) -> tuple[float, Course] | str:
        """The greatest pay-off and its booking; or why there is none."""
        sizes = rising(work)
        if work.remaining == INFINITY or not sizes:
            return "its length or its speed is not known, so that nothing can be booked for it"
        spec = job.job.job
        self.prices.see(spec.value, *slot_seconds(work, sizes))
        slots = self.layout.usable.bit_count()
        end = self.horizon_s(work, book)
        over = stretches(book, slots, self.prices, book.now, end)
        bill = Bill(over)
        found: tuple[float, Course] | None = None
        cheapest = INFINITY
        for course in self.choices(work, book, over):
            cost = bill.of(course.holdings)
            cheapest = min(cheapest, cost)
            pay_off = utility(spec, course.promised_s) - cost
            if pay_off > 0.0 and (found is None or (pay_off, -course.promised_s) > (found[0], -found[1].promised_s)):
                found = (pay_off, course)
        if found is not None:
            return found
        if cheapest == INFINITY:
            return "there is no room that would end it by its deadline beside what is booked"
        return f"its price of {cheapest:.3g} is above its value of {spec.value:.3g}: others are expected to pay more"

    def twin(self) -> Self:
        """An independent copy."""
        other = super().twin()
        other.prices = PriceRange(self.prices.headroom, self.prices.highest, self.prices.lowest)
        return other
