"""Checkpoints and heartbeats have MirrorMaker 2's bytes, and damaged ones are refused.

Method: byte vectors that MirrorMaker's own classes produced, unchanged and damaged; generated
values. Offset syncs are in `cluster/test_offset_syncs.py`.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.errors import CorruptionError, UsageError
from logmirror.model import TopicPartition
from logmirror.wire.mirrormaker import (
    Checkpoint,
    Heartbeat,
    decode_checkpoint,
    decode_heartbeat,
    decode_sync,
    encode_checkpoint,
    encode_heartbeat,
    encode_sync,
    encode_sync_key,
)

CHECKPOINTS = [
    (
        Checkpoint("group-1", "topic-2", 3, 4, 5, "metadata-6"),
        "000767726f75702d310007746f7069632d3200000003",
        "000000000000000000040000000000000005000a6d657461646174612d36",
    ),
    (
        Checkpoint("g", "A.orders", 0, 1000, 1001, ""),
        "0001670008412e6f726465727300000000",
        "000000000000000003e800000000000003e90000",
    ),
]
HEARTBEATS = [
    (Heartbeat("A", "B", 1_700_000_000_000), "000141000142", "00000000018bcfe56800"),
    (
        Heartbeat("source-1", "target-2", 1_234_567_890),
        "0008736f757263652d3100087461726765742d32",
        "000000000000499602d2",
    ),
]
CASES = [
    *((encode_checkpoint, decode_checkpoint, *vector) for vector in CHECKPOINTS),
    *((encode_heartbeat, decode_heartbeat, *vector) for vector in HEARTBEATS),
]
each_record = pytest.mark.parametrize(("encode", "decode", "record", "key", "value"), CASES)

LONGEST = "x" * 32_767
TOO_LONG = LONGEST + "x"


@each_record
def test_mm_52_bytes_are_those_of_mirrormaker(encode, decode, record, key, value):
    assert tuple(part.hex() for part in encode(record)) == (key, value)
    assert decode(bytes.fromhex(key), bytes.fromhex(value)) == record


@each_record
def test_bytes_behind_the_last_field_are_ignored(encode, decode, record, key, value):
    assert decode(bytes.fromhex(key) + b"more", bytes.fromhex(value) + b"\xff") == record


@each_record
def test_any_version_is_read_as_version_0(encode, decode, record, key, value):
    for version in ("0001", "7fff", "ffff"):
        assert decode(bytes.fromhex(key), bytes.fromhex(version + value[4:])) == record


@each_record
def test_a_null_is_refused(encode, decode, record, key, value):
    for pair in [(None, bytes.fromhex(value)), (bytes.fromhex(key), None), (None, None)]:
        with pytest.raises(CorruptionError, match="incomplete"):
            decode(*pair)


@each_record
def test_every_truncation_is_refused(encode, decode, record, key, value):
    whole_key, whole_value = bytes.fromhex(key), bytes.fromhex(value)
    for size in range(len(whole_key)):
        with pytest.raises(CorruptionError, match="truncated"):
            decode(whole_key[:size], whole_value)
    for size in range(len(whole_value)):
        with pytest.raises(CorruptionError, match="truncated"):
            decode(whole_key, whole_value[:size])


@pytest.mark.parametrize(
    ("decode", "key", "value"),
    [
        pytest.param(decode_checkpoint, "ffff0001740000000000", "00" * 20, id="group"),
        pytest.param(decode_checkpoint, "000167ffff0000000000", "00" * 20, id="topic"),
        pytest.param(decode_checkpoint, CHECKPOINTS[1][1], "00" * 18 + "ffff", id="metadata"),
        pytest.param(decode_heartbeat, "8000000142", "00" * 10, id="source"),
        pytest.param(decode_heartbeat, "000141ffff", "00" * 10, id="target"),
    ],
)
def test_a_string_of_negative_length_is_refused(decode, key, value):
    with pytest.raises(CorruptionError, match="negative length"):
        decode(bytes.fromhex(key), bytes.fromhex(value))


@pytest.mark.parametrize(
    ("decode", "key", "value"),
    [
        (decode_checkpoint, b"\0\1\xff\0\1t" + bytes(4), bytes(20)),
        (decode_checkpoint, b"\0\1g\0\1t" + bytes(4), bytes(18) + b"\0\1\xff"),
        (decode_heartbeat, b"\0\1\xff\0\1B", bytes(10)),
    ],
)
def test_a_string_that_is_not_utf8_is_refused(decode, key, value):
    with pytest.raises(CorruptionError, match="not UTF-8"):
        decode(key, value)


@pytest.mark.parametrize(
    "record",
    [
        Checkpoint(LONGEST, LONGEST, 1, 2, 3, LONGEST),
        Checkpoint("Gr\u00fc\u00dfe", "t", 2**31 - 1, 2**63 - 1, -1, "\u03b1\U0001f600"),
    ],
    ids=["longest", "widest"],
)
def test_extreme_values_are_kept(record):
    assert decode_checkpoint(*encode_checkpoint(record)) == record


@pytest.mark.parametrize(
    ("encode", "argument", "field"),
    [
        (encode_checkpoint, Checkpoint(TOO_LONG, "t", 0, 1, 1, ""), "group"),
        (encode_checkpoint, Checkpoint("g", TOO_LONG, 0, 1, 1, ""), "topic"),
        (encode_checkpoint, Checkpoint("g", "t", 0, 1, 1, TOO_LONG), "metadata"),
        (encode_checkpoint, Checkpoint("g", "t", 0, 1, 1, "\u00e9" * 16_384), "metadata"),
        (encode_heartbeat, Heartbeat(TOO_LONG, "B", 1), "source"),
        (encode_heartbeat, Heartbeat("A", TOO_LONG, 1), "target"),
        (encode_sync_key, TopicPartition(TOO_LONG, 0), "topic"),
    ],
)
def test_a_string_above_32767_bytes_is_refused_with_its_field(encode, argument, field):
    with pytest.raises(UsageError, match="too long") as error:
        encode(argument)

    assert error.value.facts == {"field": field, "bytes": 32_768, "most": 32_767}


def test_a_damaged_record_is_named_in_the_error():
    with pytest.raises(CorruptionError) as error:
        decode_sync(encode_sync_key(TopicPartition("t", 0)), encode_sync(1, 2)[:-1])

    assert error.value.facts == {
        "record": "offset sync",
        "found": "truncated",
        "data": "00" * 7 + "01" + "00" * 7,
    }


INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


@given(st.builds(Checkpoint, TEXT, TEXT, st.integers(-(2**31), 2**31 - 1), INT64, INT64, TEXT))
def test_any_checkpoint_is_read_back(checkpoint):
    assert decode_checkpoint(*encode_checkpoint(checkpoint)) == checkpoint


@given(st.builds(Heartbeat, TEXT, TEXT, INT64))
def test_any_heartbeat_is_read_back(heartbeat):
    assert decode_heartbeat(*encode_heartbeat(heartbeat)) == heartbeat


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_any_bytes_are_a_record_or_corrupt(key, value):
    for decode in (decode_checkpoint, decode_heartbeat, decode_sync):
        with contextlib.suppress(CorruptionError):
            decode(key, value)
