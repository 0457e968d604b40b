"""Print the history of a seed, and what is wrong with it: ``python -m support.histories SEED [FLAW ...] [--drift D]``.

Run it with ``tests`` and the root of the repository in PYTHONPATH.
"""

from __future__ import annotations

import argparse

from support.histories.checker import check, written
from support.histories.protocol import Flaw
from support.histories.scenario import PROMISED_DRIFT, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m support.histories", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("flaws", nargs="*", choices=[[], *(flaw.name for flaw in Flaw)], metavar="FLAW")
    parser.add_argument("--drift", type=float, default=PROMISED_DRIFT)
    asked = parser.parse_args()
    history = run(asked.seed, {Flaw[name] for name in asked.flaws}, asked.drift).history
    print(written(history))
    for violation in check(history):
        print(violation)


if __name__ == "__main__":
    main()
