"""The benchmark's page names scripts that exist, and every table of it has one that makes it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/explanation/benchmark.md").read_text()


def test_scripts_that_are_named_exist() -> None:
    named = re.findall(r"benchmarks/(bench_\w+\.py)", PAGE)
    assert named
    for name in named:
        assert (ROOT / "benchmarks" / name).is_file(), name


def test_every_table_is_made_by_the_script_that_is_named_last() -> None:
    script = ""
    for named, table in re.findall(r"benchmarks/(bench_\w+\.py)|<!-- results: (\w+) -->", PAGE):
        script = named or script
        if table:
            assert f'"{table}"' in (ROOT / "benchmarks" / script).read_text(), f"{script} does not know {table}"
