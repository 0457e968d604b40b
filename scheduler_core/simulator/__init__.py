"""The simulator: run the service's own scheduler on a virtual clock, from traces to schedules and metrics.

Reading order: :mod:`trace` and :mod:`curves` (input), :mod:`run` (event loop), :mod:`outcome` (metrics), :mod:`export`.
Unlike the rest of the library, this package reads and writes files; the event loop itself does not.
"""
