"""Requirements as their author writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticflow_airflow.requirement_lines import project_of, read_requirements, requirement_problem, without_passwords


def test_a_file_gives_its_lines_and_those_that_it_includes(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "more.txt").write_text("numpy>=2  # arrays\n")
    (tmp_path / "requirements.txt").write_text(
        "# for training\n\naccelerate == 1.1.0 \\\n    --hash=sha256:aa11 \\\n    --hash=sha256:bb22\n"
        "-r base/more.txt\r\nmine @ https://example.org/mine-1.0-py3-none-any.whl#sha256=aa11\n"
    )
    assert read_requirements(tmp_path / "requirements.txt") == (
        "accelerate == 1.1.0 --hash=sha256:aa11 --hash=sha256:bb22",
        "numpy>=2",
        "mine @ https://example.org/mine-1.0-py3-none-any.whl#sha256=aa11",
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-i https://example.org/simple", "is an option of pip"),
        ("-e .", "is an option of pip"),
        ("./mine.whl", "is no requirement like"),
        ("numpy=2", "is no requirement like"),
        ("mine @ https://token@example.org/mine.whl", "has a password in its URL"),
        ("mine @ git+ssh://me:word@example.org/mine", "has a password in its URL"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_file(tmp_path: Path, line: str, said: str) -> None:
    assert said in (requirement_problem(line) or "")
    (tmp_path / "requirements.txt").write_text(f"numpy\n{line}\n")
    with pytest.raises(ValueError, match=f"requirements.txt: .*{said}") as caught:
        read_requirements(tmp_path / "requirements.txt")
    assert "token@" not in str(caught.value)
    assert "word@" not in str(caught.value)


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("-r a.txt\n")
    with pytest.raises(ValueError, match="included by itself"):
        read_requirements(tmp_path / "a.txt")


def test_a_user_without_a_password_is_no_secret() -> None:
    assert requirement_problem("mine @ git+ssh://git@example.org/mine") is None
    assert without_passwords("see https://me:word@example.org/x") == "see https://***@example.org/x"
    assert project_of("Mine_Package[all]==1.0 --hash=sha256:aa11") == "mine-package"
