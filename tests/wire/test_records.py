"""The reference decoder and encoder agree with those of a released client.

Method: kafka-python writes batches that we read, and reads batches that we write. It has no snappy
here; `test_compression` and the tests with Apache Kafka's producer cover that.
"""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.util import calc_crc32c

from kit.runs.record_batches import batches, relaxed
from logmirror.errors import CorruptionError
from logmirror.model import TimestampType
from logmirror.wire.batch_header import HEADER_SIZE, MarkerType, crc32c_reference, parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, decode_reference, encode_marker, encode_reference

NAMED = [
    Record(0, 1_700_000_000_000, TimestampType.CREATE_TIME, b"k", b"v", ((b"h", b"1"),)),
    Record(1, 1_700_000_000_001, TimestampType.CREATE_TIME, None, b"", ((b"h", None),)),
    Record(2, 1_699_999_999_999, TimestampType.CREATE_TIME, b"", None, ()),
    Record(3, 1_700_000_000_000, TimestampType.CREATE_TIME, b"x" * 500, b"y" * 9000, ()),
]


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec is not Codec.SNAPPY])
def test_we_read_what_kafka_python_writes(codec):
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=int(codec),
        is_transactional=True,
        producer_id=7,
        producer_epoch=3,
        base_sequence=11,
        batch_size=1 << 20,
    )
    for row in NAMED:
        pairs = [(key.decode(), value) for key, value in row.headers]
        builder.append(row.offset, row.timestamp_ms, row.key, row.value, pairs)
    data = bytes(builder.build())

    assert decode_reference(data) == NAMED
    header = parse_header(data, 0)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7, 3, 11)
    assert (header.record_count, header.last_offset, header.is_transactional) == (4, 3, True)


def test_uncompressed_we_write_the_bytes_that_kafka_python_writes():
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    for row in NAMED:
        pairs = [(key.decode(), value) for key, value in row.headers]
        builder.append(row.offset, row.timestamp_ms, row.key, row.value, pairs)
    theirs = bytes(builder.build())

    ours = encode_reference(NAMED, leader_epoch=parse_header(theirs, 0).leader_epoch)

    assert ours == theirs


@relaxed
@given(batches(base_offset=4))
def test_kafka_python_reads_what_we_write(drawn):
    data, rows, _ = drawn
    assume(parse_header(data, 0).attributes & 7 != Codec.SNAPPY)
    theirs = DefaultRecordBatch(bytearray(data))
    assert theirs.validate_crc()
    seen = [
        Record(
            *(one.offset, one.timestamp, TimestampType(one.timestamp_type), one.key, one.value),
            tuple((key.encode(), value) for key, value in one.headers),
        )
        for one in theirs
    ]
    # Python's integers do not wrap as Kafka's timestamps do.
    wrapped = [
        one._replace(timestamp_ms=(one.timestamp_ms + 2**63) % 2**64 - 2**63) for one in seen
    ]
    assert wrapped == rows
    assert decode_reference(data) == rows


@relaxed
@given(st.binary(max_size=200))
def test_a_checksum_is_crc_32c(data):
    assert crc32c_reference(data) == calc_crc32c(data)


def test_crc_32c_of_the_standard_s_example():
    assert crc32c_reference(b"123456789") == 0xE3069283  # RFC 3720, B.4, and everybody since


@relaxed
@given(batches(), st.integers(1, 60))
def test_a_last_batch_that_is_cut_off_is_left_out(drawn, cut):
    data, rows, following = drawn
    tail = encode_reference([NAMED[0]._replace(offset=following)])
    assert decode_reference(data + tail[:-cut]) == rows


def test_markers_are_not_shown():
    data = encode_marker(MarkerType.COMMIT, offset=9, producer_id=7)
    assert decode_reference(data) == []
    header = parse_header(data, 0)
    assert (header.is_control, header.is_transactional, header.record_count) == (True, True, 1)


def test_a_header_beyond_the_data_is_refused():
    data = encode_reference(NAMED)
    for position in (-1, len(data) - HEADER_SIZE + 1):
        with pytest.raises(CorruptionError) as caught:
            parse_header(data, position)
        assert caught.value.facts == {"position": position, "why": "length"}
