"""A raw client of one partition: every request that a mirror sends, to any broker.

It retries and hides nothing, so a test can compare a broker's exact response.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple

from kit.judges.raw_client import RawClient, build, nested
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, encode_reference

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
DELETE_RECORDS: Final = 21
OFFSET_FOR_LEADER_EPOCH: Final = 23
WRITE_TXN_MARKERS: Final = 27
DESCRIBE_PRODUCERS: Final = 61

LATEST: Final = -1
EARLIEST: Final = -2

_MINUTE: Final = timedelta(minutes=1)


class Appended(NamedTuple):
    """The Produce response for one partition."""

    error: int
    base_offset: int


class Producer(NamedTuple):
    """The DescribeProducers response for one producer, without its ID."""

    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    coordinator_epoch: int
    transaction_start: int


def data_batch(  # noqa: PLR0913  # one keyword for each header field
    count: int,
    *,
    producer_id: int = -1,
    epoch: int = 0,
    sequence: int = -1,
    timestamp_ms: int = 1_700_000_000_000,
    codec: Codec = Codec.NONE,
    **fields: Any,
) -> bytes:
    """Return a batch of `count` records from offset 0, as a producer sends it."""
    records = [Record(n, timestamp_ms + n, 0, None, b"record %d" % n, ()) for n in range(count)]
    return encode_reference(
        records,
        codec=codec,
        producer_id=producer_id,
        producer_epoch=epoch if producer_id != -1 else -1,
        base_sequence=sequence,
        **fields,
    )


class PartitionClient(RawClient):
    """A connection to the leader of partition 0 of a topic."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__(int(bootstrap.rpartition(":")[2]))
        self.topic = topic

    def produce(self, batch: bytes, *, acks: int = -1, version: int = 9) -> Appended:
        """Append, and return error and base offset."""
        response = self.produce_response(batch, acks=acks, version=version)
        return Appended(int(response.error_code), response.base_offset)

    def produce_response(self, batch: bytes, *, acks: int = -1, version: int = 9) -> Any:
        """Append, and return the whole response for the partition."""
        part = {"index": 0, "records": batch}
        data = _entity(PRODUCE, version, "PartitionProduceData", **part)
        topic = _entity(
            PRODUCE, version, "TopicProduceData", name=self.topic, partition_data=(data,)
        )
        fields = {"transactional_id": None, "acks": acks, "timeout": _MINUTE}
        response = self.ask(PRODUCE, version, topic_data=(topic,), **fields)
        return response.responses[0].partition_responses[0]

    def fetch(
        self,
        offset: int,
        version: int = 12,
        *,
        max_wait_ms: int = 0,
        max_bytes: int = 50_000_000,
    ) -> Any:
        """Return the response for the partition, from `offset`; with a wait, for a first byte.

        `max_bytes` is the limit for the partition; that for the response stays.
        """
        wanted = {
            "partition": 0,
            "current_leader_epoch": -1,
            "fetch_offset": offset,
            "last_fetched_epoch": -1,
            "log_start_offset": -1,
            "partition_max_bytes": max_bytes,
        }
        partition = _entity(FETCH, version, "FetchPartition", **wanted)
        topic = _entity(FETCH, version, "FetchTopic", topic=self.topic, partitions=(partition,))
        return (
            self.ask(
                FETCH,
                version,
                replica_id=-1,
                max_wait=timedelta(milliseconds=max_wait_ms),
                min_bytes=1 if max_wait_ms else 0,
                max_bytes=50_000_000,
                isolation_level=1,
                session_id=0,
                session_epoch=-1,
                topics=(topic,),
                forgotten_topics_data=(),
                rack_id="",
            )
            .responses[0]
            .partitions[0]
        )

    def list_offset(self, timestamp_ms: int, *, isolation: int = 0) -> tuple[int, int, int]:
        """Return error, timestamp and offset of ListOffsets."""
        wanted = {"partition_index": 0, "current_leader_epoch": -1, "timestamp": timestamp_ms}
        partition = _entity(LIST_OFFSETS, 7, "ListOffsetsPartition", **wanted)
        topic = _entity(
            LIST_OFFSETS, 7, "ListOffsetsTopic", name=self.topic, partitions=(partition,)
        )
        asked = {"replica_id": -1, "isolation_level": isolation, "topics": (topic,)}
        found = self.ask(LIST_OFFSETS, 7, **asked).topics[0].partitions[0]
        return int(found.error_code), found.timestamp, found.offset

    def end_of_epoch(
        self, epoch: int = 0, current_epoch: int = -1, version: int = 4
    ) -> tuple[int, int, int]:
        """Return error, epoch and end offset of OffsetForLeaderEpoch."""
        wanted = {"partition": 0, "current_leader_epoch": current_epoch, "leader_epoch": epoch}
        partition = _entity(OFFSET_FOR_LEADER_EPOCH, version, "OffsetForLeaderPartition", **wanted)
        topic = _entity(
            OFFSET_FOR_LEADER_EPOCH,
            version,
            "OffsetForLeaderTopic",
            topic=self.topic,
            partitions=(partition,),
        )
        response = self.ask(OFFSET_FOR_LEADER_EPOCH, version, replica_id=-1, topics=(topic,))
        found = response.topics[0].partitions[0]
        return int(found.error_code), found.leader_epoch, found.end_offset

    @property
    def log_end(self) -> int:
        """The offset of the next batch."""
        error, _, end = self.end_of_epoch()
        assert error == 0
        return end

    def producers(self) -> dict[int, Producer]:
        """Return the response of DescribeProducers, by producer ID."""
        topic = _entity(
            DESCRIBE_PRODUCERS, 0, "TopicRequest", name=self.topic, partition_indexes=(0,)
        )
        [partition] = self.ask(DESCRIBE_PRODUCERS, 0, topics=(topic,)).topics[0].partitions
        assert partition.error_code == 0
        return {
            found.producer_id: Producer(
                found.producer_epoch,
                found.last_sequence,
                found.last_timestamp,
                found.coordinator_epoch,
                found.current_txn_start_offset,
            )
            for found in partition.active_producers
        }

    def delete_records(
        self, offset: int, version: int = 2, *, timeout_ms: int = 60_000
    ) -> tuple[int, int]:
        """Delete the records below `offset`; returns error and low watermark."""
        partition = _entity(
            DELETE_RECORDS, version, "DeleteRecordsPartition", partition_index=0, offset=offset
        )
        topic = _entity(
            DELETE_RECORDS, version, "DeleteRecordsTopic", name=self.topic, partitions=(partition,)
        )
        timeout = timedelta(milliseconds=timeout_ms)
        response = self.ask(DELETE_RECORDS, version, topics=(topic,), timeout=timeout)
        found = response.topics[0].partitions[0]
        return int(found.error_code), found.low_watermark

    def write_markers(
        self, *markers: tuple[int, int], commit: bool = True, coordinator_epoch: int = 0
    ) -> dict[int, int]:
        """Append a marker for each producer id and epoch; returns the error by producer id."""
        asked = tuple(
            _entity(
                WRITE_TXN_MARKERS,
                1,
                "WritableTxnMarker",
                producer_id=producer_id,
                producer_epoch=epoch,
                transaction_result=commit,
                topics=(
                    _entity(
                        WRITE_TXN_MARKERS,
                        1,
                        "WritableTxnMarkerTopic",
                        name=self.topic,
                        partition_indexes=(0,),
                    ),
                ),
                coordinator_epoch=coordinator_epoch,
            )
            for producer_id, epoch in markers
        )
        response = self.ask(WRITE_TXN_MARKERS, 1, markers=asked)
        found = [
            (marker.producer_id, int(marker.topics[0].partitions[0].error_code))
            for marker in response.markers
        ]
        assert len(dict(found)) == len(found), "a producer id with two results"
        return dict(found)


def _entity(api_key: int, version: int, entity: str, /, **fields: object) -> Any:
    return build(nested(api_key, version, "request", entity), **fields)
