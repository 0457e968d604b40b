"""How little changes: the elastic scripts of the documentation beside the plain ones that they come from."""

from __future__ import annotations

import difflib
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELASTIC, PLAIN = ROOT / "docs/examples/train_digits.py", ROOT / "tests/support/plain_digits.py"


def changed(plain: str, elastic: str) -> tuple[list[str], list[str]]:
    """Lines that the elastic script has anew, and those that it no longer has. Indented, a line is the same."""
    lines = [
        [line for line in (re.sub(r"\s+# \d+$", "", line).strip() for line in text.splitlines()) if line]
        for text in (plain, elastic)
    ]
    found = list(difflib.ndiff(*lines))
    return [line[2:] for line in found if line[0] == "+"], [line[2:] for line in found if line[0] == "-"]


def body(script: Path) -> str:
    """What comes after the module's docstring."""
    return script.read_text().split('"""', 2)[2]


def test_an_elastic_script_differs_by_at_most_ten_lines_from_a_plain_one(session_globals, capsys):
    new, gone = changed(body(PLAIN), body(ELASTIC))
    assert 0 < len(new) <= 10, new
    assert len(gone) <= len(new), gone
    runpy.run_path(str(PLAIN), run_name="__main__")
    said = re.search(r"^accuracy ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert said is not None
    assert float(said[1]) > 0.9, "the plain script trains the same thing"


def test_the_pages_two_loops_differ_by_the_ten_lines_that_it_counts():
    page = (ROOT / "docs/how-to/elastic-training-script.md").read_text()
    plain, elastic = re.findall(r"^```python\n(import torch\n.*?)^```", page, re.DOTALL | re.MULTILINE)[:2]
    new, gone = changed(plain, elastic)
    counted = re.findall(r"^(.*?)\s+# (\d+)$", elastic, re.MULTILINE)
    assert [int(number) for _, number in counted] == list(range(1, 11))
    assert new == [line.strip() for line, _ in counted]
    assert len(gone) <= len(new), gone
