"""Archives that are made to do harm: each is refused, costs the service nothing, and leaves nothing behind."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elasticflow_airflow.client import snapshot_folder
from elasticflow_airflow.service.job_files import unpacking
from elasticflow_airflow.service.job_files.snapshots import SnapshotRefusedError, Snapshots, remove

BLOCK = 512


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path / "snapshots", max_bytes=1 << 20, max_files=50)


def accept(snapshots: Snapshots, tar: bytes) -> str:
    """Upload it, as the route does."""
    sha256 = hashlib.sha256(tar).hexdigest()
    incoming = snapshots.incoming()
    incoming.write_bytes(tar)
    try:
        snapshots.accept(sha256, incoming)
    finally:
        incoming.unlink()
    return sha256


def member(name: str, size: int = 1, kind: bytes = tarfile.REGTYPE, **given: object) -> bytes:
    """One member, as GNU or POSIX headers write it."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size if kind == tarfile.REGTYPE else 0
    for key, value in given.items():
        setattr(info, key, value)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(b"x" * size))
        return out.getvalue()[: tar.offset]


def extended(data: bytes, kind: bytes = tarfile.XHDTYPE, size: int | None = None) -> bytes:
    """An extended header with any content, whose length may be a lie."""
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % BLOCK)


def record(key: str, value: bytes) -> bytes:
    """A record of a POSIX extended header."""
    rest = f" {key}=".encode() + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    length = len(rest) + len(str(length))
    return str(length).encode() + rest


END = b"\0" * 2 * BLOCK
FILE = member("train.py")
BAD = {
    "200 kB of digits": extended(b"1" * 200_000) + FILE,
    "200 kB of digits for all": extended(b"1" * 200_000, tarfile.XGLTYPE) + FILE,
    "a long name of a megabyte": extended(b"a" * 1_000_000, tarfile.GNUTYPE_LONGNAME) + FILE,
    "a header of a gigabyte that is not there": extended(b"", size=1 << 30) + FILE,
    "10,000 headers before one file": extended(record("comment", b"x")) * 10_000 + FILE,
    "NUL in a name": extended(record("path", b"train\0.py")) + FILE,
    "no name": extended(record("path", b"")) + FILE,
    "mtime NaN": extended(record("mtime", b"nan")) + FILE,
    "mtime beyond all clocks": extended(record("mtime", b"1e300")) + FILE,
    "a size that is none": extended(record("size", b"-512")) + FILE,
    "a size that is not there": member("train.py", 5000)[:BLOCK],
    "1,500 folders": extended(record("path", b"a/" * 1500 + b"train.py")) + FILE,
    "a part of 300 characters": member("a" * 300),
    "a path of 5,000 characters": member("/".join(["a" * 200] * 25)),
    "a file that is a folder, too": member("a") + member("a/b"),
    "a sparse file": extended(record("GNU.sparse.map", b"0,1") + record("GNU.sparse.size", b"1")) + FILE,
    "a sparse file with a made up map": extended(record("GNU.sparse.major", b"1") + record("GNU.sparse.minor", b"0"))
    + FILE,
    "an unknown kind": member("train.py", kind=b"Q"),
    "a checksum that is wrong": FILE[:148] + b"\0" * 8 + FILE[156:],
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_what_cannot_be_unpacked_is_refused_and_leaves_nothing(snapshots, bad):
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(SnapshotRefusedError) as refused:
        accept(snapshots, bad + END)
    assert not refused.value.too_large
    assert refused.value.hint
    assert "\0" not in str(refused.value)
    assert len(str(refused.value)) < 400
    assert list(snapshots.path("0" * 64).parent.iterdir()) == []
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s < unpacking.CPU_LIMIT_S / 2


def test_a_tree_of_more_folders_than_files_are_allowed_is_too_large(snapshots):
    tar = b"".join(member("/".join(f"{n}-{depth}" for depth in range(30)) + "/f") for n in range(10)) + END
    with pytest.raises(SnapshotRefusedError, match="more than 200 folders") as refused:
        accept(snapshots, tar)
    assert refused.value.too_large


def test_the_limits_of_the_process_end_what_nothing_else_refuses(snapshots, tmp_path, monkeypatch):
    for name, code in {
        "memory": "bytearray(1 << 40)",
        "processor": "while True: pass",
        "killed": "import os; os.kill(os.getpid(), 9)",
    }.items():
        stand_in = tmp_path / f"{name}.py"
        source = Path(unpacking.__file__).read_text()
        source = source.replace("CPU_LIMIT_S = 20", "CPU_LIMIT_S = 1").replace(
            "    _make_read_only(folder)\n", f"    {code}\n"
        )
        stand_in.write_text(source)
        with monkeypatch.context() as patch:
            patch.setattr(unpacking, "__file__", str(stand_in))
            with pytest.raises(SnapshotRefusedError, match="was not unpacked with 20 s of processor time and 512 MiB"):
                accept(snapshots, FILE + END)
    assert list(snapshots.path("0" * 64).parent.iterdir()) == []


def test_an_archive_of_another_tool_is_taken_with_long_names_and_folders(snapshots):
    """What ``tar`` makes of a folder: folders as members of their own, GNU's long names, a time of the file."""
    long = "package/" + "n" * 150 + ".py"
    gnu = extended(long.encode() + b"\0", tarfile.GNUTYPE_LONGNAME) + member("x")
    tar = member("package", kind=tarfile.DIRTYPE) + member("package/train.py", mtime=1_700_000_000.5) + gnu + END
    path = snapshots.path(accept(snapshots, tar))
    assert (path / "package/train.py").read_bytes() == b"x"
    assert (path / long).read_bytes() == b"x"
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "package").stat().st_mode & 0o777 == 0o500


def test_a_name_that_is_no_text_is_kept_and_shown_as_text(snapshots, tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    name = os.fsdecode(b"caf\xe9.py")
    (code / name).write_text("print()")
    (code / "train.py").write_text("print()")
    one = accept(snapshots, snapshot_folder(code).tar)
    (code / name).write_text("print(1)")
    other = accept(snapshots, snapshot_folder(code).tar)
    assert (snapshots.path(one) / name).is_file()
    assert snapshots.changed_files(one, other) == ["caf\\xe9.py"]


def test_a_disk_that_is_full_is_told_as_such(snapshots, tmp_path, monkeypatch):
    stand_in = tmp_path / "full.py"
    stand_in.write_text("print('{\"errno\": 28}')")
    monkeypatch.setattr(unpacking, "__file__", str(stand_in))
    with pytest.raises(OSError, match="No space left"):
        accept(snapshots, FILE + END)


def test_the_same_code_many_times_at_once_is_kept_once(snapshots):
    with ThreadPoolExecutor(6) as pool:
        kept = set(pool.map(lambda _: accept(snapshots, FILE + END), range(6)))
    (sha256,) = kept
    assert [path.name for path in snapshots.path(sha256).parent.iterdir()] == [sha256]


def test_what_a_killed_service_left_goes_and_what_it_kept_stays(snapshots):
    kept = accept(snapshots, FILE + END)
    folder = snapshots.path(kept).parent
    snapshots.incoming().write_bytes(b"half of an uplo")
    inner = folder / ".unpack-abc" / "package"
    inner.mkdir(parents=True)
    (inner / "train.py").write_text("x")
    inner.chmod(0o500)
    snapshots.remove_leftovers()
    assert [path.name for path in folder.iterdir()] == [kept]
    Snapshots(folder / "not there yet", max_bytes=1, max_files=1).remove_leftovers()


def test_whatever_the_bytes_are_it_is_unpacked_or_refused(tmp_path):
    """Bytes of the headers of a real archive, changed in several ways: nothing else is ever raised."""
    tar = extended(record("path", b"package/train.py") + record("mtime", b"1.5")) + member("x") + FILE + END
    file, folder, refused = tmp_path / "tar", tmp_path / "unpacked", 0
    for at in range(0, 2 * BLOCK + 64, 13):
        for value in (0x20, 0x80, 0xFF):
            file.write_bytes(tar[:at] + bytes([value]) + tar[at + 1 :])
            folder.mkdir()
            try:
                unpacking.unpack(file, folder, 1 << 20, 50)
            except unpacking.RefusedError:
                refused += 1
            remove(folder)
    assert refused > 50
