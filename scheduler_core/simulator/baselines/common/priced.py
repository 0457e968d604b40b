"""Base class of policies that admit a job if its booking is worth more than it costs at current prices.

Common to OASiS (INFOCOM 2018) and AOnline (TCC 2022): the utility of an end time, and the test for a pay-off above 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

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
"""A best-effort job is worth half of its value if it ends this long after its submission."""


def utility(job: Job, end_s: float) -> float:
    """Return the utility of an end at ``end_s``: the full value until the deadline and 0 after it.

    This is the sigmoid of OASiS (section V) in the limit of a time-critical job. Without a deadline it falls slowly.
    """
    if job.deadline_s is not None:
        return job.value if end_s <= job.deadline_s else 0.0
    late = max(0.0, end_s - job.submitted_s)
    return job.value / (1.0 + late / HALF_LIFE_S)


class PricedPolicy(BookingPolicy):
    """Books a job if that is worth its price. Subclasses provide the bookings to choose from."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, prices: PriceRange | None = None
    ) -> None:
        super().__init__(config, nodes)
        self.prices = prices or PriceRange()

    @abstractmethod
    def choices(self, work: Work, book: Bookings, over: list[Stretch]) -> Iterator[Course]:
        """Yield bookings to choose from; ``over`` is the time from now to the limit, with free slots and prices."""

    def horizon_s(self, work: Work, book: Bookings) -> float:
        """Return until when prices matter: the limit, or the end of all bookings plus the job at its slowest."""
        slowest = work.startup_s + work.remaining / work.speeds[rising(work)[0]] + work.tail_s
        return min(work.limit_s, max(book.now, book.times[-1]) + slowest + 1.0)

    def offer(self, job: JobView, work: Work, book: Bookings) -> Course | str:
        """Return the booking of the greatest pay-off if that is above 0, else the reason why there is none."""
        found = self.best(job, work, book)
        return found if isinstance(found, str) else found[1]

    def best(self, job: JobView, work: Work, book: Bookings) -> tuple[float, Course] | str:
        """Return the greatest pay-off and its booking, or the reason why there is none."""
        sizes = rising(work)
        if work.remaining == INFINITY or not sizes:
            return "its length or its speed is not known, so that nothing can be booked for it"
        spec = job.job.job
        self.prices.see(spec.value, *slot_seconds(work, sizes))
        slots = self.layout.availability.slots.bit_count()
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
