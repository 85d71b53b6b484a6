"""Pieces hold the source's records at the source's offsets, and are what a producer may send.

Method: drawn batches of every shape go through, and the reference decoder checks the result; legal
runs, runs one edit away from legal, limits of a few bytes. Then single cases, memory, and a process
that places every buffer against an inaccessible page.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import (
    OFFSET_END,
    records,
    relaxed,
    runs_of_batches,
    spoiled_batches,
    with_right_checksums,
)
from logmirror.errors import CorruptionError, InternalError, UsageError
from logmirror.model import Limits, TimestampType
from logmirror.wire.batch_header import HEADER_SIZE, MarkerType, crc32c_reference, parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.padding import padding
from logmirror.wire.rebatch import Rebatcher, stamp
from logmirror.wire.records import Record, decode_reference, encode_marker, encode_reference
from logmirror.wire.scan import BatchScanner

CREATE = TimestampType.CREATE_TIME
DELETE_HORIZON = 1 << 6
NOW_MS = 1_700_000_000_000


def row(offset, value=b"value", timestamp_ms=NOW_MS, key=b"key", headers=()):
    return Record(offset, timestamp_ms, CREATE, key, value, headers)


def cut(data, *, first=0, end=OFFSET_END, rebatcher=None, aborted=(), **limits):
    """All pieces of `data`, each judged by itself, as `(piece, its records)`."""
    buffer = bytearray(data)
    listed = BatchScanner().scan(buffer, len(buffer), aborted=aborted)
    rebatcher = rebatcher or Rebatcher(**limits)
    held = list(rebatcher.pieces(buffer, listed, 0, listed.count, first=first, end=end))
    return [(piece, records_of(piece)) for piece in held]


def records_of(piece):
    """The records of a piece at the source's offsets; the piece keeps every rule of a producer."""
    data = bytes(piece.data)
    (header,) = [parse_header(data, 0)]
    assert BatchScanner().scan(data, len(data)).count == 1, "magic, length, checksum, counts"
    assert (header.size_bytes, header.base_offset, header.leader_epoch) == (len(data), 0, -1)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert header.attributes & ~7 == 0
    assert header.record_count == header.last_offset_delta + 1 == piece.count
    assert header.max_timestamp_ms == piece.max_timestamp_ms
    rows = decode_reference(data)
    assert [one.offset for one in rows] == list(range(piece.count))
    return [one._replace(offset=one.offset + piece.base_offset) for one in rows]


def as_created(rows):
    return [one._replace(timestamp_type=CREATE) for one in rows]


def all_rows(pieces):
    return [one for _, rows in pieces for one in rows]


limits = st.fixed_dictionaries(
    {
        "max_batch_bytes": st.sampled_from([1, 100, 300, 4000, 1_000_000]),
        "merge_below_bytes": st.sampled_from([0, 100, 1 << 17]),
        "merge_compressed_below_bytes": st.sampled_from([0, 100, 1 << 17]),
    }
)


@st.composite
def neighbours(draw):
    """Many small dense batches of few codecs, most of them side by side, some in transactions."""
    offset, data, rows = draw(st.sampled_from([0, 2**40])), b"", []
    codecs = draw(st.sampled_from([[Codec.NONE], [Codec.LZ4], list(Codec)]))
    for _ in range(draw(st.integers(0, 12))):
        offset += draw(st.sampled_from([0, 0, 0, 0, 0, 7]))
        drawn = draw(records(max_size=3)) or [row(0)]
        run = [one._replace(offset=offset + index) for index, one in enumerate(drawn)]
        data += encode_reference(
            run,
            codec=draw(st.sampled_from(codecs)),
            transactional=draw(st.booleans()),
            producer_id=draw(st.sampled_from([-1, 7])),
            attribute_bits=draw(st.sampled_from([0, 0, DELETE_HORIZON])),
            base_timestamp_ms=draw(st.sampled_from([None, NOW_MS])),
        )
        offset, rows = offset + len(run), rows + run
    return data, rows


@relaxed
@given(runs_of_batches() | neighbours(), limits)
def test_pieces_hold_the_records_of_the_source_at_its_offsets(drawn, chosen):
    data, rows = drawn
    assert all_rows(cut(data, **chosen)) == as_created(rows)


@relaxed
@given(runs_of_batches() | neighbours(), limits, st.data())
def test_only_offsets_in_the_range_come_out(drawn, chosen, data):
    batches_bytes, rows = drawn
    offsets = [one.offset for one in rows] or [0]
    near = st.sampled_from(offsets).flatmap(lambda at: st.integers(max(0, at - 2), at + 2))
    first, end = data.draw(near), data.draw(near)
    expected = [one for one in as_created(rows) if first <= one.offset < end]
    assert all_rows(cut(batches_bytes, first=first, end=end, **chosen)) == expected


@relaxed
@given(runs_of_batches() | neighbours(), limits)
def test_a_new_piece_passes_the_limit_only_with_a_single_record(drawn, chosen):
    for piece, _ in cut(drawn[0], **chosen):
        if not piece.verbatim:
            assert len(piece.data) <= chosen["max_batch_bytes"] or piece.count == 1


@relaxed
@given(runs_of_batches() | neighbours(), limits)
def test_a_batch_that_could_be_passed_through_is_never_split(drawn, chosen):
    ranges = [
        range(piece.base_offset, piece.base_offset + piece.count)
        for piece, _ in cut(drawn[0], **chosen)
    ]
    for header in headers_of(drawn[0]):
        dense = header.record_count == header.last_offset_delta + 1
        if dense and header.timestamp_type is CREATE:
            (own,) = [one for one in ranges if header.base_offset in one]
            assert header.last_offset in own


@relaxed
@given(runs_of_batches() | neighbours(), limits)
def test_verbatim_pieces_are_the_bytes_of_the_source_behind_the_header(drawn, chosen):
    sources = {header.base_offset: header for header in headers_of(drawn[0])}
    for piece, _ in cut(drawn[0], **chosen):
        if piece.verbatim:
            source, header = sources[piece.base_offset], parse_header(piece.data, 0)
            own = drawn[0][source.position : source.position + source.size_bytes]
            assert piece.data[HEADER_SIZE:] == own[HEADER_SIZE:]
            assert header.attributes == source.attributes & 7
            assert header.base_timestamp_ms == source.base_timestamp_ms


def headers_of(data):
    headers, position = [], 0
    while position < len(data):
        headers.append(parse_header(data, position))
        position += headers[-1].size_bytes
    return headers


@relaxed
@given(spoiled_batches(), limits, st.booleans())
def test_one_edit_away_what_the_slow_reader_refuses_is_refused_here_or_by_the_broker(
    data, chosen, check_crc
):
    """What passes as it is was not read; the slow reader stands for the broker, which reads it."""
    try:
        expected = as_created(decode_reference(data, check_crc=check_crc))
    except (CorruptionError, UsageError):
        expected = None
    try:
        found = spoiled_rows(data, chosen, check_crc=check_crc)
    except (CorruptionError, UsageError):
        found = None
    assert found == expected


def spoiled_rows(data, chosen, *, check_crc):
    buffer = bytearray(data)
    listed = BatchScanner().scan(buffer, len(buffer), check_crc=check_crc)
    run = Rebatcher(**chosen).pieces(buffer, listed, 0, listed.count, first=0, end=OFFSET_END)
    return [
        one._replace(offset=one.offset + piece.base_offset)
        for piece in run
        for one in decode_reference(bytes(piece.data), check_crc=check_crc)
    ]


def test_thousands_of_tiny_batches_become_few():
    source = [row(5 + i, b"%d" % i, NOW_MS + i * 1000) for i in range(20_000)]
    data = b"".join(encode_reference([one]) for one in source)
    pieces = cut(data, max_batch_bytes=100_000)
    assert all_rows(pieces) == source
    sizes = [len(piece.data) for piece, _ in pieces]
    assert min(sizes[:-1]) > 99_900
    assert not any(piece.verbatim for piece, _ in pieces)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec])
def test_tiny_compressed_batches_become_few_of_their_codec(codec):
    source = [row(i, b"value %d" % i * 9, NOW_MS + i) for i in range(3000)]
    data = b"".join(encode_reference(source[i : i + 3], codec=codec) for i in range(0, 3000, 3))
    pieces = cut(data, max_batch_bytes=100_000)
    assert all_rows(pieces) == source
    assert len(pieces) < 10
    assert {parse_header(piece.data, 0).attributes for piece, _ in pieces} == {codec}
    assert sum(len(piece.data) for piece, _ in pieces) < len(data) // 2


def shapes(data, **chosen):
    return [(piece.base_offset, piece.count, piece.verbatim) for piece, _ in cut(data, **chosen)]


def dense(first, count, size=10, **fields):
    return encode_reference([row(first + i, b"v" * size) for i in range(count)], **fields)


def test_a_large_batch_among_small_ones_is_passed_through():
    data = dense(0, 2) + dense(2, 2) + dense(4, 1, 900) + dense(5, 2) + dense(7, 2)
    expected = [(0, 4, False), (4, 1, True), (5, 4, False)]
    assert shapes(data, merge_below_bytes=500) == expected


def test_batches_are_merged_while_that_costs_less_than_a_request():
    """Three of 256 KiB, as a mounted archive serves them, are one; of 400 KiB each is its own."""
    data = b"".join(dense(at, 256, 1000) for at in range(0, 768, 256))
    assert shapes(data) == [(0, 768, False)]
    data = b"".join(dense(at, 400, 1000) for at in range(0, 1200, 400))
    assert shapes(data) == [(0, 400, True), (400, 400, True), (800, 400, True)]


def test_a_small_batch_without_a_neighbour_is_passed_through():
    other_codec = dense(2, 2, codec=Codec.GZIP)
    behind_a_gap = dense(9, 2)
    data = dense(0, 2) + other_codec + dense(4, 1, 900) + behind_a_gap
    expected = [(0, 2, True), (2, 2, True), (4, 1, True), (9, 2, True)]
    assert shapes(data, merge_below_bytes=500) == expected


def test_a_record_that_does_not_fit_begins_the_next_piece():
    batch_bytes = len(dense(0, 4))
    data = b"".join(dense(at, 4) for at in range(0, 24, 4))
    limit = HEADER_SIZE + 2 * (batch_bytes - HEADER_SIZE) + 20
    assert shapes(data, max_batch_bytes=limit) == [(0, 8, False), (8, 8, False), (16, 8, False)]


def test_a_rewritten_batch_that_is_too_large_is_split_between_records():
    source = [row(i, b"v" * 300, NOW_MS + i) for i in range(10)]
    data = encode_reference(source, last_offset=10)
    pieces = cut(data, max_batch_bytes=1000)
    assert all_rows(pieces) == source
    assert [piece.count for piece, _ in pieces] == [3, 3, 3, 1]


def test_a_record_larger_than_the_memory_for_pieces_stays_alone():
    source = [row(0), row(1, b"v" * 9_000_000), row(2)]
    pieces = cut(encode_reference(source, last_offset=9), max_batch_bytes=1000)
    assert all_rows(pieces) == source
    assert [piece.count for piece, _ in pieces] == [1, 1, 1]


def test_a_batch_that_is_small_only_while_compressed_is_passed_through():
    packed = [dense(at, 4, 5000, codec=Codec.GZIP) for at in (0, 4, 8)]
    expected = [(0, 4, True), (4, 4, True), (8, 4, True)]
    assert shapes(b"".join(packed), max_batch_bytes=10_000) == expected


def test_packing_that_does_not_pay_is_left_out():
    data = encode_reference([row(0, b"v"), row(2, b"v")], codec=Codec.GZIP)
    pieces = cut(data)
    assert [piece.base_offset for piece, _ in pieces] == [0, 2]
    assert [parse_header(piece.data, 0).attributes for piece, _ in pieces] == [0, 0]


def test_log_append_time_becomes_the_timestamp_of_every_record():
    data = encode_reference(
        [row(0, timestamp_ms=5), row(1, timestamp_ms=9)],
        timestamp_type=TimestampType.LOG_APPEND_TIME,
        max_timestamp_ms=NOW_MS,
    )
    ((piece, rows),) = cut(data)
    assert [one.timestamp_ms for one in rows] == [NOW_MS, NOW_MS]
    assert (piece.max_timestamp_ms, piece.verbatim) == (NOW_MS, False)
    assert parse_header(piece.data, 0).base_timestamp_ms == NOW_MS


def test_timestamps_stay_where_a_delete_horizon_took_the_place_of_the_base():
    source = [row(0, timestamp_ms=1000), row(1, timestamp_ms=400)]
    horizon_ms = NOW_MS + 86_400_000
    for last_offset, verbatim in ((1, True), (2, False)):
        data = encode_reference(
            source,
            last_offset=last_offset,
            base_timestamp_ms=horizon_ms,
            attribute_bits=DELETE_HORIZON,
        )
        ((piece, rows),) = cut(data)
        assert (rows, piece.verbatim, piece.max_timestamp_ms) == (source, verbatim, 1000)


def test_markers_and_aborted_records_are_left_out():
    data = (
        dense(0, 2, producer_id=7, transactional=True)
        + encode_marker(MarkerType.COMMIT, offset=2, producer_id=7)
        + dense(3, 2, producer_id=8, transactional=True)
        + dense(5, 1, producer_id=9, transactional=True)
        + encode_marker(MarkerType.ABORT, offset=6, producer_id=8)
        + encode_marker(MarkerType.COMMIT, offset=7, producer_id=9)
    )
    pieces = cut(data, aborted=[(8, 3)])
    assert [one.offset for one in all_rows(pieces)] == [0, 1, 5]
    assert all(piece.verbatim for piece, _ in pieces)


def test_a_batch_that_compaction_left_empty_yields_nothing():
    empty = encode_reference([], base_offset=2, last_offset=5)
    assert shapes(dense(0, 2) + empty + dense(6, 1)) == [(0, 2, True), (6, 1, True)]
    assert shapes(empty) == []


def test_only_the_batches_asked_for_are_looked_at():
    buffer = bytearray(dense(0, 2) + dense(2, 2) + dense(4, 2) + dense(6, 2))
    listed = BatchScanner().scan(buffer, len(buffer))
    run = Rebatcher().pieces(buffer, listed, 1, 3, first=0, end=OFFSET_END)
    assert [(piece.base_offset, piece.count) for piece in run] == [(2, 4)]


def test_the_same_run_may_be_made_again_also_after_stamping():
    buffer = bytearray(dense(0, 2, 900) + dense(2, 2) + dense(4, 2) + dense(6, 1, 900))
    listed, rebatcher = BatchScanner().scan(buffer, len(buffer)), Rebatcher(merge_below_bytes=500)
    seen = []
    for first in (0, 0, 1):
        run = list(rebatcher.pieces(buffer, listed, 0, 4, first=first, end=OFFSET_END))
        seen.append([one for piece in run for one in records_of(piece)])
        for piece in run:
            stamp(piece.data, producer_id=1, producer_epoch=2, sequence=3)
    assert [one.offset for one in seen[0]] == list(range(7))
    assert seen[1:] == [seen[0], seen[0][1:]]


def test_a_stamp_is_what_the_header_says():
    for piece, _ in cut(dense(0, 2, 900) + dense(2, 2) + dense(4, 2), merge_below_bytes=500):
        stamp(piece.data, producer_id=2**63 - 1, producer_epoch=3, sequence=2**31 - 1)
        header = parse_header(piece.data, 0)
        assert (header.producer_id, header.producer_epoch) == (2**63 - 1, 3)
        assert header.base_sequence == 2**31 - 1
        assert header.crc == crc32c_reference(bytes(piece.data[21:]))
    with pytest.raises(InternalError):
        stamp(piece.data[:-1], producer_id=1, producer_epoch=0, sequence=0)


@pytest.mark.gate("much memory")
def test_pieces_that_are_held_keep_their_bytes_and_the_memory_of_others_is_used_again():
    source = [row(i, b"v" * 9000) for i in range(200)]
    data = b"".join(encode_reference([one]) for one in source)
    rebatcher = Rebatcher(max_batch_bytes=100_000)
    held = cut(data, rebatcher=rebatcher)
    places = set()
    for _ in range(30):
        for piece, _ in cut(data, rebatcher=rebatcher):
            places.add(id(piece.data.obj.base))
        del piece
    assert [one for piece, _ in held for one in records_of(piece)] == source
    assert len(places) <= 3


def test_small_runs_share_one_piece_of_memory():
    rebatcher = Rebatcher()
    held = [cut(dense(0, 2) + dense(2, 2), rebatcher=rebatcher) for _ in range(50)]
    assert len({id(piece.data.obj.base) for run in held for piece, _ in run}) == 1


def test_a_bomb_is_refused_with_its_place():
    bomb = encode_reference([row(3, bytes(100_000))], last_offset=9, codec=Codec.ZSTD)
    with pytest.raises(UsageError, match=r"limits\.max-batch-unpacked-bytes") as caught:
        cut(dense(0, 3) + bomb, limits=Limits(max_batch_unpacked_bytes=50_000))
    facts = caught.value.facts
    assert (facts["offset"], facts["codec"], facts["limit_bytes"]) == (3, "zstd", 50_000)
    assert facts["batch_bytes"] == len(bomb)


def test_a_length_that_lies_inside_a_record_is_refused_with_its_place():
    good, bad = dense(0, 2), bytearray(dense(2, 2))
    bad[HEADER_SIZE] += 2
    with pytest.raises(CorruptionError) as caught:
        cut(good + with_right_checksums(bytes(bad)))
    assert caught.value.facts == {"position": len(good), "offset": 2, "why": "record"}


def test_pieces_before_a_bad_batch_were_yielded():
    bad = bytearray(dense(2, 2, last_offset=9))
    bad[HEADER_SIZE] += 2
    buffer = bytearray(dense(0, 2) + with_right_checksums(bytes(bad)))
    listed = BatchScanner().scan(buffer, len(buffer))
    run = Rebatcher().pieces(buffer, listed, 0, 2, first=0, end=OFFSET_END)
    assert next(run).count == 2
    with pytest.raises(CorruptionError):
        next(run)


def test_misuse_is_refused():
    data = dense(0, 2)
    listed, rebatcher = BatchScanner().scan(data, len(data)), Rebatcher()
    with pytest.raises(InternalError):
        rebatcher.pieces(data, listed, 0, 1, first=0, end=9)
    buffer = bytearray(data)
    for start, stop in ((-1, 1), (0, 2), (1, 0)):
        with pytest.raises(InternalError):
            rebatcher.pieces(buffer, listed, start, stop, first=0, end=9)
    earlier = rebatcher.pieces(buffer, listed, 0, 1, first=0, end=9)
    rebatcher.pieces(buffer, listed, 0, 1, first=0, end=9)
    with pytest.raises(InternalError):
        next(earlier)
    struct.pack_into(">i", buffer, 8, 5)
    with pytest.raises(InternalError):
        next(rebatcher.pieces(buffer, listed, 0, 1, first=0, end=9))


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 9000])
def test_padding_has_as_many_empty_records_as_asked(count):
    rows = decode_reference(padding(count, timestamp_ms=NOW_MS))
    assert rows == [row(at, None, key=None) for at in range(count)]


def test_large_padding_fits_into_a_request_and_an_impossible_count_is_refused():
    data = padding(100_000, timestamp_ms=NOW_MS)
    listed = BatchScanner().scan(data, len(data))
    assert listed.record_counts.tolist() == [100_000]
    assert len(data) < 1_000_000
    for count in (0, -1, 2**31):
        with pytest.raises(InternalError):
            padding(count, timestamp_ms=0)


SCRIPT = Path(__file__).with_name("hostile_rebatch.py")


@pytest.mark.gate("minutes of damaged input")
def test_damaged_batches_touch_nothing_outside_of_the_buffers():
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "300000"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["canaries"] is True
    assert report["rounds"] == sum(report["ended"].values())
    assert min(report["ended"]["done"], report["ended"]["refused"]) > 30_000
    assert min(report["ended"]["helpless"], report["pieces"]["source"]) > 1000
    assert report["pieces"]["new"] > 30_000
