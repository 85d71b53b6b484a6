"""Goal: no read goes beyond a frame, and every length and count is checked.

Method: requests written by kio, an independent codec, are read whole, truncated at every byte, and
with single bytes changed: the result is the same request or a `RemoteProtocolError`, never another
exception. Frames arrive in pieces of every size.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.judges.raw_client import build, message_class, nested, request_frame
from logmirror.wire.frames import (
    FIRST_BUFFER_BYTES,
    MAX_ENTRIES,
    Cursor,
    FrameBuffer,
    RemoteProtocolError,
    pack_uvarint,
    read_header,
)
from logmirror.wire.serve_fetch import parse_fetch
from logmirror.wire.serve_messages import read_request
from logmirror.wire.serve_produce import parse_produce

PRODUCE, FETCH, METADATA, CREATE_TOPICS = 0, 1, 3, 19


def _produce(version: int) -> Any:
    topic = nested(PRODUCE, version, "request", "TopicProduceData")
    partition = nested(PRODUCE, version, "request", "PartitionProduceData")
    parts = tuple(build(partition, index=n, records=b"records-%d" % n) for n in range(2))
    topics = (build(topic, name="t\u00fc", partition_data=parts),)
    return build(
        message_class(PRODUCE, version, "request"),
        transactional_id=None,
        acks=-1,
        timeout=timedelta(milliseconds=1500),
        topic_data=topics,
    )


def _fetch(version: int) -> Any:
    topic = nested(FETCH, version, "request", "FetchTopic")
    partition = nested(FETCH, version, "request", "FetchPartition")
    part = build(
        partition,
        partition=3,
        current_leader_epoch=5,
        fetch_offset=2**40,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1000,
    )
    topics = (build(topic, topic="t", topic_id=uuid.UUID(int=77), partitions=(part,)),)
    return build(
        message_class(FETCH, version, "request"),
        replica_id=-1,
        max_wait=timedelta(milliseconds=500),
        min_bytes=1,
        max_bytes=50_000,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=(),
        rack_id="rack",
    )


def _create_topics(version: int) -> Any:
    config = nested(CREATE_TOPICS, version, "request", "CreatableTopicConfig")
    topic = build(
        nested(CREATE_TOPICS, version, "request", "CreatableTopic"),
        name="orders",
        num_partitions=3,
        replication_factor=-1,
        assignments=(),
        configs=(build(config, name="segment.bytes", value=None),),
    )
    return build(
        message_class(CREATE_TOPICS, version, "request"),
        topics=(topic,),
        timeout=timedelta(milliseconds=99),
        validate_only=True,
    )


@pytest.mark.parametrize("version", range(3, 12))
def test_produce_is_read_as_kio_wrote_it(version):
    frame = memoryview(request_frame(PRODUCE, version, _produce(version)))

    request = parse_produce(frame, version)

    assert request.transactional_id is None
    assert request.acks == -1
    [(name, partitions)] = request.topics
    assert name == "t\u00fc"
    assert [(p, bytes(records)) for p, records in partitions] == [
        (0, b"records-0"),
        (1, b"records-1"),
    ]


@pytest.mark.parametrize("version", range(4, 18))
def test_fetch_is_read_as_kio_wrote_it(version):
    frame = memoryview(request_frame(FETCH, version, _fetch(version)))

    request = parse_fetch(frame, version)

    assert (request.max_wait_ms, request.min_bytes, request.max_bytes) == (500, 1, 50_000)
    assert (request.session_id, request.session_epoch) == (0, -1)
    [(name, [partition])] = request.topics
    assert name == (uuid.UUID(int=77).bytes if version >= 13 else "t")
    assert partition == (3, 5 if version >= 9 else -1, 2**40, 1000)


FRAMES = {
    "produce-v7": (request_frame(0, 7, _produce(7)), lambda f: parse_produce(f, 7)),
    "produce-v11": (request_frame(0, 11, _produce(11)), lambda f: parse_produce(f, 11)),
    "fetch-v11": (request_frame(1, 11, _fetch(11)), lambda f: parse_fetch(f, 11)),
    "fetch-v16": (request_frame(1, 16, _fetch(16)), lambda f: parse_fetch(f, 16)),
    "create-v4": (request_frame(19, 4, _create_topics(4)), lambda f: read_request(f, 19, 4)),
    "create-v7": (request_frame(19, 7, _create_topics(7)), lambda f: read_request(f, 19, 7)),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_that_is_cut_off_anywhere_is_refused(name):
    frame, parse = FRAMES[name]

    for size in range(8, len(frame)):
        with pytest.raises(RemoteProtocolError):
            parse(memoryview(frame[:size]))


@pytest.mark.parametrize("name", FRAMES)
def test_bytes_behind_the_last_field_are_passed_over(name):
    frame, parse = FRAMES[name]

    assert parse(memoryview(frame + b"\1\2\3")) == parse(memoryview(frame))


@pytest.mark.parametrize("name", FRAMES)
def test_any_changed_byte_gives_a_request_or_a_refusal(name):
    frame, parse = FRAMES[name]

    for position in range(8, len(frame)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, frame[position] ^ 1):
            changed = bytearray(frame)
            changed[position] = value
            with contextlib.suppress(RemoteProtocolError):
                parse(memoryview(changed))


@pytest.mark.parametrize("count", [2**31 - 1, -2, -(2**31), 1_000_000])
def test_an_array_cannot_claim_more_than_its_frame_holds(count):
    frame = struct.pack(">hhih", METADATA, 1, 7, -1) + struct.pack(">i", count)

    with pytest.raises(RemoteProtocolError) as raised:
        read_request(memoryview(frame), METADATA, 1)

    assert raised.value.facts["count"] == count


@pytest.mark.parametrize(
    "varint", [b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\xff\xff\x7f", b"\x80", b""]
)
def test_a_varint_that_is_too_long_too_large_or_cut_off_is_refused(varint):
    with pytest.raises(RemoteProtocolError):
        Cursor(memoryview(varint)).uvarint()


@pytest.mark.parametrize(
    "tags",
    [
        pytest.param(b"\x02\x01\x00\x01\x00", id="twice"),
        pytest.param(b"\x02\x02\x00\x01\x00", id="descending"),
        pytest.param(b"\xff\xff\xff\xff\x0f", id="flood"),
        pytest.param(b"\x01\x01\x05ab", id="cut off"),
    ],
)
def test_tagged_fields_that_make_no_sense_are_refused(tags):
    with pytest.raises(RemoteProtocolError):
        Cursor(memoryview(tags)).tagged_fields()


def test_text_that_is_not_utf8_is_refused():
    with pytest.raises(RemoteProtocolError):
        Cursor(memoryview(b"\x00\x02\xff\xfe")).string(compact=False)


@given(st.integers(0, 2**32 - 1))
def test_a_varint_survives_packing(value):
    assert Cursor(memoryview(pack_uvarint(value))).uvarint() == value


def _feed(buffer: FrameBuffer, data: bytes) -> None:
    while data:
        space = buffer.free_space()
        size = min(len(space), len(data))
        space[:size] = data[:size]
        buffer.received(size)
        data = data[size:]


@given(
    st.lists(st.binary(min_size=8, max_size=60_000), min_size=1, max_size=6),
    st.lists(st.integers(1, 70_000), min_size=1, max_size=20),
)
def test_frames_are_returned_whole_for_any_arrival_of_bytes(frames, cuts):
    stream = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
    buffer = FrameBuffer(lambda _: 10**6)
    found = []

    position = number = 0
    while position < len(stream):
        size = cuts[number % len(cuts)]
        number += 1
        _feed(buffer, stream[position : position + size])
        position += size
        while (frame := buffer.next_frame()) is not None:
            found.append(bytes(frame))

    assert found == frames
    assert buffer.buffered_bytes == 0


def test_a_frame_that_was_put_back_comes_again():
    buffer = FrameBuffer(lambda _: 100)
    _feed(buffer, struct.pack(">i", 9) + b"123456789")
    frame = buffer.next_frame()
    assert frame is not None

    buffer.put_back(frame)

    assert bytes(buffer.next_frame() or b"") == b"123456789"
    assert buffer.next_frame() is None


def test_a_frame_outlives_later_bytes_once_its_buffer_is_detached():
    buffer = FrameBuffer(lambda _: 10**6)
    first, second = b"1" * 100_000, b"2" * 100_000
    stream = b"".join(struct.pack(">i", len(frame)) + frame for frame in (first, second))
    _feed(buffer, stream[:130_000])
    frame = buffer.next_frame()
    assert frame is not None

    assert buffer.detach() >= len(first)
    assert buffer.capacity_bytes < 65_536
    _feed(buffer, stream[130_000:])

    assert bytes(buffer.next_frame() or b"") == second
    assert bytes(frame) == first


def test_the_entries_of_all_arrays_together_have_a_limit():
    arrays = (struct.pack(">i", 30_000) + bytes(30_000)) * 2
    cursor = Cursor(memoryview(arrays))
    cursor.take(cursor.count(compact=False))

    with pytest.raises(RemoteProtocolError, match="more entries"):
        cursor.count(compact=False)


def test_null_arrays_are_no_entries():
    cursor = Cursor(memoryview(struct.pack(">ii", -1, MAX_ENTRIES) + bytes(MAX_ENTRIES)))

    assert cursor.count(compact=False) == -1
    assert cursor.count(compact=False) == MAX_ENTRIES


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 7])
def test_a_size_that_no_request_can_have_is_refused(size):
    buffer = FrameBuffer(lambda _: 1000)
    _feed(buffer, struct.pack(">i", size))

    with pytest.raises(RemoteProtocolError) as raised:
        buffer.next_frame()

    assert raised.value.facts["frame_bytes"] == size


def test_a_size_is_judged_by_the_kind_of_request_before_the_rest_arrives():
    buffer = FrameBuffer({0: 10_000, 3: 100}.__getitem__)
    _feed(buffer, struct.pack(">ihhi", 101, 3, 0, 1))

    with pytest.raises(RemoteProtocolError) as raised:
        buffer.next_frame()

    assert raised.value.facts == {"api_key": 3, "frame_bytes": 101, "max_frame_bytes": 100}


def test_an_announced_size_reserves_no_memory():
    buffer = FrameBuffer(lambda _: 2**31)
    _feed(buffer, struct.pack(">ihhi", 2**31 - 1, 0, 9, 1))

    assert buffer.next_frame() is None
    buffer.free_space()
    assert buffer.capacity_bytes <= 2 * FIRST_BUFFER_BYTES


def test_a_large_request_does_not_keep_its_memory():
    buffer = FrameBuffer(lambda _: 2**31)
    size = 5_000_000
    _feed(buffer, struct.pack(">i", size) + bytes(size))
    assert len(buffer.next_frame() or b"") == size

    buffer.free_space()

    assert buffer.capacity_bytes == FIRST_BUFFER_BYTES


def test_a_frame_shorter_than_a_header_is_refused():
    with pytest.raises(RemoteProtocolError):
        read_header(memoryview(b"1234567"))
