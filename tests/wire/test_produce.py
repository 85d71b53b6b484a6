"""The hand-encoded Produce follows Kafka's schema, and reads any response safely.

Method: kafka-python, which is driven by Kafka's schema files, decodes the requests and encodes the
responses, in every version. Responses are damaged by one edit: the result is a whole response or a
`CorruptionError`.
"""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.producer import ProduceRequest as JudgeRequest
from kafka.protocol.producer import ProduceResponse as JudgeResponse

from logmirror.errors import CorruptionError
from logmirror.model import TopicPartition
from logmirror.wire.produce import (
    ACKS_ALL,
    PRODUCE_VERSION_MAX,
    PRODUCE_VERSION_MIN,
    ProduceRequest,
    ProduceResult,
    encode_produce,
    parse_produce,
)

VERSIONS = range(PRODUCE_VERSION_MIN, PRODUCE_VERSION_MAX + 1)
CORRELATION_ID = 77

versions = st.sampled_from(VERSIONS)
topics = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=249)
partitions = st.builds(TopicPartition, topics, st.integers(0, 2**31 - 1))
requests = st.builds(
    ProduceRequest,
    batches=st.dictionaries(partitions, st.binary(min_size=1, max_size=300), min_size=1).map(
        lambda batches: [(partition, memoryview(data)) for partition, data in batches.items()]
    ),
    acks=st.sampled_from([-1, 1]),
    timeout_ms=st.integers(0, 2**31 - 1),
    transactional_id=st.none() | st.text(max_size=200),
)
results = st.lists(
    st.builds(
        ProduceResult,
        partition=partitions,
        error_code=st.integers(-1, 133),
        base_offset=st.integers(-1, 2**63 - 1),
        log_append_time_ms=st.integers(-1, 2**63 - 1),
        log_start_offset=st.integers(-1, 2**63 - 1),
        message=st.none() | st.text(max_size=200),
    ),
    max_size=6,
    unique_by=lambda result: result.partition,
)


def joined(buffers):
    return b"".join(bytes(buffer) for buffer in buffers)


def packed(request, version, client_id=b"me"):
    return encode_produce(
        request, version=version, correlation_id=CORRELATION_ID, client_id=client_id
    )


@given(requests, versions, st.text(max_size=40))
def test_a_request_reads_back_as_it_was_meant(request, version, client_id):
    frame = joined(packed(request, version, client_id.encode()))

    read = JudgeRequest.decode(frame, version=version, header=True, framed=True)

    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    header = read.header
    assert (header.request_api_key, header.request_api_version) == (0, version)
    assert (header.correlation_id, header.client_id) == (CORRELATION_ID, client_id)
    assert (read.acks, read.timeout_ms) == (request.acks, request.timeout_ms)
    assert read.transactional_id == request.transactional_id
    found = {
        TopicPartition(topic.name, one.index): bytes(one.records)
        for topic in read.topic_data
        for one in topic.partition_data
    }
    assert found == {partition: bytes(view) for partition, view in request.batches}
    assert len({topic.name for topic in read.topic_data}) == len(read.topic_data)
    # Read to its last byte, nothing behind it.
    assert len(read.encode(header=True, framed=True)) == len(frame)


@pytest.mark.parametrize("version", VERSIONS)
def test_batches_are_sent_from_where_they_lie(version):
    data = {n: bytearray(b"%d" % n * 100) for n in range(3)}
    batches = [(TopicPartition("t", n), memoryview(block)) for n, block in data.items()]

    buffers = packed(ProduceRequest(batches), version)

    assert [buffer for buffer in buffers if isinstance(buffer, memoryview)] == [
        view for _, view in batches
    ]
    data[1][:] = b"x" * 100
    assert b"x" * 100 in joined(buffers)


def test_acks_all_is_the_default():
    assert ProduceRequest([]).acks == ACKS_ALL == -1


def responded(explicit, version, *, throttle_ms=0, record_errors=(), tagged=None):
    """A response frame without its size field, as a broker would send it."""
    made = JudgeResponse.TopicProduceResponse
    by_topic = {}
    for one in explicit:
        entry = made.PartitionProduceResponse(
            version=version,
            index=one.partition.partition,
            error_code=one.error_code,
            base_offset=one.base_offset,
            log_append_time_ms=one.log_append_time_ms,
            log_start_offset=one.log_start_offset,
            record_errors=[
                made.PartitionProduceResponse.BatchIndexAndErrorMessage(
                    version=version, batch_index=n, batch_index_error_message=text
                )
                for n, text in enumerate(record_errors)
            ],
            error_message=one.message,
            **(tagged or {}),
        )
        by_topic.setdefault(one.partition.topic, []).append(entry)
    response = JudgeResponse(
        version=version,
        responses=[
            made(version=version, name=name, partition_responses=entries)
            for name, entries in by_topic.items()
        ],
        throttle_time_ms=throttle_ms,
    )
    response.with_header(correlation_id=CORRELATION_ID)
    return bytes(response.encode(header=True, framed=True)[4:])


def parsed(frame, version):
    return parse_produce(memoryview(frame), version=version, correlation_id=CORRELATION_ID)


@given(results, versions, st.integers(0, 2**31 - 1))
def test_a_response_reads_back_as_it_was_meant(explicit, version, throttle_ms):
    read_back = parsed(responded(explicit, version, throttle_ms=throttle_ms), version)

    expected = {
        one._replace(
            log_start_offset=one.log_start_offset if version >= 5 else -1,
            message=(one.message or None) if version >= 8 else None,
        )
        for one in explicit
    }
    assert set(read_back.results) == expected
    assert len(read_back.results) == len(explicit)
    assert read_back.throttle_ms == throttle_ms


ONE = ProduceResult(TopicPartition("t", 3), 87, -1, -1, 5, None)


@pytest.mark.parametrize("version", [8, 9])
def test_record_errors_are_used_when_there_is_no_error_message(version):
    frame = responded([ONE], version, record_errors=[None, "bad magic", "bad key"])
    assert parsed(frame, version).results == [ONE._replace(message="bad magic")]
    whole = ONE._replace(message="no such batch")
    frame = responded([whole], version, record_errors=["bad magic"])
    assert parsed(frame, version).results == [whole]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_to_another_request_is_refused(version):
    frame = responded([ONE], version)
    with pytest.raises(CorruptionError) as caught:
        parse_produce(memoryview(frame), version=version, correlation_id=CORRELATION_ID + 1)
    assert caught.value.facts == {"expected": CORRELATION_ID + 1, "found": CORRELATION_ID}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_that_is_cut_or_too_long_is_refused(version):
    frame = responded([ONE, ONE._replace(partition=TopicPartition("u", 0))], version)
    for size in range(len(frame)):
        with pytest.raises(CorruptionError):
            parsed(frame[:size], version)
    with pytest.raises(CorruptionError):
        parsed(frame + b"\0", version)


@given(results, versions, st.data())
def test_one_edit_never_leads_outside_the_frame(explicit, version, data):
    frame = bytearray(responded(explicit, version))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] = data.draw(st.integers(0, 255))
    try:
        read_back = parsed(bytes(frame), version)
    except CorruptionError:
        return
    assert len(read_back.results) <= len(frame)
