"""Goal: a mirror gets the same responses from the embedded broker as from Apache Kafka.

Method: each test uses the raw protocol against the embedded broker and against Apache Kafka 4.3.1,
with the same body; so every statement about Kafka here is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.judges.clients import rows_by_aiokafka, rows_by_kcat, rows_by_librdkafka
from kit.judges.partition_client import (
    EARLIEST,
    LATEST,
    Appended,
    PartitionClient,
    Producer,
    data_batch,
)
from kit.servers.kafka import create_topic
from logmirror.model import TimestampType
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, encode_marker, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

PID = 0x6C6D000000000001
"""An id that no broker gave out."""

FIRST_MS = 1_700_000_000_000
REFUSED = -1

UNKNOWN_SERVER_ERROR = -1
OFFSET_OUT_OF_RANGE = 1
UNKNOWN_TOPIC_OR_PARTITION = 3
INVALID_TIMESTAMP = 32
OUT_OF_ORDER = 45
INVALID_PRODUCER_EPOCH = 47
COORDINATOR_FENCED = 52
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
FENCED_LEADER_EPOCH = 74
UNKNOWN_LEADER_EPOCH = 75
INVALID_RECORD = 87

_PEERS = [
    "embedded",
    pytest.param("apache", marks=[pytest.mark.jvm, pytest.mark.xdist_group("kafka_431")]),
]


@pytest.fixture(params=_PEERS)
def bootstrap(request: pytest.FixtureRequest) -> str:
    """Where a broker is, of each kind in turn."""
    name = "embedded" if request.param == "embedded" else "kafka_431"
    found = request.getfixturevalue(name).bootstrap
    assert isinstance(found, str)
    return found


@pytest.fixture
def partition(bootstrap: str, topic_name: str) -> Iterator[PartitionClient]:
    """A new partition and a connection to its leader."""
    create_topic(bootstrap, topic_name, 1, {})
    with PartitionClient(bootstrap, topic_name) as client:
        yield client


def _batch(first: int, count: int = 10, **fields: Any) -> bytes:
    return data_batch(count, **{"producer_id": PID, "sequence": first, **fields})


# The idempotent-producer check


def test_a_batch_sent_again_has_response_with_its_offset_and_not_stored(partition):
    sent = [(0, 10), (10, 10), (10, 10), (0, 10)]

    found = [partition.produce(_batch(*bounds)) for bounds in sent]

    assert found == [Appended(0, 0), Appended(0, 10), Appended(0, 10), Appended(0, 0)]
    assert partition.log_end == 20


@pytest.mark.parametrize(
    ("first", "count"), [(25, 10), (15, 10), (10, 5), (20, 0x7FFF), (0, 20)], ids=str
)
def test_a_gap_an_overlap_and_other_bounds_are_out_of_order(partition, first, count):
    for sequence in (0, 10):
        partition.produce(_batch(sequence))

    wanted = 0 if first == 20 else OUT_OF_ORDER
    found = partition.produce(_batch(first, count))

    assert found == Appended(wanted, 20 if wanted == 0 else REFUSED)
    assert partition.log_end == (20 + count if wanted == 0 else 20)


def test_a_new_connection_goes_on_where_the_old_one_was(partition, bootstrap):
    partition.produce(_batch(0))

    with PartitionClient(bootstrap, partition.topic) as other:
        assert other.produce(_batch(10)) == Appended(0, 10)
        assert other.produce(_batch(0)) == Appended(0, 0)
    assert partition.produce(_batch(20)) == Appended(0, 20)


def test_exactly_five_batches_are_remembered(partition):
    for first in range(0, 80, 10):
        assert partition.produce(_batch(first)) == Appended(0, first)

    again = [partition.produce(_batch(first)) for first in range(70, -10, -10)]

    assert again[:5] == [Appended(0, first) for first in (70, 60, 50, 40, 30)]
    assert again[5:] == [Appended(OUT_OF_ORDER, REFUSED)] * 3
    assert partition.log_end == 80


def test_sequences_wrap_within_a_batch_and_duplicates_are_detected(partition):
    start = 2**31 - 8
    bounds = [(start, 10), (2, 10), (start, 10), (2, 10), (13, 1)]

    found = [partition.produce(_batch(*bound)) for bound in bounds]

    assert found == [
        *(Appended(0, offset) for offset in (0, 10, 0, 10)),
        Appended(OUT_OF_ORDER, REFUSED),
    ]


@pytest.mark.parametrize("producer_id", [PID, 2**63 - 1, 0])
def test_every_producer_id_from_0_has_the_idempotence_check(partition, producer_id):
    batches = [_batch(first, producer_id=producer_id) for first in (100, 110, 110, 121)]

    found = [partition.produce(batch).error for batch in batches]

    assert found == [0, 0, 0, OUT_OF_ORDER]
    assert partition.log_end == 20
    assert list(partition.producers()) == [producer_id]


def test_a_negative_id_is_no_id(partition):
    found = [partition.produce(_batch(7, producer_id=-2)) for _ in "abc"]

    assert found == [Appended(0, 0), Appended(0, 10), Appended(0, 20)]
    assert partition.producers() == {}


def test_a_first_batch_may_have_any_sequence_and_epoch_and_epochs_fence(partition):
    steps = [
        (5, 100, 0),
        (4, 110, INVALID_PRODUCER_EPOCH),
        (6, 110, OUT_OF_ORDER),
        (5, 110, 0),
        (6, 0, 0),
        (5, 120, INVALID_PRODUCER_EPOCH),
        (6, 10, 0),
    ]

    found = [partition.produce(_batch(first, epoch=epoch)).error for epoch, first, _ in steps]

    assert found == [error for _, _, error in steps]
    assert partition.log_end == 40


def test_the_idempotence_check_is_the_same_with_acks_1(partition):
    found = [partition.produce(_batch(first), acks=1) for first in (0, 10, 10, 25)]

    assert found == [
        *(Appended(0, offset) for offset in (0, 10, 10)),
        Appended(OUT_OF_ORDER, REFUSED),
    ]


def test_the_idempotence_check_is_per_producer(partition):
    partition.produce(_batch(0))

    assert partition.produce(_batch(500, producer_id=77)) == Appended(0, 10)
    assert partition.produce(data_batch(3)) == Appended(0, 20)
    assert partition.produce(_batch(10)) == Appended(0, 23)


def _records(count: int, first: int = 0) -> list[Record]:
    return [Record(first + n, FIRST_MS, 0, None, b"v", ()) for n in range(count)]


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(encode_reference(_records(3, 7)), id="base-offset"),
        pytest.param(encode_reference(_records(3), last_offset=5), id="gap-at-the-end"),
        pytest.param(
            encode_reference([*_records(2), *_records(1, 5)]), id="gap-between-the-records"
        ),
        pytest.param(encode_reference(_records(3), control=True), id="control"),
        pytest.param(encode_reference([], base_offset=0), id="no-records"),
        pytest.param(data_batch(2) + data_batch(2), id="two-batches"),
    ],
)
def test_a_batch_that_would_leave_a_gap_or_hide_is_refused_whole(partition, batch):
    assert partition.produce(batch) == Appended(INVALID_RECORD, REFUSED)
    assert partition.log_end == 0


def test_a_transactional_batch_without_a_transaction_is_refused(partition):
    batch = _batch(0, transactional=True)

    assert partition.produce(batch).error == TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert partition.log_end == 0


def test_the_timestamp_in_a_response_marks_a_duplicate(partition):
    first = partition.produce_response(_batch(0, 3))
    second = partition.produce_response(_batch(0, 3))

    assert (first.base_offset, second.base_offset) == (0, 0)
    times = [getattr(found, "log_append_time", None) for found in (first, second)]
    assert [_in_ms(time) for time in times] == [None, FIRST_MS + 2]


def _in_ms(time: Any) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)


@pytest.mark.parametrize("codec", Codec)
def test_a_batch_is_stored_as_sent_except_for_its_offset(partition, codec):
    batch = _batch(5, 50, codec=codec)
    partition.produce(data_batch(1))
    assert partition.produce(batch) == Appended(0, 1)

    stored = bytes(partition.fetch(1).records)

    assert stored[16:] == batch[16:]
    assert parse_header(stored, 0).base_offset == 1


# The log end


def test_the_end_of_the_epoch_is_where_the_next_batch_lands(partition):
    assert partition.end_of_epoch() == (0, 0, 0)
    for end in (10, 20, 30):
        partition.produce(data_batch(10))
        assert partition.end_of_epoch() == (0, 0, end)
        assert partition.end_of_epoch(current_epoch=0) == (0, 0, end)


@pytest.mark.parametrize("epoch", [1, 5, -1])
def test_an_epoch_that_never_was_has_no_end(partition, epoch):
    partition.produce(data_batch(10))

    assert partition.end_of_epoch(epoch) == (0, -1, -1)


def test_another_leader_epoch_in_a_request_is_an_error(partition):
    assert partition.end_of_epoch(current_epoch=1) == (UNKNOWN_LEADER_EPOCH, -1, -1)
    assert partition.end_of_epoch(current_epoch=-2) == (FENCED_LEADER_EPOCH, -1, -1)


def test_an_unknown_topic_has_no_log_end(partition):
    partition.topic += "x"

    assert partition.end_of_epoch() == (UNKNOWN_TOPIC_OR_PARTITION, -1, -1)


# The producers


def test_producers_are_described_as_their_last_batch_left_them(partition):
    partition.produce(_batch(100, 10, epoch=3))
    partition.produce(_batch(110, 5, epoch=3, timestamp_ms=FIRST_MS + 1000))
    partition.produce(_batch(0, 1, producer_id=7))
    partition.produce(data_batch(1))

    assert partition.producers() == {
        PID: Producer(3, 114, FIRST_MS + 1004, -1, -1),
        7: Producer(0, 0, FIRST_MS, -1, -1),
    }


# Deleted records


def test_records_are_deleted_up_to_an_offset_and_the_log_begins_there(partition):
    for _ in range(3):
        partition.produce(data_batch(10))

    assert partition.delete_records(15) == (0, 15)

    assert partition.list_offset(EARLIEST)[2] == 15
    assert partition.list_offset(LATEST)[2] == 30
    below = partition.fetch(14)
    assert (below.error_code, below.records or b"") == (OFFSET_OUT_OF_RANGE, b"")
    found = partition.fetch(15)
    assert (found.error_code, found.log_start_offset) == (0, 15)
    assert parse_header(bytes(found.records), 0).base_offset == 10
    response = partition.produce_response(data_batch(10))
    assert (response.base_offset, response.log_start_offset) == (30, 15)


def test_minus_one_deletes_all_and_a_smaller_offset_nothing(partition):
    partition.produce(data_batch(10))

    assert partition.delete_records(4) == (0, 4)
    assert partition.delete_records(2) == (0, 4)
    assert partition.delete_records(-1) == (0, 10)
    assert partition.list_offset(EARLIEST)[2] == partition.log_end == 10
    assert partition.produce(data_batch(10)) == Appended(0, 10)


@pytest.mark.parametrize("offset", [11, 2**63 - 1, -2])
def test_records_of_unknown_partitions_cannot_be_deleted(partition, offset):
    partition.produce(data_batch(10))

    assert partition.delete_records(offset) == (OFFSET_OUT_OF_RANGE, -1)
    assert partition.list_offset(EARLIEST)[2] == 0


def test_producer_state_survives_the_deletion_of_records(partition):
    partition.produce(_batch(0))
    partition.delete_records(-1)

    assert partition.produce(_batch(0)) == Appended(0, 0)
    assert partition.produce(_batch(15)) == Appended(OUT_OF_ORDER, REFUSED)
    assert partition.produce(_batch(10)) == Appended(0, 10)


def test_a_time_is_not_looked_up_among_deleted_records(partition):
    for second in (3, 1, 2):
        partition.produce(data_batch(10, timestamp_ms=FIRST_MS + second * 1000))
    partition.delete_records(15)

    assert partition.list_offset(FIRST_MS) == (0, FIRST_MS + 1005, 15)
    assert partition.list_offset(FIRST_MS + 2500) == (0, -1, -1)


# Markers


def test_a_marker_takes_one_offset_and_is_not_returned(partition, bootstrap):
    partition.produce(data_batch(2))
    assert partition.write_markers((99, 0)) == {99: 0}
    partition.produce(data_batch(2))
    assert partition.write_markers((99, 0), commit=False) == {99: 0}

    assert partition.log_end == 6
    for read in (rows_by_librdkafka, rows_by_aiokafka, rows_by_kcat):
        assert [row.offset for row in read(bootstrap, partition.topic)] == [0, 1, 3, 4]
    uncommitted = {"isolation.level": "read_uncommitted"}
    rows = rows_by_librdkafka(bootstrap, partition.topic, config=uncommitted)
    assert [row.offset for row in rows] == [0, 1, 3, 4]


@pytest.mark.parametrize("marker", MarkerType)
def test_a_marker_is_a_control_batch_of_78_bytes(partition, marker):
    partition.write_markers((PID, 3), commit=marker is MarkerType.COMMIT)

    found = partition.fetch(0)

    data = bytes(found.records)
    written_ms = parse_header(data, 0).max_timestamp_ms
    expected = encode_marker(
        marker, offset=0, producer_id=PID, producer_epoch=3, timestamp_ms=written_ms
    )
    assert data == expected
    assert len(data) == 78
    assert (found.high_watermark, found.last_stable_offset) == (1, 1)
    assert not found.aborted_transactions


def test_a_marker_of_another_producer_leaves_the_sequence_alone(partition):
    partition.produce(_batch(0))
    partition.write_markers((99, 0))

    assert partition.produce(_batch(0)) == Appended(0, 0)
    assert partition.produce(_batch(11)) == Appended(OUT_OF_ORDER, REFUSED)
    assert partition.produce(_batch(10)) == Appended(0, 11)
    assert partition.producers()[PID].last_sequence == 19


def test_a_marker_of_the_same_producer_and_epoch_leaves_the_sequence_alone(partition):
    partition.produce(_batch(0))
    assert partition.write_markers((PID, 0)) == {PID: 0}

    assert partition.produce(_batch(0)) == Appended(0, 0)
    assert partition.producers()[PID][:2] == (0, 9)
    assert partition.produce(_batch(10)) == Appended(0, 11)


def test_a_marker_of_a_higher_epoch_ends_the_lower_one(partition):
    partition.produce(_batch(0))
    assert partition.write_markers((PID, 1)) == {PID: 0}

    assert partition.producers()[PID][:2] == (1, -1)
    assert partition.produce(_batch(10)).error == INVALID_PRODUCER_EPOCH
    assert partition.produce(_batch(10, epoch=1)).error == OUT_OF_ORDER
    assert partition.produce(_batch(0, epoch=1)) == Appended(0, 11)
    assert partition.write_markers((PID, 0)) == {PID: INVALID_PRODUCER_EPOCH}
    assert partition.log_end == 21


def test_after_a_marker_alone_a_producer_begins_at_zero(partition):
    partition.write_markers((PID, 0))

    assert partition.producers()[PID][:2] == (0, -1)
    assert partition.produce(_batch(1)).error == OUT_OF_ORDER
    assert partition.produce(_batch(0)) == Appended(0, 1)


def test_a_coordinator_that_was_replaced_writes_no_marker(partition):
    assert partition.write_markers((PID, 0), coordinator_epoch=4) == {PID: 0}
    assert partition.producers()[PID].coordinator_epoch == 4

    for epoch in (3, 0, -1):
        fenced = partition.write_markers((PID, 0), coordinator_epoch=epoch)
        assert fenced == {PID: COORDINATOR_FENCED}
    assert partition.write_markers((PID, 0), coordinator_epoch=4) == {PID: 0}
    assert partition.log_end == 2


def test_a_marker_is_written_each_time_it_is_sent_also_within_one_request(partition):
    assert partition.write_markers(*[(99, 0)] * 500) == {99: 0}
    assert partition.log_end == 500
    assert partition.write_markers(*[(pid, 0) for pid in range(50)]) == dict.fromkeys(range(50), 0)
    assert partition.log_end == 550


def test_a_marker_for_an_unknown_topic_is_refused(partition):
    partition.topic += "x"

    assert partition.write_markers((99, 0)) == {99: UNKNOWN_TOPIC_OR_PARTITION}


@pytest.mark.parametrize(("producer_id", "epoch"), [(-1, 0), (7, -1)])
def test_a_marker_without_a_producer_is_refused(partition, producer_id, epoch):
    assert partition.write_markers((producer_id, epoch)) == {producer_id: UNKNOWN_SERVER_ERROR}
    assert partition.log_end == 0


def test_a_marker_has_a_time_that_can_be_looked_up(partition):
    partition.produce(data_batch(10))
    partition.write_markers((99, 0))
    marked_ms = parse_header(bytes(partition.fetch(10).records), 0).max_timestamp_ms

    assert partition.list_offset(FIRST_MS + 100) == (0, marked_ms, 10)
    assert partition.list_offset(-3) == (0, marked_ms, 10)


# Timestamps


def test_with_log_append_time_the_broker_sets_the_timestamp(bootstrap, topic_name):
    create_topic(bootstrap, topic_name, 1, {"message.timestamp.type": "LogAppendTime"})
    with PartitionClient(bootstrap, topic_name) as partition:
        sent = _batch(0, 3)
        response = partition.produce_response(sent)
        stored = bytes(partition.fetch(0).records)
        header = parse_header(stored, 0)

        assert _in_ms(response.log_append_time) == header.max_timestamp_ms > FIRST_MS
        assert header.attributes == 8
        assert header.base_timestamp_ms == FIRST_MS
        assert stored[27:35] + stored[43:] == sent[27:35] + sent[43:]
        rows = list(rows_by_librdkafka(bootstrap, topic_name))
        assert {(row.timestamp_ms, row.timestamp_type) for row in rows} == {
            (header.max_timestamp_ms, 1)
        }
        assert partition.producers()[PID].last_timestamp_ms == header.max_timestamp_ms
        again = partition.produce_response(sent)
        assert (again.base_offset, again.log_append_time) == (0, response.log_append_time)
        assert partition.produce(_batch(4)) == Appended(OUT_OF_ORDER, REFUSED)
        assert partition.list_offset(FIRST_MS) == (0, header.max_timestamp_ms, 0)
        own = data_batch(1, timestamp_type=TimestampType.LOG_APPEND_TIME)
        assert partition.produce(own) == Appended(INVALID_TIMESTAMP, REFUSED)
