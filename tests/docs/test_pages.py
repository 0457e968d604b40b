"""The documentation is true: links lead somewhere, snippets run or compile, and every setting is described.

A fenced block is preceded by a comment that says what to do with it: ``<!-- run -->`` executes Python,
``<!-- check: shell -->`` has a shell parse it, and the command lines themselves each call of ``elasticflow`` and
``airflow`` in it, as in any other block of shell commands; ``<!-- file: PATH -->`` names a file below ``docs/`` instead
of a block. Python without a comment runs in the test of the area that owns the page, or is compiled here.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.shell_commands import calls_of, refusal_of_elasticflow

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<what>[^>]*) -->\n+)?^```(?P<language>\w*)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "benchmarks").rglob("*.md"))], ids=page_id)
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


def shell_blocks(page: Path) -> list[str]:
    return [block["body"] for block in BLOCK.finditer(page.read_text()) if block["language"] in ("bash", "sh")]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_elasticflow_exist_with_their_options(page: Path) -> None:
    for body in shell_blocks(page):
        for words in calls_of("elasticflow", body):
            assert refusal_of_elasticflow(words) == "", f"elasticflow {' '.join(words)}"


def test_commands_of_airflow_exist_with_their_options(tmp_path: Path) -> None:
    calls = [
        (page_id(page), words) for page in PAGES for body in shell_blocks(page) for words in calls_of("airflow", body)
    ]
    assert {"elasticflow", "connections", "db"} <= {words[0] for _, words in calls}
    assert refusals_of_airflow(tmp_path, [words for _, words in calls]) == [""] * len(calls), calls


def refusals_of_airflow(home: Path, calls: list[list[str]]) -> list[str]:
    """What Airflow's own parser says to each, in a process of its own: it makes itself a home."""
    program = """
import contextlib, io, json, sys
from airflow.cli.cli_parser import get_parser
refusals, parser = [], get_parser()
for words in json.load(sys.stdin):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            parser.parse_args(words)
        refusals.append("")
    except SystemExit as left:
        refusals.append(said.getvalue() if left.code else "")
print(json.dumps(refusals))
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, "AIRFLOW_HOME": str(home)},
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_commands_are_found_wherever_they_stand() -> None:
    script = """
export A=1 B=elasticflow; B=2 /opt/bin/elasticflow doctor --url http://127.0.0.1:8321 > out 2>&1  # and so on
useradd --system elasticflow
for node in $(elasticflow capacity --json | jq -r '.releasable[]'); do
    elasticflow drain "$node" \\
        --in 120 && echo 'elasticflow none'
done
docker compose --file compose.yaml exec elasticflow elasticflow health
kubectl exec deploy/scheduler -- airflow elasticflow doctor
elasticflow show "$(elasticflow jobs | awk 'NR == 2 {print $1}')"
"""
    assert list(calls_of("elasticflow", script)) == [
        ["doctor", "--url", "http://127.0.0.1:8321"],
        ["capacity", "--json"],
        ["drain", "$node", "--in", "120"],
        ["health"],
        ["jobs"],
        ["show", "substituted"],
    ]
    assert list(calls_of("airflow", script)) == [["elasticflow", "doctor"]]


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refusal_of_elasticflow(["jobs", "--live"]) == ""
    for words in (["job"], ["jobs", "--alive"], ["drain", "node", "--in", "soon"], ["show"], ["submit", "a.py"]):
        assert refusal_of_elasticflow(words) != "", words
    said = refusals_of_airflow(
        tmp_path,
        [["elasticflow", "jobs", "--alive"], ["elasticflow", "job"], ["dbs"], ["elasticflow", "jobs", "--live"]],
    )
    assert [bool(refusal) for refusal in said] == [True, True, True, False]


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
