"""The documentation builds into a site without a warning: every page has its place, every link and heading is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo", "sphinx_copybutton"):
        pytest.importorskip(module, reason="needs the extra [docs]")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted((ROOT / "docs").rglob("*.md"))
    built = {str(file.relative_to(tmp_path).with_suffix("")) for file in tmp_path.rglob("*.html")}
    assert {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in pages} <= built
    front = (tmp_path / "index.html").read_text()
    captions = re.findall(r'class="caption"[^>]*><span class="caption-text">([^<]+)<', front)
    assert captions == ["Tutorial", "How to", "Reference", "Explanation"]
