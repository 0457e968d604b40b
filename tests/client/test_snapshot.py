"""Equal code gives equal bytes; what is not code stays out; what cannot be right is refused with a reason."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from elasticflow_airflow.client import SnapshotError, snapshot_folder, snapshot_module, snapshot_script


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(snapshot) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(snapshot.tar)) as archive:
        found = archive.getnames()
    assert found == [name for name, _ in snapshot.files]
    return found


def test_equal_files_give_equal_bytes(tmp_path):
    for folder, stamp in (("a", 1), ("b", 10**9)):
        for name in ("z.py", "a.py") if folder == "a" else ("a.py", "z.py"):
            path = tmp_path / folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(name)
            os.utime(path, (stamp, stamp))
    one, two = snapshot_script(tmp_path / "a" / "z.py"), snapshot_script(tmp_path / "b" / "z.py")
    assert one.tar == two.tar
    assert one.sha256 == hashlib.sha256(one.tar).hexdigest() == two.sha256
    assert one.entry == "z.py"
    assert names(one) == ["a.py", "z.py"]
    (tmp_path / "b" / "a.py").write_text("changed")
    changed = snapshot_script(tmp_path / "b" / "z.py")
    assert [n for n, sha in changed.files if (n, sha) not in one.files] == ["a.py"]


def test_ignore_files_and_rubbish_stay_out(tmp_path):
    write(tmp_path, train_py="", data__big="", sub__keep_py="", sub__drop_py="", __git__config="", lib__x="")
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "train.cpython-311.pyc").write_text("")
    (tmp_path / ".gitignore").write_text("/data/\n*.log\n!keep.log\n")
    (tmp_path / "x.log").write_text("")
    (tmp_path / "keep.log").write_text("")
    (tmp_path / "sub" / ".airflowignore").write_text("drop.py\n")
    snapshot = snapshot_script(tmp_path / "train.py")
    kept = names(snapshot)
    assert {"train.py", "keep.log", "sub/keep.py", ".gitignore", "sub/.airflowignore", "lib/x"} <= set(kept)
    assert not {"data/big", "x.log", "sub/drop.py"} & set(kept)
    assert not [n for n in kept if "pycache" in n]
    assert snapshot.ignored == ("data/", "sub/drop.py", "x.log")


def test_ignore_file_above_counts_within_a_working_tree(tmp_path):
    write(tmp_path, code__train_py="", code__out__model="")
    (tmp_path / ".gitignore").write_text("out/\n")
    assert "out/model" in names(snapshot_script(tmp_path / "code" / "train.py"))
    (tmp_path / ".git").mkdir()
    assert names(snapshot_script(tmp_path / "code" / "train.py")) == ["train.py"]


def test_the_script_itself_is_never_ignored(tmp_path):
    """People list training scripts in .airflowignore because they are no DAGs."""
    write(tmp_path, train_py="", other_py="")
    (tmp_path / ".airflowignore").write_text("*.py\n")
    assert names(snapshot_script(tmp_path / "train.py")) == [".airflowignore", "train.py"]


def test_links_are_followed_inside_and_refused_outside(tmp_path):
    root = tmp_path / "code"
    write(root, train_py="x", sub__lib_py="y")
    (root / "alias.py").symlink_to("train.py")
    (root / "again").symlink_to("sub")
    assert {"alias.py", "again/lib.py"} <= set(names(snapshot_folder(root)))
    (root / "loop").symlink_to(".")
    with pytest.raises(SnapshotError, match="a link to a folder that it stands in"):
        snapshot_folder(root)
    (root / "loop").unlink()
    (tmp_path / "secret").write_text("")
    (root / "leak").symlink_to("../secret")
    with pytest.raises(SnapshotError, match=r"leaves .*copy what it points to"):
        snapshot_folder(root)
    (root / ".gitignore").write_text("leak\n")
    assert "leak" not in names(snapshot_folder(root))


def test_a_state_directory_is_no_code(tmp_path):
    """A service below the script's folder has its keys and its database there, which change all the time."""
    write(tmp_path, train_py="x", sub__train_py="x")
    before = snapshot_folder(tmp_path)
    write(tmp_path / "sub" / "state", service_lock="", token="hush", elasticflow_db="rows")
    (tmp_path / "sub" / "state" / "service_lock").rename(tmp_path / "sub" / "state" / "service.lock")
    after = snapshot_folder(tmp_path)
    assert (after.sha256, after.ignored) == (before.sha256, ("sub/state/",))
    with pytest.raises(SnapshotError, match=r"state directory of a service.*a folder of its own"):
        snapshot_folder(tmp_path / "sub" / "state")


def test_limits_name_the_largest(tmp_path):
    write(tmp_path, train_py="x", weights="w" * 5000)
    with pytest.raises(SnapshotError, match=r"largest are weights .*data belongs outside"):
        snapshot_folder(tmp_path, max_bytes=4000)
    with pytest.raises(SnapshotError, match="more than 1 files"):
        snapshot_folder(tmp_path, max_files=1)


def test_missing_script(tmp_path):
    with pytest.raises(SnapshotError, match=r"nope.py' is not there .*relative to the DAG file"):
        snapshot_script(tmp_path / "nope.py")


def test_module_is_found_without_importing_it(tmp_path):
    write(tmp_path, pkg__x="", solo_py="1/0", other_py="")
    (tmp_path / "pkg" / "__init__.py").write_text("1/0")
    (tmp_path / "pkg" / "train.py").write_text("1/0")
    search = [str(tmp_path)]
    assert names(snapshot_module("pkg.train", search)) == ["pkg/__init__.py", "pkg/train.py", "pkg/x"]
    assert names(snapshot_module("solo", search)) == ["solo.py"]
    for missing in ("nope", "pkg.nope", "solo.inner"):
        with pytest.raises(SnapshotError, match=f"module '{missing}' is not there"):
            snapshot_module(missing, search)


def test_executable_bit_stays(tmp_path):
    (tmp_path / "run.sh").write_text("")
    (tmp_path / "run.sh").chmod(0o755)
    with tarfile.open(fileobj=io.BytesIO(snapshot_folder(tmp_path).tar)) as archive:
        assert archive.getmember("run.sh").mode == 0o755
