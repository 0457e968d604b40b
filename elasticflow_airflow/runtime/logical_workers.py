"""Logical workers: their number, and which worker owns them. May import the standard library only."""

from __future__ import annotations

DEFAULT_LOGICAL_WORKERS = 8
"""Default number, if it divides the global batch; the same alone, under torchrun and under the service, on every
cluster. A larger ``max_workers`` raises it."""


def is_power_of_two(number: int) -> bool:
    """Return whether a number is 1, 2, 4, 8, ..."""
    return number >= 1 and number & (number - 1) == 0


def largest_power_of_two(number: int, *, dividing: int) -> int:
    """Return the largest power of two that is at most ``number`` and divides ``dividing``; at least 1."""
    size = 1
    while size * 2 <= number and dividing % (size * 2) == 0:
        size *= 2
    return size


def choose_logical_workers(
    asked: int | None, global_batch_size: int, workers: int, *, consistent: bool, max_workers: int = 1
) -> int:
    """Return the number of logical workers of a job: in consistent mode a power of two that divides the global batch.

    In consistent mode it never changes during the life of the job, and depends only on the largest number of workers
    that there may ever be, not on the current one. Otherwise it is the number of workers. Raises ValueError if it does
    not fit the global batch or the current number of workers.
    """
    if not consistent:
        return workers
    if not is_power_of_two(workers):
        raise ValueError(f"{workers} workers: in consistent mode their number must be a power of two")
    if asked is None:
        asked = largest_power_of_two(max(DEFAULT_LOGICAL_WORKERS, max_workers), dividing=global_batch_size)
        if global_batch_size % workers:
            raise ValueError(
                f"global_batch_size={global_batch_size} cannot be shared equally by {workers} workers: choose a"
                f" multiple of {workers}, fewer workers, or consistency='fast'"
            )
        if asked < workers:
            raise ValueError(
                f"{workers} workers, and there are {asked} logical workers where nobody says how many, wherever the"
                f" script runs: say max_workers={workers} where the session is made, and the result is the same alone"
            )
    if not is_power_of_two(asked):
        raise ValueError(f"logical_workers={asked}: it must be a power of two")
    if global_batch_size % asked:
        raise ValueError(
            f"logical_workers={asked} does not divide global_batch_size={global_batch_size}: choose a global batch "
            f"that is a multiple of it, or logical_workers={largest_power_of_two(asked, dividing=global_batch_size)}"
        )
    if asked < workers:
        raise ValueError(f"logical_workers={asked} is less than the {workers} workers: some would have nothing to do")
    return asked


def owned_by(rank: int, size: int, logical_workers: int) -> range:
    """Return the logical workers of one of ``size`` workers: a contiguous range, so that its sums form one subtree."""
    each = logical_workers // size
    return range(rank * each, (rank + 1) * each)
