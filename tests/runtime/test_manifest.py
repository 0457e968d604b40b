"""Damage to checkpoints is found, whatever it is, and the one before is used; writers that die leave no harm."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticflow_airflow.runtime.protocol import Promotion, promoted_path, write_json_atomic
from elasticflow_airflow.runtime.stores.manifest import (
    CandidateInfo,
    CheckpointError,
    adopt,
    list_candidates,
    newest_generation,
    promote,
    promoted,
    publish,
    remove_old,
    verify_candidate,
    writing,
)

FILES = ["manifest.json", "model.pt", "training.pt"]


@pytest.fixture
def two(candidate):
    """The promoted checkpoint, and the one before it."""
    before, newest = candidate(1, 10), candidate(1, 20)
    promote(newest.path.parents[1], newest)
    return before, newest


def test_a_published_checkpoint_verifies_and_leaves_no_temporary_folder(candidate, tmp_path):
    info = candidate(3, 120, incarnation=2)
    assert info.path == tmp_path / "checkpoints" / "g000003" / "step-000000000120"
    assert verify_candidate(info.path) == info
    assert (info.incarnation, info.generation, info.step) == (2, 3, 120)
    assert info.metadata == {"loss": 0.25}
    assert info.size_bytes == 256 + 8 * 121
    assert [path.name for path in info.path.parent.iterdir()] == [info.path.name]


# -- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", ["nothing", "one byte", "half", "all but one byte", "one byte more"])
def test_a_truncated_file_is_found_and_the_one_before_is_used(two, warnings, name, keep):
    before, newest = two
    file = newest.path / name
    content = file.read_bytes()
    sizes = {"nothing": 0, "one byte": 1, "half": len(content) // 2, "all but one byte": len(content) - 1}
    file.write_bytes(content[: sizes.get(keep, len(content))] + (b"x" if keep == "one byte more" else b""))
    assert promoted(newest.path.parents[1], warnings.append) == before
    (warning,) = warnings
    assert str(newest.path) in warning
    assert name in warning or "its manifest is damaged" in warning


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(two, warnings, name):
    before, newest = two
    (newest.path / name).unlink()
    assert promoted(newest.path.parents[1], warnings.append) == before
    assert warnings == [f"skipped: checkpoint {newest.path}: {name} is missing"]


def verified_or_why(path: Path) -> CandidateInfo | CheckpointError:
    try:
        return verify_candidate(path)
    except CheckpointError as error:
        return error


@pytest.mark.parametrize("name", FILES)
def test_every_single_bit_flip_is_found(candidate, name):
    """Two bits of every byte. A flip that the manifest survives must not have changed what it says."""
    info = candidate(1, 2)
    file = info.path / name
    content = bytearray(file.read_bytes())
    survived = 0
    for position in range(len(content)):
        for bit in {position % 8, 5}:  # Bit 5 makes capitals of small letters.
            content[position] ^= 1 << bit
            file.write_bytes(content)
            found = verified_or_why(info.path)
            assert found == info or str(info.path) in str(found)
            survived += found == info
            content[position] ^= 1 << bit
    assert survived == 0 or name == "manifest.json"
    assert survived <= 16  # a few in the white space of the manifest, or 1e9 for 1E9


def test_every_single_bit_flip_of_the_promotion_is_harmless(two, candidate, warnings):
    """Either it changes nothing, or it is warned of and a valid checkpoint of this folder is used."""
    before, newest = two
    checkpoints = newest.path.parents[1]
    file = promoted_path(checkpoints)
    content = bytearray(file.read_bytes())
    for position in range(len(content)):
        for bit in range(8):
            content[position] ^= 1 << bit
            file.write_bytes(content)
            warnings.clear()
            found = promoted(checkpoints, warnings.append)
            assert found in (before, newest)
            if found == before:
                assert any(str(file) in warning for warning in warnings)
            content[position] ^= 1 << bit


@pytest.mark.parametrize(
    "content", ["", "{", "null", "[]", '{"path": 5}', '{"path": "../x", "generation": 1, "step": 20, "digest": "d"}']
)
def test_a_damaged_promotion_falls_back_to_the_newest_valid(two, warnings, content):
    _, newest = two
    file = promoted_path(newest.path.parents[1])
    file.write_text(content)
    assert promoted(file.parent, warnings.append) == newest
    (warning,) = warnings
    assert warning.startswith(f"{file} is damaged (")
    assert warning.endswith("the newest valid checkpoint is used instead")


def test_a_missing_promoted_checkpoint_is_named(two, warnings):
    before, newest = two
    shutil.rmtree(newest.path)
    assert promoted(newest.path.parents[1], warnings.append) == before
    assert warnings == [f"the promoted checkpoint {newest.path} is missing"]


def test_where_everything_is_damaged_or_gone_training_does_not_begin_again(two, warnings):
    for info in two:
        (info.path / "model.pt").write_bytes(b"")
    folder = two[0].path.parents[1]
    with pytest.raises(CheckpointError) as error:
        promoted(folder, warnings.append)
    said = str(error.value)
    assert said.startswith(f"{folder}/promoted.json says that there is a checkpoint to go on from, and none can be")
    assert said.endswith("Put it back, or move promoted.json away to begin again at step 0")
    assert all(str(info.path) in said for info in two)
    for info in two:
        shutil.rmtree(info.path)
    with pytest.raises(CheckpointError, match=f"the promoted checkpoint {two[1].path} is missing"):
        promoted(folder, [].append)
    assert [str(info.path) in warning for info, warning in zip(reversed(two), warnings, strict=True)] == [True, True]


def test_another_checkpoint_under_the_promoted_name_is_not_used(two, candidate, warnings):
    before, newest = two
    candidate(1, 20, metadata={"loss": 99.0})
    assert promoted(newest.path.parents[1], warnings.append) == before
    assert "digest differs" in warnings[0]


def test_nothing_promoted_is_nothing_to_resume(candidate, warnings):
    info = candidate(1, 10)
    assert promoted(info.path.parents[1], warnings.append) is None
    assert verify_candidate(info.path) == info
    assert warnings == []


def test_candidates_newer_than_the_promotion_are_not_used(two, candidate, warnings):
    """A generation that was overtaken may have written later steps: nobody promoted them."""
    before, newest = two
    candidate(1, 500)
    candidate(9, 15)
    checkpoints = newest.path.parents[1]
    assert promoted(checkpoints, warnings.append) == newest
    (newest.path / "model.pt").write_bytes(b"")
    assert promoted(checkpoints, warnings.append) == before


# -- manifests that nobody of us wrote ----------------------------------------------------------------------------


def forge(path: Path, **changes) -> None:
    """Change a manifest and make its digest right again."""
    from elasticflow_airflow.runtime.stores.manifest import _body_digest

    body = json.loads((path / "manifest.json").read_text()) | changes
    del body["digest"]
    (path / "manifest.json").write_text(json.dumps(body | {"digest": _body_digest(body)}))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", ".", "", "sub/file", "../../promoted.json"])
def test_a_manifest_that_names_a_file_outside_is_refused(candidate, name, tmp_path):
    info = candidate(1, 10)
    (info.path.parent / "secret").write_bytes(b"1234")
    forge(info.path, files={name: {"sha256": "0" * 64, "size_bytes": 4}})
    with pytest.raises(CheckpointError, match=r"which is outside the folder|is not an ordinary file"):
        verify_candidate(info.path)


def test_links_are_no_files_of_a_checkpoint(candidate, tmp_path):
    info = candidate(1, 10)
    (info.path / "model.pt").rename(tmp_path / "elsewhere")
    (info.path / "model.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model\.pt is not an ordinary file"):
        verify_candidate(info.path)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 3},
        {"files": []},
        {"files": {"model.pt": {}}},
        {"files": {"model.pt": 3}},
        {"step": "x"},
        {"step": None},
        {"created_at_s": {}},
        {"metadata": 3},
    ],
)
def test_manifests_of_another_shape_are_refused(candidate, changes):
    info = candidate(1, 10)
    forge(info.path, **changes)
    with pytest.raises(CheckpointError, match=r"format 3 is not one|its manifest is damaged"):
        verify_candidate(info.path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(
    st.one_of(
        st.binary(max_size=40),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["digest", "format", "files", "step", "metadata", "incarnation", "generation"]),
                    inner,
                )
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_whatever_lies_there_as_a_manifest_is_a_checkpoint_error(tmp_path, content):
    folder = tmp_path / "checkpoints" / "g000001" / "step-000000000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"its manifest is damaged|is not one that this version reads"):
        verify_candidate(folder)


# -- writers that fail --------------------------------------------------------------------------------------------


def test_a_writer_that_fails_leaves_nothing(two):
    before, newest = two
    checkpoints = newest.path.parents[1]

    def fail() -> None:
        with writing(checkpoints, 1, 30) as folder:
            (folder / "model.pt").write_bytes(b"half")
            raise KeyError("a bug in the script")

    with pytest.raises(KeyError):
        fail()
    assert list_candidates(checkpoints) == [before.path, newest.path]
    assert sorted(path.name for path in newest.path.parent.iterdir()) == [before.path.name, newest.path.name]


def write_and_publish(checkpoints: Path, step: int) -> None:
    with writing(checkpoints, 1, step) as folder:
        (folder / "model.pt").write_bytes(b"x")
        publish(folder, checkpoints, incarnation=1, generation=1, step=step, metadata={})


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where a folder should be")
    message = r"cannot write a checkpoint below .*g000001: Not a directory\. Free space"
    with pytest.raises(CheckpointError, match=message):
        write_and_publish(tmp_path / "checkpoints", 1)


def test_the_same_step_again_replaces_the_checkpoint(candidate):
    candidate(1, 10, metadata={"loss": 1.0})
    again = candidate(1, 10, metadata={"loss": 2.0})
    assert verify_candidate(again.path).metadata == {"loss": 2.0}
    assert [path.name for path in again.path.parent.iterdir()] == [again.path.name]


def test_a_full_disk_leaves_the_checkpoints_before(two, warnings):
    """A limit on the size of files stands in for a full disk: the kernel refuses the write in the same place."""
    _, newest = two
    checkpoints = newest.path.parents[1]
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        import torch
        from torch import nn
        from elasticflow_airflow.runtime.checkpoints import checkpoint
        from elasticflow_airflow.runtime.stores.manifest import CheckpointError
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        model = nn.Linear(300, 300)
        try:
            folder, registered = Path(sys.argv[1]), checkpoint.Registered(model)
            checkpoint.save(registered, folder, incarnation=1, generation=1, step=30, metadata={})
        except CheckpointError as error:
            print(error)
            sys.exit(7)
    """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(checkpoints)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 7, done.stderr
    assert f"the checkpoint of step 30 could not be written below {checkpoints}" in done.stdout
    assert "Free space there; the checkpoints before stay valid." in done.stdout
    assert promoted(checkpoints, warnings.append) == newest
    assert warnings == []
    assert not list(newest.path.parent.glob(".writing-*"))


def test_a_full_disk_while_publishing(two, monkeypatch):
    before, newest = two
    checkpoints = newest.path.parents[1]

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("elasticflow_airflow.runtime.stores.manifest._flush", full)
    message = r"step-000000000030 could not be written: No space left on device\. Free"
    with pytest.raises(CheckpointError, match=message):
        write_and_publish(checkpoints, 30)
    assert list_candidates(checkpoints) == [before.path, newest.path]


def test_kill_at_every_system_call_of_a_save_leaves_the_one_before(two, warnings, tmp_path):
    """The writer is killed at each audit event in turn: each open, rename, mkdir and rmtree of a save is one."""
    _, newest = two
    checkpoints = newest.path.parents[1]
    script = tmp_path / "writer.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from elasticflow_airflow.runtime.stores.manifest import promote, publish, writing
        checkpoints = Path(sys.argv[1])

        def save(fatal):
            seen = 0
            def hook(event, arguments):
                nonlocal seen
                if event.split(".")[0] in ("open", "os", "shutil", "tempfile"):
                    seen += 1
                    if seen == fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(hook)
            with writing(checkpoints, 1, 20) as folder:
                (folder / "model.pt").write_bytes(b"new" * 100)
                info = publish(folder, checkpoints, incarnation=1, generation=1, step=20, metadata={"new": True})
            promote(checkpoints, info)

        for fatal in range(1, 200):
            pid = os.fork()
            if pid == 0:
                save(fatal)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(fatal, status, flush=True)
            input()
            if status == 0:
                break
    """)
    )
    writer = subprocess.Popen(
        [sys.executable, str(script), str(checkpoints)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    backup = tmp_path / "backup"
    shutil.copytree(checkpoints, backup)
    kills = 0
    with writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for line in writer.stdout:
            _, status = map(int, line.split())
            warnings.clear()
            found = promoted(checkpoints, warnings.append)
            assert found is not None
            if status == 0:
                assert found.metadata == {"new": True}
                assert not list(checkpoints.glob("*/.writing-*"))
            else:
                assert status == -signal.SIGKILL
                kills += 1
                # Replacing the promoted one itself, the writer may die between two renames: then it is the one before.
                assert found.step in (10, 20)
                if found.step == 10:
                    assert any(str(newest.path) in warning for warning in warnings)
                shutil.rmtree(checkpoints)
                shutil.copytree(backup, checkpoints)
            writer.stdin.write("\n")
            writer.stdin.flush()
    assert writer.returncode == 0
    assert kills > 10


def test_what_a_killed_writer_left_is_removed_by_the_next(two, candidate):
    _, newest = two
    (newest.path.parent / ".writing-abc").mkdir()
    (newest.path.parent / ".writing-abc" / "model.pt").write_bytes(b"half")
    candidate(1, 30)
    assert not list(newest.path.parent.glob(".writing-*"))


# -- from one incarnation to the next -----------------------------------------------------------------------------


def test_adopting_a_checkpoint_copies_it_under_the_new_incarnation(candidate, tmp_path):
    source = candidate(5, 70)
    made = adopt(source.path, tmp_path / "next", incarnation=2)
    assert made.path == tmp_path / "next" / "g000000" / "step-000000000070"
    assert (made.incarnation, made.generation, made.step, made.metadata) == (2, 0, 70, source.metadata)
    assert (made.path / "model.pt").read_bytes() == (source.path / "model.pt").read_bytes()
    assert adopt(source.path, tmp_path / "next", incarnation=2) == made


def test_adopting_again_mends_a_damaged_copy(candidate, tmp_path):
    source = candidate(5, 70)
    made = adopt(source.path, tmp_path / "next", incarnation=2)
    (made.path / "model.pt").write_bytes(b"torn")
    assert adopt(source.path, tmp_path / "next", incarnation=2).size_bytes == source.size_bytes
    assert (made.path / "model.pt").read_bytes() == (source.path / "model.pt").read_bytes()


def test_a_damaged_checkpoint_is_not_adopted(candidate, tmp_path):
    source = candidate(5, 70)
    (source.path / "model.pt").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"model\.pt has 4 bytes"):
        adopt(source.path, tmp_path / "next", incarnation=2)
    assert list_candidates(tmp_path / "next") == []


# -- old ones -----------------------------------------------------------------------------------------------------


def test_remove_old_keeps_the_newest_and_the_promoted(candidate):
    infos = [candidate(generation, step) for generation, step in [(0, 5), (1, 10), (1, 20), (2, 25), (2, 30)]]
    checkpoints = infos[0].path.parents[1]
    promote(checkpoints, infos[1])
    removed = remove_old(checkpoints, keep=2)
    assert removed == [infos[0].path, infos[2].path]
    assert list_candidates(checkpoints) == [infos[1].path, infos[3].path, infos[4].path]
    assert not (checkpoints / "g000000").exists()
    assert newest_generation(checkpoints) == 2


def test_remove_old_removes_nothing_while_the_promotion_cannot_be_read(two):
    _, newest = two
    checkpoints = newest.path.parents[1]
    for content in ("{", '{"no": "promotion"}'):
        promoted_path(checkpoints).write_text(content)
        assert remove_old(checkpoints, keep=0) == []
    assert len(list_candidates(checkpoints)) == 2


def test_promotion_of_a_service_and_of_a_session_alone_are_the_same(candidate, tmp_path):
    info = candidate(4, 7)
    promote(tmp_path / "checkpoints", info)
    alone = Promotion.read(tmp_path / "checkpoints")
    Promotion(path="g000004/step-000000000007", generation=4, step=7, digest=info.digest).write(tmp_path)
    assert Promotion.read(tmp_path / "checkpoints") == alone


def test_write_json_atomic_keeps_the_old_file_when_the_disk_is_full(tmp_path):
    file = tmp_path / "x.json"
    write_json_atomic(file, {"old": 1})
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
        try:
            write_json_atomic(file, {"new": "x" * 100})
        except OSError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    assert json.loads(file.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [file]
