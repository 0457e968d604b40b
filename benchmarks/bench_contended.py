"""Clusters that are too small for their traces: not everybody can be served, and what counts is who is.

    python benchmarks/bench_contended.py [--traces 195job,...] [--policies elasticflow:value,...] [--write]

Ours with the settings of `elasticflow serve`; then with each objective, decided at arrival or waiting, beside every
other policy, those that refuse nobody included, with speeds known exactly: which jobs are chosen is the question. On
the traces of a thousand jobs beside some of them. Options, output and data as of bench_policies.py.
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
FURTHER = (Case("1000job_1500lam", 4, 8), Case("1000job_1500lam", 8, 8), Case("philly_103959", 2, 8))
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
    if not args.policies and not args.exact:
        served = [(case, ("elasticflow", "elasticflow:wait")) for case in (*TOO_SMALL, *FURTHER)]
        bench("contended_served", served, args, why=False, brief=True)
    args.exact = True
    plan = [(case, (*OURS, *OTHERS)) for case in TOO_SMALL]
    plan += [(case, (*OURS, "edf+elastic", "edf+admission")) for case in FURTHER]
    bench("contended", plan, args, why=False, counted=("elasticflow", "elasticflow:value:wait"))


if __name__ == "__main__":
    main()
