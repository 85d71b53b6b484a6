"""Another producer in the header, and a checksum that is right without the records being read.

Method: patched batches are compared with batches that were made for that producer.
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kit.record_batches import batches, relaxed
from logmirror.model import TimestampType
from logmirror.wire.kernels_patch import patch_producer
from logmirror.wire.records import Record, crc32c_reference, encode_reference, parse_header
from logmirror.wire.scan import address_of


def patched(data, producer_id, epoch, sequence):
    array = np.frombuffer(bytearray(data), np.uint8)
    following = patch_producer(address_of(array), array.size, producer_id, epoch, sequence)
    return array.tobytes(), following


@relaxed
@given(
    st.lists(batches(), min_size=1, max_size=3),
    st.integers(-1, 2**63 - 1),
    st.integers(-1, 2**15 - 1),
    st.integers(0, 2**31 - 1),
)
def test_header_and_checksum_are_those_of_the_new_producer(drawn, producer_id, epoch, sequence):
    run = b"".join(data for data, _, _ in drawn)
    after, following = patched(run, producer_id, epoch, sequence)
    position = 0
    for data, _, _ in drawn:
        header = parse_header(after, position)
        one = after[position : position + len(data)]
        assert (header.producer_id, header.producer_epoch) == (producer_id, epoch)
        assert header.base_sequence == sequence
        assert header.crc == crc32c_reference(one[21:])
        assert (one[:17], one[21:43], one[57:]) == (data[:17], data[21:43], data[57:])
        sequence = (sequence + header.last_offset_delta + 1) % 2**31
        position += len(data)
    assert following == sequence


def test_damage_done_before_stays_visible_after():
    data = encode_reference([Record(0, 0, TimestampType.CREATE_TIME, b"k", b"v" * 5000, ())])
    damaged = data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]
    after, _ = patched(damaged, 9, 0, 0)
    assert parse_header(after, 0).crc != crc32c_reference(after[21:])


def test_a_batch_that_is_cut_off_or_none_is_not_touched():
    data = encode_reference([Record(0, 0, TimestampType.CREATE_TIME, b"k", b"v", ())])
    after, following = patched(data + data[:-1], 9, 0, 5)
    assert (after[len(data) :], following) == (data[:-1], 6)
    for spoil in (b"\0\0\0\x30", b"\xff\xff\xff\xff"):
        spoiled = data[:8] + spoil + data[12:]
        assert patched(spoiled, 9, 0, 5) == (spoiled, -1)
    old = data[:16] + b"\1" + data[17:]
    assert patched(old, 9, 0, 5) == (old, -1)
