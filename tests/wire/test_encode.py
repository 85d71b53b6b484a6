"""Arrow rows become batches that the reference decoder, and so Kafka, reads as the same records.

Method: round trips over drawn records and slices; sizes, cuts and refusals by name.
"""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.arrow_batches import encode_batches
from kit.runs.record_batches import OFFSET_END, records, relaxed
from logmirror.errors import UsageError
from logmirror.model import TimestampType
from logmirror.wire.batch_header import parse_header
from logmirror.wire.columns import SCHEMA
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, decode_reference, encode_reference
from logmirror.wire.scan import BatchScanner


def row(offset, value=b"v" * 100, timestamp_ms=1000):
    return Record(offset, timestamp_ms, TimestampType.CREATE_TIME, b"k", value, ((b"h", None),))


def arrow_of(rows, **options):
    data = encode_reference(rows, **options)
    listed = BatchScanner().scan(data, len(data))
    return next(RecordDecoder().decode(data, listed, first=0, end=OFFSET_END)).to_arrow("t", 0)


@relaxed
@given(records(), st.sampled_from([1, 200, 1 << 20]), st.data())
def test_rows_come_back_whatever_the_slice_and_the_size(drawn, batch_bytes, data):
    rows = [one._replace(offset=2**40 + index) for index, one in enumerate(drawn)]
    if not rows:
        return
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    batch = arrow_of(rows)
    assert decode_reference(encode_batches(batch, batch_bytes=batch_bytes)) == rows
    sliced = batch.slice(start, stop - start)
    assert decode_reference(encode_batches(sliced, batch_bytes=batch_bytes)) == rows[start:stop]


def test_one_batch_has_the_bytes_that_a_producer_would_send():
    rows = [row(0), row(1, None, 5000), row(2, b"", 10)]
    assert encode_batches(arrow_of(rows)) == encode_reference(rows, leader_epoch=-1)


def test_no_batch_passes_its_size_but_for_a_record_that_is_larger():
    rows = [row(0), row(1), row(2, b"x" * 5000), row(3), row(4)]
    data = encode_batches(arrow_of(rows), batch_bytes=400)
    listed = BatchScanner().scan(data, len(data))
    assert listed.record_counts.tolist() == [2, 1, 2]
    assert listed.base_offsets.tolist() == [0, 2, 3]
    assert [size <= 400 for size in listed.sizes] == [True, False, True]
    assert decode_reference(data) == rows


def test_log_append_time_is_kept_by_batches_of_one_time_each():
    log_append = TimestampType.LOG_APPEND_TIME
    first = arrow_of([row(0), row(1)], timestamp_type=log_append, max_timestamp_ms=70)
    second = arrow_of([row(2)], timestamp_type=log_append, max_timestamp_ms=71)
    third = arrow_of([row(3), row(4)])
    whole = pa.Table.from_batches([first, second, third]).combine_chunks().to_batches()[0]
    data = encode_batches(whole)
    seen = decode_reference(data)
    assert [one.timestamp_ms for one in seen] == [70, 70, 71, 1000, 1000]
    assert [int(one.timestamp_type) for one in seen] == [1, 1, 1, 0, 0]
    assert BatchScanner().scan(data, len(data)).record_counts.tolist() == [2, 1, 2]


def test_a_batch_names_no_producer_and_no_leader_epoch():
    header = parse_header(encode_batches(arrow_of([row(7)])), 0)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
    assert (header.leader_epoch, header.attributes, header.base_offset) == (-1, 0, 7)


def test_no_rows_make_no_bytes():
    assert encode_batches(arrow_of([row(0)]).slice(0, 0)) == b""
    assert encode_batches(pa.RecordBatch.from_pylist([], SCHEMA)) == b""


def test_rows_made_by_python_encode_like_decoded_ones():
    batch = arrow_of([row(5), row(6, None)])
    again = pa.RecordBatch.from_pylist(batch.to_pylist(), SCHEMA)
    assert encode_batches(again) == encode_batches(batch)


@pytest.mark.parametrize("offsets", [[5, 7], [5, 5], [6, 5]])
def test_offsets_with_gaps_are_refused(offsets):
    batch = arrow_of([row(5), row(6)])
    batch = batch.set_column(4, "offset", pa.array(offsets))
    with pytest.raises(UsageError, match="gaps") as caught:
        encode_batches(batch)
    assert caught.value.facts == {"offset": offsets[0]}


def test_other_arrow_batches_are_refused():
    good = arrow_of([row(0), row(1)])
    wild = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array([0, 3, 1], np.int32)), pa.py_buffer(b"abc")]
    )
    for bad in (
        good.select(["key", "value"]),
        good.set_column(1, "value", wild),
        good.set_column(4, "offset", pa.array(["a", "b"])),
        good.set_column(4, "offset", pa.array([None, 1], pa.int64())),
        good.set_column(7, SCHEMA.field(7), pa.array([None, []], SCHEMA.field(7).type)),
        good.set_column(
            7,
            SCHEMA.field(7),
            pa.array([[{"key": None, "value": b""}], []], SCHEMA.field(7).type),
        ),
    ):
        with pytest.raises(UsageError):
            encode_batches(bad)
