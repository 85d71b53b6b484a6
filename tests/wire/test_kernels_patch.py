"""Patched headers have valid checksums, without reading the records.

Method: patched batches are compared with batches that were encoded so.
"""

import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import batches, relaxed
from logmirror.model import TimestampType
from logmirror.wire.batch_header import crc32c_reference, parse_header
from logmirror.wire.kernels_patch import (
    BAD_BATCH,
    patch_listed,
    patch_producer,
    patch_transactional,
)
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import address_of

ONE = encode_reference([Record(5, 0, TimestampType.CREATE_TIME, b"k", b"v" * 5000, ())])


def patched(data, producer_id=9, epoch=0, sequence=0):
    array = np.frombuffer(bytearray(data), np.uint8)
    status = patch_producer(address_of(array), array.size, producer_id, epoch, sequence)
    return array.tobytes(), status


def listed(data, rows):
    """`data` after the batches of `rows`, which are (in source, position, size), were patched."""
    array = np.frombuffer(bytearray(data), np.uint8)
    table = np.array([(0, 1, in_source, at, size, 0) for in_source, at, size in rows], np.int64)
    status = patch_listed(address_of(array), array.size, address_of(table), len(rows))
    return array.tobytes(), status


@relaxed
@given(
    batches(),
    st.integers(-1, 2**63 - 1),
    st.integers(-1, 2**15 - 1),
    st.integers(0, 2**31 - 1),
)
def test_header_and_checksum_are_those_of_the_new_producer(drawn, producer_id, epoch, sequence):
    data, _, _ = drawn
    after, status = patched(data, producer_id, epoch, sequence)
    header = parse_header(after, 0)
    assert status == 0
    assert (header.producer_id, header.producer_epoch) == (producer_id, epoch)
    assert header.base_sequence == sequence
    assert header.crc == crc32c_reference(after[21:])
    assert (after[:17], after[21:43], after[57:]) == (data[:17], data[21:43], data[57:])


@relaxed
@given(batches(), st.integers(0, 2**63 - 1), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1))
def test_a_batch_of_a_transaction_says_so_and_keeps_its_other_attributes(
    drawn, producer_id, epoch, sequence
):
    data, _, _ = drawn
    array = np.frombuffer(bytearray(data), np.uint8)
    status = patch_transactional(address_of(array), array.size, producer_id, epoch, sequence)
    before, after = parse_header(data, 0), parse_header(array.tobytes(), 0)
    assert status == 0
    assert after.attributes == before.attributes | 16
    assert (after.producer_id, after.producer_epoch) == (producer_id, epoch)
    assert after.base_sequence == sequence
    assert after.crc == crc32c_reference(array.tobytes()[21:])
    assert array.tobytes()[23:43] == data[23:43]
    assert array.tobytes()[57:] == data[57:]


def test_what_is_no_batch_is_not_put_into_a_transaction():
    array = np.frombuffer(bytearray(ONE[:-1]), np.uint8)
    assert patch_transactional(address_of(array), array.size, 1, 0, 0) == BAD_BATCH
    assert array.tobytes() == ONE[:-1]


@relaxed
@given(st.lists(batches(base_offset=2**40), min_size=1, max_size=3))
def test_a_listed_batch_has_base_offset_0_its_codec_and_no_producer(drawn):
    run = b"".join(data for data, _, _ in drawn)
    edges = np.cumsum([0, *(len(data) for data, _, _ in drawn)]).tolist()
    rows = [(1, at, end - at) for at, end in itertools.pairwise(edges)]
    after, status = listed(run, rows)
    assert status == 0
    for _, at, size in rows:
        before, header = parse_header(run, at), parse_header(after, at)
        assert (header.base_offset, header.leader_epoch) == (0, -1)
        assert header.attributes == before.attributes & 7
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (-1, -1, -1)
        assert header.crc == crc32c_reference(after[at + 21 : at + size])
        assert after[at + 23 : at + 43] == run[at + 23 : at + 43]
        assert after[at + 57 : at + size] == run[at + 57 : at + size]


def test_what_is_not_in_the_source_is_not_touched():
    assert listed(ONE, [(0, 0, len(ONE))]) == (ONE, 0)


@pytest.mark.parametrize("patch", [patched, lambda data: listed(data, [(1, 0, len(data))])])
def test_damage_done_before_stays_visible_after(patch):
    damaged = ONE[:-9] + bytes([ONE[-9] ^ 4]) + ONE[-8:]
    after, status = patch(damaged)
    assert (status, after != damaged) == (0, True)
    assert parse_header(after, 0).crc != crc32c_reference(after[21:])


@pytest.mark.parametrize(
    "spoiled",
    [
        ONE[:-1],
        ONE + b"\0",
        ONE[:60],
        b"",
        ONE[:8] + b"\0\0\0\x30" + ONE[12:],
        ONE[:8] + b"\xff\xff\xff\xff" + ONE[12:],
        ONE[:16] + b"\1" + ONE[17:],
    ],
)
def test_what_is_not_one_whole_batch_is_not_touched(spoiled):
    assert patched(spoiled) == (spoiled, BAD_BATCH)
    assert listed(spoiled, [(1, 0, len(spoiled))]) == (spoiled, BAD_BATCH)


@pytest.mark.parametrize(("at", "size"), [(-1, 100), (0, 60), (1, 2**62), (2**63 - 1, 70)])
def test_a_row_that_points_outside_is_refused(at, size):
    assert listed(ONE, [(1, at, size)]) == (ONE, BAD_BATCH)


def test_the_batches_before_a_bad_one_are_done():
    after, status = listed(ONE + b"x" * 70, [(1, 0, len(ONE)), (1, len(ONE), 70)])
    assert status == BAD_BATCH
    assert struct.unpack_from(">q", after) == (0,)
    assert after[len(ONE) :] == b"x" * 70
