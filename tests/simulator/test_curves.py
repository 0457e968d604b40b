"""Tables of scaling curves: read as measured, holes and nonsense refused with file and line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elasticflow_airflow.scheduler_core.simulator.inputs.curves import curve_for, read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError

WITHOUT_2 = "global_batch_size,1,4,8\n64,1.5,,\n128,,2.0,3.5\n"
TABLE = "global_batch_size,1,2,4,8\n64,1.5,2.5,,\n128,,2.0,3.5,nan\n256,1,0.9,2,0\n"


def test_cells_are_speeds_and_empty_ones_do_not_run(curves_folder: Callable[..., Path]) -> None:
    curves = read_curves(curves_folder(TABLE))
    assert {key: dict(curve.steps_per_s) for key, curve in curves.items()} == {
        ("net", 64): {1: 1.5, 2: 2.5},
        ("net", 128): {2: 2.0, 4: 3.5},
        ("net", 256): {1: 1.0, 2: 0.9, 4: 2.0},
    }


def test_a_size_that_no_row_needs_may_be_left_out_of_the_header(curves_folder: Callable[..., Path]) -> None:
    curves = read_curves(curves_folder(WITHOUT_2))
    assert [dict(curve.steps_per_s) for curve in curves.values()] == [{1: 1.5}, {4: 2.0, 8: 3.5}]


def test_every_table_of_the_folder_is_a_model(curves_folder: Callable[..., Path]) -> None:
    curves_folder("global_batch_size,1\n8,1\n", "small")
    (curves_folder("global_batch_size,1\n8,2\n", "other") / "notes.txt").write_text("not a table")
    assert set(read_curves(curves_folder("global_batch_size,1\n8,3\n\n", "third"))) == {
        ("small", 8), ("other", 8), ("third", 8),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "the first line must be global_batch_size"),
        ("batch,1,2\n8,1,2\n", 1, "the first line must be global_batch_size"),
        ("global_batch_size,1,two\n", 1, "numbers of workers must be whole"),
        ("global_batch_size,1,3\n", 1, "must be rising powers of two; they are [1, 3]"),
        ("global_batch_size,2,1\n", 1, "must be rising powers of two; they are [2, 1]"),
        ("global_batch_size,1,1\n", 1, "must be rising powers of two; they are [1, 1]"),
        ("global_batch_size,1,2\n8,1,2\n16,1\n", 3, "2 cells where the header has 3"),
        ('global_batch_size,1,2\n8,1,2\n"16,1,2\n32,1,2\n', 3, "1 cells where the header has 3; is a quote not"),
        ('global_batch_size,1,2\n"8\n",1,2\n16,1\n', 4, "2 cells where the header has 3"),
        ("global_batch_size,1,2\n8,fast,2\n", 2, "a cell is not a number: 8,fast,2"),
        ("global_batch_size,1,2\n8.5,1,2\n", 2, "a cell is not a number"),
        ("global_batch_size,1,2\n8,-1,2\n", 2, "'-1' steps/s at 1 workers is no speed"),
        ("global_batch_size,1,2\n8,1,inf\n", 2, "'inf' steps/s at 2 workers is no speed"),
        ("global_batch_size,1,2\n8,,\n", 2, "batch size 8 runs at no number of workers"),
        ("global_batch_size,1,2,4\n8,1,,4\n", 2, "has a hole at [2] workers"),
        ("global_batch_size,1,2,8\n8,1,2,8\n", 2, "has a hole at [4] workers"),
        ("global_batch_size,2,16\n4,1,\n8,1,2\n", 3, "has a hole at [4, 8] workers"),
        ("global_batch_size,1,2,4,8\n4,1,2,3,4\n8,1,nan,0,4\n", 3, "has a hole at [2, 4] workers"),
    ],
)
def test_a_table_that_is_wrong_is_named_by_file_and_line(
    curves_folder: Callable[..., Path], text: str, line: int, says: str
) -> None:
    folder = curves_folder(text)
    with pytest.raises(InputError) as caught:
        read_curves(folder)
    assert str(caught.value).startswith(f"{folder / 'net.csv'}:{line}: ")
    assert says in str(caught.value)


def test_a_batch_size_given_twice_is_refused(curves_folder: Callable[..., Path]) -> None:
    folder = curves_folder("global_batch_size,1\n8,1\n16,1\n8,2\n")
    with pytest.raises(InputError, match=r"net.csv:4: batch size 8 is already that of line 2"):
        read_curves(folder)


def test_a_folder_without_tables_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no table"):
        read_curves(tmp_path)
    with pytest.raises(InputError, match="is not a folder"):
        read_curves(tmp_path / "absent")


def test_an_unknown_model_or_batch_says_what_there_is(curves_folder: Callable[..., Path]) -> None:
    curves = read_curves(curves_folder(TABLE))
    where = (Path("t.csv"), 7)
    assert dict(curve_for(curves, "net", 64, where).steps_per_s) == {1: 1.5, 2: 2.5}
    with pytest.raises(InputError, match=r"^t.csv:7: unknown model 'bert'; the tables have \['net'\]"):
        curve_for(curves, "bert", 64, where)
    with pytest.raises(InputError, match=r"^t.csv:7: model 'net' has no curve for batch size 32; there are \[64, 128"):
        curve_for(curves, "net", 32, where)
