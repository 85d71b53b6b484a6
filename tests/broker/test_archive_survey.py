"""Goal: an object whose digest is known is indexed by its headers as the full check would do it.

Method: random objects, with offset gaps, leader epochs, transactions, markers and control batches
of other sizes, are given in pieces of random sizes, so that headers and markers lie across two
pieces or more. The judge is the check of all checksums, which reads the file batch by batch.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.archives.survey import Survey, survey
from logmirror.broker.log.disk import OpenFile
from logmirror.broker.log.segment import INDEX_INTERVAL_BYTES, Segment, SegmentSource
from logmirror.broker.log.segment_check import load
from logmirror.wire.checksum import crc32c
from logmirror.wire.empty_batch import HEADER_BYTES, put_header
from logmirror.wire.serve_markers import CONTROL_FLAG, TRANSACTIONAL_FLAG, pack_marker

FIRST = 1000
EPOCH_AT, CRC_AT, CHECKED_FROM, PRODUCER_AT = 12, 17, 21, 43


class Batch(NamedTuple):
    """What a batch is like."""

    kind: str
    """data, transaction, commit, abort, or control: one that is no marker."""

    gap: int
    """Offsets without a record before it."""

    offsets: int
    size: int
    """Bytes behind its header."""

    producer_id: int
    epoch: int
    newest_ms: int


BATCHES = st.lists(
    st.builds(
        Batch,
        st.sampled_from(["data", "data", "transaction", "commit", "abort", "control"]),
        st.integers(0, 3),
        st.integers(1, 50),
        st.sampled_from([0, 16, 17, 18, 100, INDEX_INTERVAL_BYTES]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 7]),
        st.integers(-1, 10**6),
    ),
    min_size=1,
    max_size=12,
)
SIZES = st.lists(st.integers(1, 200), min_size=1, max_size=20)


def encoded(kinds: list[Batch], first: int) -> tuple[bytes, int]:
    """Return an object that begins with an offset, and the offset behind its last batch."""
    out, offset = bytearray(), first
    for number, one in enumerate(kinds):
        offset += one.gap if number else 0
        if one.kind in {"commit", "abort"}:
            batch, last = _marker(one, offset), offset
        else:
            batch, last = bytearray(HEADER_BYTES) + os.urandom(one.size), offset + one.offsets - 1
            attributes = {"transaction": TRANSACTIONAL_FLAG, "control": CONTROL_FLAG}
            put_header(
                *(batch,),
                base_offset=offset,
                last_offset=last,
                record_count=one.offsets,
                max_ms=one.newest_ms,
                attributes=attributes.get(one.kind, 0),
            )
        batch[PRODUCER_AT : PRODUCER_AT + 8] = one.producer_id.to_bytes(8, "big")
        batch[EPOCH_AT : EPOCH_AT + 4] = one.epoch.to_bytes(4, "big")
        batch[CRC_AT : CRC_AT + 4] = crc32c(memoryview(batch)[CHECKED_FROM:]).to_bytes(4, "big")
        out, offset = out + batch, last + 1
    return bytes(out), offset


def _marker(one: Batch, offset: int) -> bytearray:
    batch = pack_marker(
        *(one.producer_id, 0),
        commit=one.kind == "commit",
        coordinator_epoch=1,
        timestamp_ms=one.newest_ms,
    )
    batch[:8] = offset.to_bytes(8, "big")
    return batch


def segment_of(next_offset: int, size_bytes: int) -> Segment:
    """Return the segment of a mounted object; `Path` stands for a source, which is not asked."""
    found = Segment(Path("t/0"), FIRST, next_offset, size_bytes, is_exact=False)
    found.source = cast("SegmentSource", Path)
    return found


def in_pieces(segment: Segment, content: bytes, sizes: list[int]) -> Survey:
    """Give an object in pieces of these sizes, again and again, in a buffer that is overwritten."""
    seen, position = Survey(segment), 0
    while position < len(content):
        size = sizes[seen.size_bytes % len(sizes)]
        piece = bytearray(content[position : position + size])
        seen.add(memoryview(piece))
        position += len(piece)
        piece[:] = bytes(len(piece))
    return seen


@given(kinds=BATCHES, before=st.integers(0, 3), sizes=SIZES, behind=st.integers(0, 5))
def test_an_object_in_pieces_has_the_index_of_the_full_check(kinds, before, sizes, behind):
    offsets = 1 if kinds[0].kind in {"commit", "abort"} else kinds[0].offsets
    content, end = encoded(kinds, FIRST - min(before, offsets - 1))
    checked, indexed = (segment_of(end + behind, len(content)) for _ in range(2))
    with tempfile.TemporaryFile() as made:
        made.write(content)
        made.flush()
        file = OpenFile(os.dup(made.fileno()))
        expected = load(checked, file)
        whole = survey(indexed, file)
    assert checked.damage == ()
    for seen in (whole, in_pieces(indexed, content, sizes)):
        assert seen.is_whole
        assert (seen.end, seen.size_bytes) == (end, len(content))
        assert seen.digest.hexdigest() == xxhash.xxh3_128(content).hexdigest()
        assert seen.epochs_at == positions_of_epochs(content)
        seen.keep(indexed)
        assert indexed.index is not None
        assert indexed.events is not None
        assert checked.events is not None
        for name in ("offsets", "positions", "timestamps_ms", "max_timestamp_ms"):
            assert getattr(indexed.index, name) == getattr(expected, name), name
        for name in ("aborted", "open", "first_outcomes"):
            assert getattr(indexed.events, name) == getattr(checked.events, name), name


def positions_of_epochs(content: bytes) -> list[int]:
    """Return where batches have a leader epoch that is not 0, by their lengths alone."""
    found, position = [], 0
    while position < len(content):
        if any(content[position + EPOCH_AT : position + EPOCH_AT + 4]):
            found.append(position)
        position += 12 + int.from_bytes(content[position + 8 : position + 12], "big")
    return found


PLAIN = [Batch("data", 0, 10, 100, 0, 0, 5) for _ in range(5)]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (16, 1),  # an older format
        (8, 0xFF),  # a negative length
        (11, 48),  # shorter than a header
        (23, 0xFF),  # a negative last offset delta
        (0, 0xFF),  # a negative offset
        (6, 0xFF),  # an offset behind the object
        (7, 0),  # an offset before that of the batch before
        (10, 0xFF),  # a length that ends behind the object
    ],
)
@pytest.mark.parametrize("sizes", [[10**6], [7], [61]])
def test_bytes_that_are_no_batches_are_not_whole(at, value, sizes):
    content, end = encoded(PLAIN, FIRST)
    third = bytearray(content)
    third[2 * (len(content) // 5) + at] = value
    assert in_pieces(segment_of(end, len(content)), content, sizes).is_whole
    assert not in_pieces(segment_of(end, len(content)), bytes(third), sizes).is_whole


@pytest.mark.parametrize("cut", [1, 100, 130, 160])
def test_an_object_that_is_cut_off_is_not_whole(cut):
    content, end = encoded(PLAIN, FIRST)
    for sizes in ([10**6], [7]):
        assert not in_pieces(segment_of(end, len(content)), content[:-cut], sizes).is_whole
    assert not in_pieces(segment_of(end, 0), b"", [1]).is_whole


def test_a_batch_outside_the_range_of_the_name_is_not_whole():
    content, end = encoded(PLAIN, FIRST)
    assert not in_pieces(segment_of(end - 1, len(content)), content, [64]).is_whole
    early, end = encoded(PLAIN, FIRST - 10)
    assert not in_pieces(segment_of(end, len(early)), early, [64]).is_whole
