"""Chooses the save interval from the cost of a save and the failure rate of workers. Knows only numbers.

J. W. Young, "A first order approximation to the optimum checkpoint interval" (CACM 17, 1974); J. T. Daly, "A higher
order estimate of the optimum checkpoint interval for restart dumps" (FGCS 22, 2006), equation 37.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_S = 10.0
MOST_S = 1800.0
OF_TRAINING = 0.05
"""Fraction of a background write's duration that is lost to training."""
PRIOR_MTBF_S = 6 * 3600.0
"""Time between failures that is assumed before any is observed; it has the weight of one failure."""

SLOW_DISK_BYTES_PER_S = 100e6
"""Write speed assumed before a save has been measured; even a network disk reaches it."""


def best_interval_s(save_cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of training between two saves that minimize the total time lost, by Daly's estimate.

    ``save_cost_s`` is the training time that one save costs, ``mtbf_s`` the mean time between failures. Raises
    ValueError if either is not positive.
    """
    if not (save_cost_s > 0 and mtbf_s > 0):
        raise ValueError(f"a save that costs {save_cost_s} s every {mtbf_s} s: both must be positive")
    if save_cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_cost_s / (2 * mtbf_s))
    return math.sqrt(2 * save_cost_s * mtbf_s) * (1 + ratio / 3 + ratio * ratio / 9) - save_cost_s


@dataclass(slots=True, kw_only=True)
class SaveInterval:
    """Chooses the interval, between ``LEAST_S`` and ``MOST_S``, from the costs and failures reported to it."""

    first_s: float = 60.0
    """The interval until a save has been measured, for a state that is large or of unknown size."""
    failures: int = 0
    """Number of failures of this job so far; each cost the steps since the last checkpoint."""
    trained_s: float = 0.0
    """How long this job has trained so far, over the same span as ``failures``, across all its processes."""
    _cost_s: float | None = None
    _write_s: float = 0.0

    def expect(self, size_bytes: int) -> None:
        """Set the first interval from the state's size: a small one is saved early, in case of an early failure."""
        self.first_s = min(self.first_s, max(LEAST_S, 2 * size_bytes / SLOW_DISK_BYTES_PER_S))

    def saved(self, *, stall_s: float, write_s: float) -> None:
        """Record what a save cost. The newest has half of the weight, because states grow and disks get slower."""
        cost_s = stall_s + OF_TRAINING * write_s
        self._cost_s = cost_s if self._cost_s is None else (self._cost_s + cost_s) / 2
        self._write_s = max(write_s, self._write_s / 2)

    @property
    def mtbf_s(self) -> float:
        """Estimated mean time between failures (posterior mean of the rate, gamma prior of one failure)."""
        return (PRIOR_MTBF_S + self.trained_s) / (1 + self.failures)

    @property
    def seconds(self) -> float:
        """Seconds from one save to the next; ``first_s`` until the first save has been measured."""
        if self._cost_s is None:
            return self.first_s
        best_s = best_interval_s(max(self._cost_s, 1e-6), self.mtbf_s)
        # Never faster than the disk: otherwise the previous save would still be in progress.
        return min(MOST_S, max(LEAST_S, 2 * self._write_s, best_s))
