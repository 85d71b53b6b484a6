"""The hand-encoded Fetch follows Kafka's schema, and reads any response safely.

Method: kafka-python, which is driven by Kafka's schema files, decodes the requests and encodes the
responses, in every version. Responses arrive in every possible number of pieces, and are damaged by
one edit: no length leads outside the frame.
"""

import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.consumer import FetchRequest as JudgeRequest
from kafka.protocol.consumer import FetchResponse as JudgeResponse

from logmirror.errors import CorruptionError
from logmirror.wire.fetch import (
    FETCH_VERSION_BY_ID_MIN,
    FETCH_VERSION_MAX,
    FETCH_VERSION_MIN,
    FetchHead,
    FetchRequest,
    encode_fetch,
    head_bytes_hint,
    parse_fetch_head,
)

VERSIONS = range(FETCH_VERSION_MIN, FETCH_VERSION_MAX + 1)
TOPIC_ID = bytes(range(16))
CORRELATION_ID = 77

versions = st.sampled_from(VERSIONS)
int64s = st.integers(-1, 2**63 - 1)
requests = st.builds(
    FetchRequest,
    topic=st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=249),
    topic_id=st.just(TOPIC_ID),
    partition=st.integers(0, 2**31 - 1),
    leader_epoch=st.integers(-1, 2**31 - 1),
    offset=int64s,
    max_bytes=st.integers(1, 2**31 - 1),
    max_wait_ms=st.integers(0, 2**31 - 1),
    min_bytes=st.integers(0, 2**31 - 1),
    read_committed=st.booleans(),
)
REQUEST = FetchRequest("orders", TOPIC_ID, 3, 7, 1000, 1 << 20, 500, 1, read_committed=True)


@given(requests, versions, st.text(max_size=40))
def test_a_request_reads_back_as_it_was_meant(request, version, client_id):
    frame = encode_fetch(request, version=version, correlation_id=5, client_id=client_id.encode())

    read = JudgeRequest.decode(frame, version=version, header=True, framed=True)

    header = read.header
    assert header.request_api_version == version
    assert (header.request_api_key, header.correlation_id, header.client_id) == (1, 5, client_id)
    assert (read.max_wait_ms, read.min_bytes) == (request.max_wait_ms, request.min_bytes)
    assert read.max_bytes == request.max_bytes
    assert read.isolation_level == int(request.read_committed)
    if version < 15:
        assert read.replica_id == -1
    if version >= 7:
        assert (read.session_id, read.session_epoch) == (0, -1)
        assert read.forgotten_topics_data == []
    (topic,) = read.topics
    if version >= FETCH_VERSION_BY_ID_MIN:
        assert topic.topic_id.bytes == TOPIC_ID
    else:
        assert topic.topic == request.topic
    (partition,) = topic.partitions
    assert (partition.partition, partition.fetch_offset) == (request.partition, request.offset)
    assert partition.partition_max_bytes == request.max_bytes
    if version >= 9:
        assert partition.current_leader_epoch == request.leader_epoch
    # Read to its last byte, nothing behind it.
    assert len(read.encode(header=True, framed=True)) == len(frame)


def test_a_fetch_by_id_needs_one():
    nameless = REQUEST._replace(topic_id=None)
    with pytest.raises(ValueError, match="topic id"):
        encode_fetch(nameless, version=13, correlation_id=1, client_id=b"")


def encoded(  # noqa: PLR0913  # the fields of a response, each with a default
    version,
    *,
    request=REQUEST,
    records=b"",
    aborted=None,
    error=0,
    top_error=0,
    bounds=(50, 40, 10),
    throttle_ms=0,
    topics=1,
    **tagged,
):
    """A frame as a broker would send it; `tagged` are fields of the partition."""
    made = JudgeResponse.FetchableTopicResponse
    partition = made.PartitionData(
        version=version,
        partition_index=request.partition,
        error_code=error,
        high_watermark=bounds[0],
        last_stable_offset=bounds[1],
        log_start_offset=bounds[2],
        aborted_transactions=aborted
        and [
            made.PartitionData.AbortedTransaction(producer_id=p, first_offset=f) for p, f in aborted
        ],
        preferred_read_replica=-1,
        records=records,
        **tagged,
    )
    topic = made(
        version=version,
        topic=request.topic,
        topic_id=uuid.UUID(bytes=TOPIC_ID),
        partitions=[partition],
    )
    response = JudgeResponse(
        version=version,
        throttle_time_ms=throttle_ms,
        error_code=top_error,
        session_id=0,
        responses=[topic] * topics,
    )
    response.with_header(correlation_id=CORRELATION_ID)
    return response.encode(header=True, framed=True)


def parse(frame, version, *, request=REQUEST, filled=None):
    return parse_fetch_head(
        request,
        version=version,
        correlation_id=CORRELATION_ID,
        buffer=memoryview(frame),
        filled=len(frame) if filled is None else filled,
    )


@given(
    version=versions,
    request=requests,
    records=st.binary(max_size=300),
    aborted=st.none() | st.lists(st.tuples(int64s, int64s), max_size=20),
    error=st.sampled_from([0, 1, 6, 100]),
    bounds=st.tuples(int64s, int64s, int64s),
    throttle_ms=st.integers(0, 2**31 - 1),
)
def test_a_response_is_read_whatever_the_pieces_it_arrives_in(version, request, **parts):
    frame = encoded(version, request=request, **parts)

    filled, rounds = 4, 0
    while isinstance(head := parse(frame, version, request=request, filled=filled), int):
        assert filled < head <= len(frame), "asks for more, and never beyond the frame"
        filled, rounds = head, rounds + 1

    records = parts["records"]
    assert head == FetchHead(
        error_code=parts["error"],
        high_watermark=parts["bounds"][0],
        last_stable_offset=parts["bounds"][1],
        log_start_offset=parts["bounds"][2] if version >= 5 else -1,
        aborted=tuple(parts["aborted"] or ()),
        record_bytes=len(records),
        head_bytes=head.head_bytes,
        throttle_ms=parts["throttle_ms"],
    )
    assert frame[head.head_bytes : head.head_bytes + len(records)] == records
    assert filled <= head.head_bytes or not records, "no byte of the records was asked for"
    for arrived in range(filled, len(frame) + 1):
        assert parse(frame, version, request=request, filled=arrived) == head


@given(version=versions, size=st.integers(0, 4000))
def test_the_hint_covers_a_plain_head_and_at_most_4_bytes_of_records(version, size):
    frame = encoded(version, records=bytes(size))
    head = parse(frame, version)
    assert head.head_bytes <= head_bytes_hint(REQUEST, version) <= head.head_bytes + 4


@pytest.mark.parametrize("version", VERSIONS)
def test_an_error_without_any_topic_is_an_error_and_not_a_contradiction(version):
    frame = encoded(version, top_error=42, topics=0)
    if version < 7:  # there was no such error yet
        with pytest.raises(CorruptionError):
            parse(frame, version)
        return
    head = parse(frame, version)
    assert (head.error_code, head.record_bytes) == (42, 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_two_topics_are_not_our_response(version):
    with pytest.raises(CorruptionError) as caught:
        parse(encoded(version, topics=2), version)
    assert caught.value.facts == {"topic_count": 2}


@pytest.mark.parametrize("version", VERSIONS)
def test_another_partition_is_not_our_response(version):
    frame = encoded(version, request=REQUEST._replace(partition=4))
    with pytest.raises(CorruptionError) as caught:
        parse(frame, version)
    assert caught.value.facts["found"] == 4


@pytest.mark.parametrize("version", VERSIONS)
def test_another_topic_is_not_our_response(version):
    other = REQUEST._replace(topic="orderz", topic_id=bytes(16))
    with pytest.raises(CorruptionError, match="another topic"):
        parse(encoded(version), version, request=other)


@pytest.mark.parametrize("version", VERSIONS)
def test_another_correlation_id_is_not_our_response(version):
    frame = bytearray(encoded(version))
    struct.pack_into(">i", frame, 4, 78)
    with pytest.raises(CorruptionError) as caught:
        parse(frame, version)
    assert caught.value.facts == {"expected": 77, "found": 78}


def test_records_that_do_not_fill_their_frame_are_refused():
    frame = bytearray(encoded(11, records=b"abc"))
    struct.pack_into(">i", frame, len(frame) - 7, 2)
    with pytest.raises(CorruptionError) as caught:
        parse(frame, 11)
    assert caught.value.facts == {"record_bytes": 2, "left_bytes": 3}


def test_a_count_of_aborted_transactions_beyond_the_frame_is_refused_before_reading():
    frame = bytearray(encoded(11, aborted=[(1, 2)]))
    at = frame.index(struct.pack(">iqq", 1, 1, 2))
    struct.pack_into(">i", frame, at, 2**31 - 1)
    with pytest.raises(CorruptionError, match="exceed its frame"):
        parse(frame, 11)


def test_unknown_tagged_fields_are_ignored():
    leader = JudgeResponse.FetchableTopicResponse.PartitionData.LeaderIdAndEpoch
    frame = encoded(16, records=b"abc", error=6, current_leader=leader(leader_id=9, leader_epoch=8))
    head = parse(frame, 16)
    assert head.error_code == 6
    rest = frame[head.head_bytes + head.record_bytes :]
    assert len(rest) > 3, "the tagged leader lies behind the records"


@given(version=versions, data=st.data())
def test_a_damaged_response_is_refused_or_stays_inside_its_frame(version, data):
    frame = bytearray(encoded(version, records=b"r" * 50, aborted=[(4, 5), (6, 7)]))
    at = data.draw(st.integers(4, len(frame) - 1))
    edit = data.draw(st.sampled_from(["change", "cut"]))
    if edit == "change":
        frame[at] = data.draw(st.integers(0, 255))
    else:
        del frame[at:]
        struct.pack_into(">i", frame, 0, len(frame) - 4)
    try:
        head = parse(frame, version)
    except CorruptionError:
        return
    assert isinstance(head, FetchHead), "everything has arrived: nothing more can be asked for"
    assert head.record_bytes >= 0
    assert head.error_code or head.head_bytes + head.record_bytes <= len(frame)


def test_tagged_fields_of_an_aborted_transaction_are_passed_over():
    frame = bytearray(encoded(16, records=b"abc", aborted=[(1, 2), (3, 4)]))
    at = frame.index(struct.pack(">qqb", 1, 2, 0)) + 16
    frame[at : at + 1] = b"\x01\x07\x02hi"  # one field: tag 7, two bytes
    struct.pack_into(">i", frame, 0, len(frame) - 4)
    head = parse(frame, 16)
    assert head.aborted == ((1, 2), (3, 4))
    assert frame[head.head_bytes : head.head_bytes + 3] == b"abc"
