"""Timestamps and offsets of a stored batch, compared with the reference decoder's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.errors import CorruptionError
from logmirror.model import TimestampType
from logmirror.wire.batch_header import HEADER_SIZE
from logmirror.wire.compression import Codec
from logmirror.wire.record_times import record_times
from logmirror.wire.records import Record, decode_reference, encode_reference

TIMES = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8)


@given(times=TIMES, codec=st.sampled_from(Codec), base=st.integers(0, 2**40), log=st.booleans())
def test_as_the_reference(times, codec, base, log):
    kind = TimestampType.LOG_APPEND_TIME if log else TimestampType.CREATE_TIME
    times = [times[0]] * len(times) if log else times
    records = [Record(base + n, at, kind, b"k", None, ()) for n, at in enumerate(times)]
    batch = encode_reference(records, codec=codec, timestamp_type=kind)

    found = list(record_times(batch, max_body_bytes=2**20))

    assert found == [(record.timestamp_ms, record.offset) for record in decode_reference(batch)]


def test_a_body_that_is_cut_off_is_damage():
    batch = encode_reference([Record(0, 1000, TimestampType.CREATE_TIME, b"k", b"v", ())])
    with pytest.raises(CorruptionError):
        list(record_times(batch[: HEADER_SIZE + 1], max_body_bytes=2**20))
