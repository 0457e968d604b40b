"""The documentation is true: links lead somewhere, snippets run or compile, and every setting is described.

A fenced block is preceded by a comment that says what to do with it: ``<!-- run -->`` executes Python,
``<!-- check: shell -->`` has a shell parse it, ``<!-- file: PATH -->`` names a file below ``docs/`` instead of a block.
Python without a comment runs in the test of the area that owns the page, or is compiled here.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<what>[^>]*) -->\n+)?^```(?P<language>\w*)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page_id(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_snippets_are_valid(page: Path) -> None:
    for block in BLOCK.finditer(page.read_text()):
        language, body = block["language"], block["body"]
        if language == "python":
            compile(body, page_id(page), "exec")
        elif language in ("bash", "sh"):
            subprocess.run(["bash", "-n"], input=body, text=True, check=True)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_snippets_marked_run_do(page: Path) -> None:
    for block in BLOCK.finditer(page.read_text()):
        if block["what"] == "run":
            exec(compile(block["body"], page_id(page), "exec"), {"__name__": "snippet"})


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", page.read_text(), re.MULTILINE):
            assert (target[0] or target[1]) in targets, f"{page_id(page)} names make {target}"


def test_files_that_pages_include_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"<!-- file: (\S+) -->", page.read_text()):
            ast.parse((ROOT / "docs" / name).read_text())


def test_every_setting_of_the_service_is_described() -> None:
    from elasticflow_airflow.service.settings import ServiceSettings

    page = (ROOT / "docs/reference/configuration.md").read_text()
    named = set(re.findall(r"`(ELASTICFLOW_[A-Z_]+)`", page))
    assert {f"ELASTICFLOW_{name.upper()}" for name in ServiceSettings.model_fields} <= named
