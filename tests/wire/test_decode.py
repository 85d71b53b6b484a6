"""The compiled decoder finds the same records as the reference, and refuses the same input.

Method: runs of legal batches, and runs one edit away from legal, go through both. Then the limits:
ranges, chunks of a few bytes, records larger than a chunk, bombs, reused columns.
"""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import (
    OFFSET_END,
    decode_all,
    relaxed,
    rows_of,
    runs_of_batches,
    spoiled_batches,
    with_right_checksums,
)
from logmirror.errors import CorruptionError, InternalError, UsageError
from logmirror.model import Limits, TimestampType
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.compression import Codec
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, decode_reference, encode_marker, encode_reference
from logmirror.wire.scan import BatchScanner

MIB = 1 << 20


def row(offset, value=b"value", timestamp_ms=1_700_000_000_000, headers=()):
    return Record(offset, timestamp_ms, TimestampType.CREATE_TIME, b"key", value, headers)


@relaxed
@given(runs_of_batches())
def test_the_records_are_those_of_the_slow_reader(drawn):
    data, rows = drawn
    assert decode_all(data) == rows == decode_reference(data)


@relaxed
@given(runs_of_batches(), st.integers(1, 200))
def test_chunks_of_any_size_make_the_same_records(drawn, max_chunk_bytes):
    data, rows = drawn
    decoder = RecordDecoder(max_chunk_bytes)
    assert decode_all(data, decoder=decoder) == rows
    assert decode_all(data, decoder=decoder) == rows


@relaxed
@given(runs_of_batches(), st.data())
def test_only_offsets_in_the_range_are_seen(drawn, data):
    batches, rows = drawn
    offsets = [one.offset for one in rows] or [0]
    near = st.sampled_from(offsets).flatmap(lambda at: st.integers(max(0, at - 2), at + 2))
    first, end = data.draw(near), data.draw(near)
    chunk_bytes = data.draw(st.sampled_from([8, 100, MIB]))
    seen = decode_all(batches, first=first, end=end, decoder=RecordDecoder(chunk_bytes))
    assert seen == [one for one in rows if first <= one.offset < end]


def outcome(read):
    """Records, or the kind of refusal and its reason."""
    try:
        return read()
    except CorruptionError as error:
        # A decompressor's reason is its own sentence; whose sentence it is does not matter.
        return ("corrupt", error.facts["offset"] if "codec" not in error.facts else None)
    except UsageError as error:
        return ("old", error.facts["magic"], error.facts["offset"])


@relaxed
@given(spoiled_batches())
def test_one_edit_away_both_readers_agree(data):
    slow = outcome(lambda: decode_reference(data))
    assert outcome(lambda: decode_all(data)) == slow
    assert outcome(lambda: decode_all(data, decoder=RecordDecoder(40))) == slow


@relaxed
@given(spoiled_batches())
def test_one_edit_away_both_readers_agree_without_checksums(data):
    slow = outcome(lambda: decode_reference(data, check_crc=False))
    assert outcome(lambda: decode_all(data, check_crc=False)) == slow


def body(record, *, length=None, claim=None):
    """One record's bytes from its parts; `claim` overrules the length that they have."""
    size = len(record) if length is None else length
    return varint(size if claim is None else claim) + record


def varint(value):
    pattern, out = (value << 1) ^ (value >> 63), b""
    while pattern > 0x7F:
        out, pattern = out + bytes([pattern & 0x7F | 0x80]), pattern >> 7
    return out + bytes([pattern])


def around(*bodies, count=None, last_delta=None):
    """A batch at offset 100 around hand-made record bytes."""
    count = len(bodies) if count is None else count
    payload = b"".join(bodies)
    last_delta = max(count - 1, 0) if last_delta is None else last_delta
    tail = struct.pack(">hiqqqhii", 0, last_delta, 1000, 2000, -1, -1, -1, count) + payload
    head = struct.pack(">qiibI", 100, len(tail) + 9, 0, 2, 0)
    return with_right_checksums(head + tail)


NULL, EMPTY = varint(-1), varint(0)
START = b"\0" + varint(0)  # attributes, timestamp delta
PLAIN = START + varint(0) + NULL + NULL + varint(0)
SECOND = START + varint(1) + NULL + NULL + varint(0)

ILLEGAL = {
    "count below the content": (around(body(PLAIN), body(SECOND), count=1, last_delta=1), "count"),
    "count above the content": (around(body(PLAIN + b"\0" * 20), count=2), "record"),
    "no count, yet content": (around(body(PLAIN), count=0), "count"),
    "a byte behind the records": (around(body(PLAIN), b"\0", count=1), "count"),
    "record length 0": (around(body(b"", length=0) + b"\0" * 7, count=1), "record"),
    "record length negative": (around(body(PLAIN, claim=-5)), "record"),
    "record length beyond the batch": (around(body(PLAIN, claim=99)), "record"),
    "record length huge": (around(body(PLAIN, claim=2**31 - 1)), "record"),
    "record shorter than its content": (around(body(PLAIN, claim=len(PLAIN) - 1)), "record"),
    "record longer than its content": (around(body(PLAIN + b"\0")), "record"),
    "record length of six bytes": (around(b"\x8c\x80\x80\x80\x80\0" + PLAIN), "record"),
    "varint beyond 32 bits": (around(b"\xff\xff\xff\xff\x1f" + PLAIN), "record"),
    "varlong of eleven bytes": (around(body(b"\0" + b"\x80" * 10 + b"\0" + PLAIN[2:])), "record"),
    "varlong beyond 64 bits": (around(body(b"\0" + b"\xff" * 9 + b"\x02" + PLAIN[2:])), "record"),
    "key length -2": (around(body(START + varint(0) + varint(-2) + NULL + varint(0))), "record"),
    "key beyond the record": (
        around(body(START + varint(0) + varint(50) + NULL + varint(0))),
        "record",
    ),
    "value length smallest": (
        around(body(START + varint(0) + NULL + varint(-(2**31)) + varint(0))),
        "record",
    ),
    "value beyond the record": (
        around(body(START + varint(0) + NULL + varint(2**31 - 1) + varint(0))),
        "record",
    ),
    "header count negative": (around(body(PLAIN[:-1] + varint(-1))), "record"),
    "header count floods": (around(body(PLAIN[:-1] + varint(2**31 - 1))), "record"),
    "header key null": (around(body(PLAIN[:-1] + varint(1) + NULL + NULL)), "record"),
    "header value length -2": (
        around(body(PLAIN[:-1] + varint(1) + EMPTY + varint(-2))),
        "record",
    ),
    "header cut": (around(body(PLAIN[:-1] + varint(1) + EMPTY)), "record"),
    "offset delta repeats": (around(body(PLAIN), body(PLAIN)), "offset-delta"),
    "offset delta descends": (around(body(SECOND), body(PLAIN)), "offset-delta"),
    "offset delta negative": (
        around(body(START + varint(-1) + NULL + NULL + varint(0))),
        "offset-delta",
    ),
    "offset delta beyond the last": (around(body(SECOND), last_delta=0), "offset-delta"),
    "nested compression": (around(b"\x28\xb5\x2f\xfd" + b"x" * 30, count=1), "offset-delta"),
}


@pytest.mark.parametrize(("data", "why"), ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_record_is_refused_with_the_batch_s_place_and_the_reason(data, why):
    before = encode_reference([row(5)])
    for read in (decode_all, decode_reference):
        with pytest.raises(CorruptionError) as caught:
            read(before + data)
        assert caught.value.facts == {"position": len(before), "offset": 100, "why": why}


LEGAL = {
    "null is not empty": around(
        body(START + varint(0) + NULL + EMPTY + varint(0)),
        body(START + varint(1) + EMPTY + NULL + varint(0)),
    ),
    "record attributes set": around(body(b"\xff" + PLAIN[1:])),
    "timestamp delta beyond int32": around(body(b"\0" + varint(2**40) + PLAIN[2:])),
    "timestamp delta wraps": around(body(b"\0" + varint(2**63 - 1) + PLAIN[2:])),
    "timestamp delta smallest": around(body(b"\0" + varint(-(2**63)) + PLAIN[2:])),
    "overlong varint within five bytes": around(b"\x8c\x80\x80\x80\0" + PLAIN),
    "two headers of one key, one null": around(
        body(PLAIN[:-1] + varint(2) + varint(1) + b"h" + NULL + varint(1) + b"h" + EMPTY)
    ),
    "header key empty": around(body(PLAIN[:-1] + varint(1) + EMPTY + EMPTY)),
    "last offset delta beyond the last record": around(body(PLAIN), last_delta=500),
    "no record at all": around(count=0, last_delta=9),
}


@pytest.mark.parametrize("data", LEGAL.values(), ids=LEGAL)
def test_an_odd_but_legal_record_is_read_like_by_the_slow_reader(data):
    assert decode_all(data) == decode_reference(data)


def test_timestamps_beyond_int32_and_beyond_int64():
    (one,) = decode_all(LEGAL["timestamp delta beyond int32"])
    assert one.timestamp_ms == 1000 + 2**40
    (one,) = decode_all(LEGAL["timestamp delta wraps"])
    assert one.timestamp_ms == 1000 + 2**63 - 1 - 2**64


@pytest.mark.parametrize("codec", Codec)
def test_control_and_aborted_batches_are_passed_over(codec):
    data = encode_reference([row(1)], codec=codec)
    data += encode_reference([row(2)], codec=codec, producer_id=7, transactional=True)
    data += encode_marker(MarkerType.ABORT, offset=3, producer_id=7)
    data += encode_reference([row(4)], codec=codec, producer_id=7, transactional=True)
    seen = decode_all(data, aborted=[(7, 2)])
    assert [one.offset for one in seen] == [1, 4]
    assert seen == decode_reference(data, aborted=[(7, 2)])


def test_batches_outside_of_the_range_are_not_even_decompressed():
    broken = bytearray(encode_reference([row(5)], codec=Codec.ZSTD))
    broken[61] ^= 0xFF
    data = encode_reference([row(1)]) + with_right_checksums(bytes(broken))
    data += encode_reference([row(9)])
    assert [one.offset for one in decode_all(data, first=0, end=5)] == [1]
    assert [one.offset for one in decode_all(data, first=6, end=10)] == [9]
    with pytest.raises(CorruptionError) as caught:
        decode_all(data)
    assert (caught.value.facts["codec"], caught.value.facts["offset"]) == ("zstd", 5)
    assert caught.value.facts["position"] == len(encode_reference([row(1)]))


@pytest.mark.parametrize("codec", Codec)
def test_a_record_larger_than_a_chunk_gets_a_chunk_of_its_own(codec):
    many_headers = tuple((b"h%d" % i, b"x") for i in range(500))
    rows = [
        row(0),
        row(1, bytes(100_000)),
        row(2),
        row(3, None, headers=many_headers),
        row(4, b"", headers=tuple((b"", None) for _ in range(5000))),
        row(5),
    ]
    data, chunks = encode_reference(rows, codec=codec), []
    seen = decode_all(data, decoder=RecordDecoder(1000), each=lambda c: chunks.append(c.rows))
    assert seen == rows
    assert chunks == [1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("codec", list(Codec)[1:])
def test_a_bomb_of_a_batch_is_refused_with_its_offset(codec):
    data = encode_reference([row(41)]) + encode_reference([row(42, bytes(8 * MIB))], codec=codec)
    decoder = RecordDecoder(1 << 16, Limits(max_batch_unpacked_bytes=4 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=r"limits\.max-batch-unpacked-bytes") as caught:
            decode_all(data, decoder=decoder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * MIB
    assert (caught.value.facts["offset"], caught.value.facts["limit_bytes"]) == (42, 4 * MIB)
    assert caught.value.facts["batch_bytes"] < 4 * MIB


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_a_record_above_its_limit_is_refused_with_its_offset(codec, chunk_bytes):
    """The limit counts the same however large chunks are: they depend on the memory of a slot."""
    small, large = b"v" * 4000, b"v" * 5000
    rows = [row(41, small), row(43, small), row(44, large), row(45, small)]
    data = encode_reference(rows, codec=codec)
    decoder = RecordDecoder(chunk_bytes, Limits(max_record_bytes=4500))
    seen = []
    with pytest.raises(UsageError, match=r"limits\.max-record-bytes") as caught:
        decode_all(data, decoder=decoder, each=lambda c: seen.extend(c.offsets.tolist()))
    assert seen == [41, 43]
    facts = caught.value.facts
    assert (facts["offset"], facts["batch_offset"], facts["limit_bytes"]) == (44, 41, 4500)
    assert 5000 < facts["record_bytes"] < 5100
    relaxed = RecordDecoder(chunk_bytes, Limits(max_record_bytes=facts["record_bytes"]))
    assert decode_all(data, decoder=relaxed) == rows


def test_many_batches_of_all_codecs_side_by_side():
    rows = [row(offset, b"%d" % offset * 50) for offset in range(200)]
    data = b"".join(
        encode_reference(rows[at : at + 5], codec=Codec(at // 5 % 5)) for at in range(0, 200, 5)
    )
    assert decode_all(data) == rows
    assert decode_all(data, decoder=RecordDecoder(300)) == rows


def test_columns_stay_until_the_next_step_and_are_then_used_again():
    data = encode_reference([row(0, b"a" * 60), row(1, b"b" * 60)])
    listed = BatchScanner().scan(data, len(data))
    chunks = RecordDecoder(100).decode(data, listed, first=0, end=OFFSET_END)
    first = next(chunks)
    assert [one.offset for one in rows_of(first)] == [0]
    second = next(chunks)
    assert second is first
    assert [one.offset for one in rows_of(first)] == [1]
    assert next(chunks, None) is None


def test_the_buffer_cannot_be_resized_under_the_decoder_s_feet():
    data = bytearray(encode_reference([row(0), row(1)]))
    listed = BatchScanner().scan(data, len(data))
    chunks = RecordDecoder(20).decode(data, listed, first=0, end=OFFSET_END)
    next(chunks)
    with pytest.raises(BufferError):
        data.extend(bytes(MIB))


def test_limits_beyond_arrow_s_offsets_are_our_own_mistake():
    for size in (0, 2**31):
        for limits in (Limits(max_record_bytes=size), Limits(max_batch_unpacked_bytes=size)):
            with pytest.raises(InternalError):
                RecordDecoder(1, limits)
        with pytest.raises(InternalError):
            RecordDecoder(size)
