"""Results are true: each table names the command that made it, `make bench` runs it, and pages show the same."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPLANATION = ROOT / "docs/explanation"
FILES = sorted((ROOT / "benchmarks/results").glob("*.md"))
MARKER = re.compile(r"<!-- results: (\w+) -->\n\n(.*?)(?=\n+^#|\Z)", re.DOTALL | re.MULTILINE)
HOW_MADE = re.compile(
    r"- Command: `python (benchmarks/bench_\w+\.py[^`]*)`\n- Settings: \S.*\n"
    r"- Made on \d{4}-\d\d-\d\d, on \d+ cores\n\n"
)
LINKED = re.compile(r"\]\([./]+/benchmarks/results/(\w+\.md)\)")
NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")


def results() -> list[tuple[Path, str, str, str]]:
    """Every set of results: its file, its name, the command that made it, and its tables."""
    found = []
    for file in FILES:
        for name, body in MARKER.findall(file.read_text()):
            made = HOW_MADE.match(body)
            assert made, f"{file.name}: {name} does not say how it was made"
            found.append((file, name, made[1], body[made.end() :].strip()))
    return found


def tables_of(name: str) -> str:
    """What stands under a name in a file of results."""
    (tables,) = [tables for _, found, _, tables in results() if found == name]
    return tables


def rows_of(text: str) -> list[list[str]]:
    """The rows of the first table of a text, as its cells."""
    lines = re.search(r"^\|.*(?:\n\|.*)*", text, re.MULTILINE)
    assert lines, text
    rows = [[cell.strip(" *`") for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    return [row for row in rows if not re.fullmatch(r"[-: ]*", "".join(row))]


def overview(name: str) -> dict[str, dict[str, int]]:
    """Deadlines met, by policy and trace, as a file of results has them."""
    heads, *rows = rows_of(tables_of(name))
    traces = [head.split()[0] for head in heads[1:]]
    return {row[0]: {t: int(cell) for t, cell in zip(traces, row[1:], strict=True) if cell} for row in rows}


def run_by_make() -> list[str]:
    """The commands of `make bench`."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")
    done = subprocess.run([make, "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    listed = re.search(r"for command in (.*?); do (.*)", done.stdout)
    assert listed, done.stdout
    assert "$command --write" in listed[2]
    return shlex.split(listed[1])


def test_there_are_results_of_the_main_benchmarks() -> None:
    assert {"policies.md", "contended.md", "errors.md", "rescale.md", "burst.md"} <= {file.name for file in FILES}
    assert len({name for _, name, _, _ in results()}) == len(results())


def test_scripts_that_are_named_exist() -> None:
    for page in [*(ROOT / "docs").rglob("*.md"), *FILES]:
        for name in re.findall(r"\b(bench_\w+\.py)", page.read_text()):
            assert (ROOT / "benchmarks" / name).is_file(), f"{page}: {name}"


def test_every_table_is_made_by_the_script_that_it_names() -> None:
    for file, table, command, _ in results():
        script = command.split()[0]
        assert script == f"benchmarks/bench_{file.stem}.py", f"{file.name}: {table} is made by {command}"
        text = (ROOT / script).read_text()
        assert f'"{table}"' in text, f"{command} does not know {table} of {file.name}"


def test_every_script_can_write_its_results() -> None:
    for script in (ROOT / "benchmarks").glob("bench_*.py"):
        assert "parser_of(" in script.read_text(), f"{script.name} has no --write"


def test_make_bench_runs_the_command_of_every_table() -> None:
    listed = run_by_make()
    for file, table, command, _ in results():
        assert command in listed, f"{file.name}: {table} is made by {command!r}, which `make bench` does not run"
    for script in (ROOT / "benchmarks").glob("bench_*.py"):
        assert f"benchmarks/{script.name}" in listed


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_table_of_results_has_a_marker(file: Path) -> None:
    text = file.read_text()
    assert text.startswith(f"# bench_{file.stem}.py\n")
    assert MARKER.search(text)
    assert "\n|" not in MARKER.sub("", text), f"{file.name}: a table is written by hand"


def test_tables_on_pages_are_those_of_the_results() -> None:
    shown = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for name, tables in MARKER.findall(page.read_text()):
            assert tables.strip() == tables_of(name), f"{page.name}: {name}"
            shown += 1
    assert shown >= 4


def test_tables_of_the_pages_of_results_are_checked() -> None:
    for name in ("benchmark.md", "calendar.md", "costs.md"):
        for section in re.split(r"^#+ ", (EXPLANATION / name).read_text(), flags=re.MULTILINE)[1:]:
            if "\n|" in section:
                assert MARKER.search(section) or LINKED.search(section), f"{name}: {section.splitlines()[0]}"


def test_the_table_of_the_benchmark_is_what_was_measured() -> None:
    page = (EXPLANATION / "benchmark.md").read_text()
    heads, *rows = rows_of(page.split("## Deadlines met", 1)[1])
    shown = {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows}
    served, exact = overview("served"), overview("policies")
    plain = {row[0].split()[0]: row[2] for row in reversed(rows_of(tables_of("plain"))) if row[1] == "plain"}
    fixed = {row[0].split()[0]: row[4] for row in reversed(rows_of(tables_of("bound"))) if row[1] == "30"}
    others = [counts for policy, counts in exact.items() if not re.match("elasticflow|deadlines|bound", policy)]
    traces = heads[1:]
    expected = {
        "deadlines": exact["deadlines"],
        "the bound": exact["bound"],
        "ours, as served": served["elasticflow"],
        "ours, `--exact": exact["elasticflow"],
        "plain admission of the paper": {trace: plain.get(trace, "") for trace in traces},
        "the best of the others": {t: max(counts[t] for counts in others if t in counts) for t in traces},
        "fixed sizes in order of arrival": exact["gang-fifo"],
        "no schedule of fixed sizes meets more": fixed,
    }
    assert shown.keys() - {"cluster"} == expected.keys()
    for row, counts in expected.items():
        assert {t: cell.replace(",", "") for t, cell in shown[row].items()} == {t: str(counts[t]) for t in traces}, row
    assert served["bound"] == exact["bound"]
    of_bound = min(100 * served["elasticflow"][trace] / exact["bound"][trace] for trace in traces)
    assert f"reaches {of_bound:.1f} to 100 %" in page
    others_best = expected["the best of the others"]
    assert "with all speeds known no other policy here meets more" in page.replace("\n", " ")
    assert all(exact["elasticflow"][trace] >= int(others_best[trace]) for trace in traces)
    assert all(served["elasticflow"][trace] >= int(others_best[trace]) for trace in traces), "it loses: say where"


def test_the_chart_of_the_front_page_is_drawn_from_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "benchmarks" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    chart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chart)
    rows = chart.shares()
    assert len(rows) == 9
    assert chart.CHART.read_text() == chart.draw(rows), "draw it anew: python benchmarks/chart.py"
    assert f"({chart.CHART.relative_to(ROOT)})" in (ROOT / "README.md").read_text()


def test_nobody_who_was_promised_was_late_as_the_benchmark_says() -> None:
    checked = 0
    for name in ("policies", "contended", "full", "plain"):
        for table in re.findall(r"^\|.*(?:\n\|.*)*", tables_of(name), re.MULTILINE):
            heads, *rows = rows_of(table)
            if "late" in heads:
                assert {row[heads.index("late")] for row in rows} == {"0"}, table
                checked += 1
    assert checked == 15
    assert " late)" not in tables_of("served")


def numbers_of(text: str) -> set[str]:
    """The numbers of a text, without what is in code, links' addresses, names of traces and shapes of clusters."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|\b(t4_)?\d+job\b|cluster\d+|poisson_\w+|\d+ [\u00d7x] \d+", " ", text)
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def stands_in(number: str, measured: set[str]) -> bool:
    """Whether this number was measured, as it is or with more digits."""
    digits = len(number.partition(".")[2])
    return any(f"{float(other):.{digits}f}" == number for other in measured)


@pytest.mark.parametrize("name", ["benchmark.md", "costs.md"])
def test_numbers_beside_a_link_to_results_stand_there(name: str) -> None:
    checked = 0
    for block in re.split(r"\n\n(?!- )|\n(?=\| )", (EXPLANATION / name).read_text()):
        files = LINKED.findall(block)
        if files:
            texts = [(ROOT / "benchmarks/results" / file).read_text() for file in files]
            measured = {number.replace(",", "") for text in texts for number in NUMBER.findall(text)}
            for number in numbers_of(block):
                assert stands_in(number, measured), f"{name}: {number} is in none of {files}: {block}"
                checked += 1
    assert checked > 50


@pytest.mark.parametrize("title", ["Where we lose, and why", "When reality differs", "What each improvement adds"])
def test_what_the_benchmark_says_links_to_what_was_measured(title: str) -> None:
    text = (EXPLANATION / "benchmark.md").read_text().split(f"\n## {title}\n\n", 1)[1]
    for block in re.split(r"\n\n(?!- )", text.split("\n## ", 1)[0].strip()):
        assert LINKED.search(block) or not numbers_of(block), block


def test_the_readme_says_what_was_measured() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(
        r"\*\*(\d+) of (\d+) deadlines\*\* are met .*, (\d+) once past .* more than (\d+) .*\*\*(\d+)\*\* are met by"
        r" fixed sizes .* above (\d+): .*\*\*(\d+) nodes\*\* .* needs (\d+), fixed sizes more than (\d+) ",
        readme,
    )
    assert said
    served, exact = overview("served"), overview("policies")
    _, *errors = rows_of(tables_of("errors"))
    (history,) = [row[2] for row in errors if row[:2] == ["195job 16x8", "as told, with history"]]
    fixed = next(row[4] for row in rows_of(tables_of("bound")) if row[:2] == ["195job 16x8", "30"])
    heads, *rows = rows_of(tables_of("capacity"))
    assert heads[1].startswith("195job")
    nodes = {row[0].strip("`"): row[1] for row in rows}
    others = [count for policy, count in nodes.items() if not policy.startswith(("elasticflow", "*"))]
    assert [*said.groups()] == [
        str(served["elasticflow"]["195job"]),
        str(exact["deadlines"]["195job"]),
        history,
        str(served["bound"]["195job"]),
        str(exact["gang-fifo"]["195job"]),
        fixed,
        nodes["elasticflow"],
        min((count for count in others if count.isdigit()), key=int),
        nodes["gang-fifo"].removeprefix("> "),
    ]


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmarks' helper, for a script ``bench_trial.py`` whose results and pages are in a folder of the test."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "benchmarks/results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(sys, "argv", ["benchmarks/bench_trial.py", "--seeds", "2", "--write"])
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", "A trial.\n\n    python bench_trial.py\n\nIt measures.\n")
    (tmp_path / "docs").mkdir()
    return module


def test_results_are_written_with_how_they_were_made(helper: ModuleType, tmp_path: Path) -> None:
    parser = helper.parser_of("A trial.")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--traces", default="")
    helper.show("first", helper.table(["a", "b"], [["x", "1"]]), parser.parse_args())
    text = (tmp_path / "results/trial.md").read_text()
    assert text.startswith("# bench_trial.py\n\nA trial.\n\nIt measures.\n\n## first\n\n<!-- results: first -->\n\n")
    ((name, body),) = MARKER.findall(text)
    made = HOW_MADE.match(body)
    assert made
    assert (name, made[1]) == ("first", "benchmarks/bench_trial.py --seeds 2")
    assert "- Settings: seeds 2\n" in body
    assert rows_of(body) == [["a", "b"], ["x", "1"]]


def test_writing_again_keeps_other_results_and_what_is_said_of_them(helper: ModuleType, tmp_path: Path) -> None:
    page, args = tmp_path / "docs/page.md", argparse.Namespace(write=True)
    page.write_text("# Page\n\n<!-- results: first -->\n\nold\n\n## Next\n\nText.\n")
    helper.write("first", ["one"], args)
    helper.write("second", ["two"], args)
    file = tmp_path / "results/trial.md"
    file.write_text(file.read_text().replace("## first\n", "## The first\n\nBy hand.\n"))
    helper.write("first", ["another"], args)
    text = file.read_text()
    assert "## The first\n\nBy hand.\n\n<!-- results: first -->" in text
    assert [body.splitlines()[-1] for _, body in MARKER.findall(text)] == ["another", "two"]
    assert page.read_text() == "# Page\n\n<!-- results: first -->\n\nanother\n\n## Next\n\nText.\n"


def test_nothing_is_written_without_the_option(helper: ModuleType, tmp_path: Path) -> None:
    helper.show("first", ["one"], argparse.Namespace(write=False))
    assert not (tmp_path / "results").exists()
