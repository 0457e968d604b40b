"""The list of Airflow's traps names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path


def test_each_trap_has_its_tests():
    tests = Path(__file__).parents[1]
    files = [*tests.glob("**/test_*.py"), *tests.glob("**/*_cases.py"), *tests.glob("support/*.py")]
    known = {name for file in files for name in re.findall(r"^(?:async )?def (\w+)", file.read_text(), re.MULTILINE)}
    lines = (Path(__file__).parent / "traps.md").read_text().splitlines()
    rows = [line.split("|") for line in lines[lines.index("|---|---|") + 1 :]]
    assert len(rows) > 30
    for _, trap, names, _ in rows:
        missing = [name for name in names.split(",") if name.strip() not in known]
        assert not missing, f"{trap.strip()}: no test {missing}"
