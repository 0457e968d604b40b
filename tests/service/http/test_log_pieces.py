"""Logs are read in pieces; a secret shows in none of them, wherever a piece ends and however late it is written."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from elasticflow_airflow.engines.port import LogChunk
from elasticflow_airflow.service.job_files.log_pieces import read_piece

SECRETS = ["abab", "ab\u00e9cab", "a" * 12]


def reader(text: bytes, written: int, *, ended: bool):
    """A log of which so many bytes are written."""

    def read(offset: int, limit: int) -> LogChunk:
        offset = min(offset, written)
        data = text[offset : min(written, offset + limit)]
        return LogChunk(data, offset, offset + len(data), ended and offset + len(data) == written)

    return read


@given(
    st.lists(st.sampled_from([*SECRETS, "x", "a", "ab", "\u00e9", "\n"]), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.lists(st.integers(0, 60), max_size=4),
)
@example("xabababx", [1], [3])
@example("a" * 30, [5, 1], [13])
def test_no_piece_shows_a_part_of_a_secret(text: str, limits: list[int], writes: list[int]) -> None:
    raw, shown, offset, turn = text.encode(), "", 0, 0
    for written in sorted({min(len(raw), one) for one in writes} | {len(raw)}):
        for ended in {False, written == len(raw)}:
            read = reader(raw, written, ended=ended)
            while True:
                piece = read_piece(read, offset, limits[turn % len(limits)], SECRETS)
                turn += 1
                assert piece.start_offset == offset
                if piece.next_offset == offset:
                    break
                shown, offset = shown + piece.text, piece.next_offset
    assert offset == len(raw)
    assert piece.end_of_file or not raw
    assert all(secret not in shown for secret in SECRETS)
    if not any(secret in text for secret in SECRETS):
        assert shown.encode(errors="replace") == raw or "\ufffd" in shown
    else:
        assert "***" in shown


def test_a_log_without_secrets_is_as_it_was_written() -> None:
    raw = "gr\u00fc\u00df dich\n".encode()
    piece = read_piece(reader(raw, len(raw), ended=True), 0, 4, [])
    assert (piece.text, piece.next_offset) == ("gr\u00fc", 4)
