"""Clusters that are too small for their traces: not everybody can be served, and what counts is who is.

    python benchmarks/bench_contended.py [--traces 195job,...] [--policies elasticflow:value,...] [--write]

Ours with each objective, decided at arrival or waiting, beside every other policy, those that refuse nobody included.
Speeds are known exactly: which jobs are chosen is the question. Options, output and data as of bench_policies.py.
"""

from __future__ import annotations

from bench_policies import OTHERS, Case, bench, parser_of

TOO_SMALL = (
    Case("195job", 4, 8),
    Case("195job", 8, 8),
    Case("t4_195job", 8, 4),
    Case("cluster10", 4, 8),
    Case("cluster10", 2, 8),
)
OURS = (
    "elasticflow",
    "elasticflow:wait",
    "elasticflow:first-come",
    "elasticflow:first-come:wait",
    "elasticflow:value",
    "elasticflow:value:wait",
)


def main() -> None:
    args = parser_of(__doc__).parse_args()
    args.exact = True
    plan = [(case, (*OURS, *OTHERS)) for case in TOO_SMALL]
    bench("contended", plan, args, why=False, counted=("elasticflow", "elasticflow:value:wait"))


if __name__ == "__main__":
    main()
