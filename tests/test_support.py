"""What the tests' own helpers promise to whoever reads a run."""

from __future__ import annotations

import time
from collections import OrderedDict

import pytest
from support.marked_files import has_marked
from xdist.scheduler import LoadScopeScheduling

pytest_plugins = ["pytester"]

LONG = "needs a machine that nobody has, " + "and a reason that is longer than any terminal is wide, " * 4 + "so it is"


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_says_in_one_whole_line_why_it_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds in each process
    pytester.makepyfile(
        test_some=f"""
        import pytest
        @pytest.mark.parametrize("n", range(3))
        def test_three(n): pytest.skip("no GPU")
        @pytest.mark.skip(reason={LONG!r})
        def test_one(): pass
        @pytest.mark.skipif(True, reason="no GPU")
        def test_elsewhere(): pass
        def test_runs(): pass
        """,
        test_whole="import pytest; pytest.importorskip('no_such_module', reason='not installed:\\n pip install it')",
    )
    options = ["-p", "support.skips", "-p", "no:cacheprovider", "-rfE", "-p", "xdist.plugin", "-n", str(processes)]
    result = pytester.runpytest_inprocess(*options)
    lines = result.outlines
    (start,) = [n for n, line in enumerate(lines) if "skipped, and why" in line]
    assert lines[start + 1 : start + 4] == [
        f"1 test: {LONG} (test_some.py::test_one)",
        "4 tests: no GPU (test_some.py::test_three, and others)",
        "1 module: not installed: pip install it (test_whole.py)",
    ]
    assert sum("no GPU" in line for line in lines) == 1
    assert result.ret == 0


def test_a_run_that_skipped_nothing_says_nothing_of_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_runs(): pass")
    result = pytester.runpytest_inprocess("-p", "support.skips", "-p", "no:cacheprovider")
    assert "skipped, and why" not in result.stdout.str()


@pytest.mark.parametrize("processes", [0, 2])
def test_a_run_whose_time_is_over_begins_no_test_says_so_and_has_failed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds in each process
    pytester.makepyfile("def test_one(): pass\ndef test_two(): pass")
    for until_s, outcome in ((time.time() + 3600.0, {"passed": 2}), (time.time() - 1.0, {"skipped": 2})):
        monkeypatch.setenv("TESTS_BEGIN_UNTIL", str(until_s))
        options = ["-p", "support.skips", "-p", "no:cacheprovider", "-p", "xdist.plugin", "-n", str(processes)]
        result = pytester.runpytest_inprocess(*options)
        result.assert_outcomes(**outcome)
        assert result.ret == (1 if "skipped" in outcome else 0)
    assert "2 tests: NOT RUN, as the time that this run was given is over" in result.stdout.str()


def test_who_is_done_with_its_own_room_helps_out_in_the_other(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (conftest,) = [p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "Rooms")]
    rooms, taken = conftest.Rooms.__new__(conftest.Rooms), {"waits": [], "trains": []}

    def take(self: LoadScopeScheduling, node: str) -> None:
        taken[node].append(self.workqueue.popitem(last=False)[0])

    monkeypatch.setattr(LoadScopeScheduling, "_assign_work_unit", take)
    rooms.assigned_work = dict.fromkeys(taken)
    paths = [
        "runtime/test_a.py",
        "service/local/test_b.py",
        "service/test_c.py",
        "airflow/stack/test_d.py",
        "ui/test_e.py",
    ]
    paths += ["demo/test_f.py"]
    scopes = [rooms._split_scope(f"tests/{path}::test[a::b]") for path in paths]
    rooms.workqueue = OrderedDict.fromkeys(scopes)
    for node in ("waits", "trains", "trains", "waits", "waits", "waits"):
        rooms._assign_work_unit(node)
    assert taken["trains"] == ["tests/demo/test_f.py", "tests/runtime/test_a.py"]
    assert taken["waits"] == [
        "tests/airflow/stack",
        "tests/ui/test_e.py",  # what takes long, of its own and of the other's
        "tests/service/test_c.py",
        "tests/service/local/test_b.py",
    ]


def test_a_run_of_marked_tests_imports_no_file_without_any(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_marked="import pytest\n@pytest.mark.slow\ndef test_long(): pass\ndef test_short(): pass",
        test_plain="raise AssertionError('imported')",
    )
    options = ["-p", "support.marked_files", "-p", "no:cacheprovider"]
    pytester.runpytest_inprocess(*options, "-m", "slow").assert_outcomes(passed=1)
    for selected in ([], ["-m", "not soak"], ["-m", "slow", "test_plain.py"]):
        pytester.runpytest_inprocess(*options, *selected).assert_outcomes(errors=1)


def test_a_marked_test_where_nothing_shows_it_is_a_mistake(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("import pytest\ndef pytest_itemcollected(item): item.add_marker(pytest.mark.slow)")
    pytester.makepyfile(test_plain="def test_long(): pass")
    result = pytester.runpytest_inprocess("-p", "support.marked_files", "-p", "no:cacheprovider")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*must know what marks tests in *test_plain.py"])


def test_every_file_on_gpus_is_collected_by_their_marker(pytestconfig: pytest.Config) -> None:
    files = sorted((pytestconfig.rootpath / "tests" / "gpu").glob("test_*.py"))
    assert files
    assert [file for file in files if has_marked(file)] == files
