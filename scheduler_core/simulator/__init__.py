"""The very scheduler of the service on a virtual clock: traces in, schedules and their figures out.

Reading order: :mod:`trace` and :mod:`curves` (input), :mod:`run` (the loop), :mod:`outcome` (figures), :mod:`export`.
Unlike the rest of the library this package reads and writes files; the loop itself does not.
"""
