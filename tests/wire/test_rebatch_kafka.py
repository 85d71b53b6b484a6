"""Apache Kafka accepts every kind of piece, and readers find the source's records at their offsets.

Method: pieces are sent to a topic as raw Produce requests of a producer that is new to the broker;
padding fills missing offsets. Two independent clients read everything back.
"""

from datetime import timedelta

import pytest

from kit.judges.clients import Row, rows_by_aiokafka, rows_by_librdkafka
from kit.judges.raw_client import (
    RawClient,
    build,
    message_class,
    nested,
    read_response,
    request_frame,
)
from logmirror.model import TimestampType
from logmirror.wire.compression import Codec
from logmirror.wire.padding import padding
from logmirror.wire.rebatch import Rebatcher, stamp
from logmirror.wire.records import Record, decode_reference, encode_reference
from logmirror.wire.scan import BatchScanner

PRODUCE, VERSION = 0, 7
NOW_MS = 1_700_000_000_000
PRODUCER_ID = 0x6C6D_0000_0000_0001
DELETE_HORIZON = 1 << 6
CODECS = list(Codec)


def rows(first, count, size=50, step=1):
    """Records with everything that may get lost, timestamps going back and forth."""
    contents = [b"", None, b"v" * size, bytes(range(256)) * (size // 256 + 1)]
    return [
        Record(
            first + step * i,
            NOW_MS + 40 * i - 1000 * (i % 3),
            TimestampType.CREATE_TIME,
            [b"key", None, b""][i % 3],
            contents[i % 4],
            ((b"h", b"x"), (b"h", None), (b"", b""))[: i % 4],
        )
        for i in range(count)
    ]


def small(codec, count, first=3):
    """Batches of five records side by side."""
    return b"".join(
        encode_reference(rows(at, 5), codec=codec) for at in range(first, first + 5 * count, 5)
    )


def shape(name, codec):
    if name == "as it is":
        return encode_reference(rows(3, 400, 900), codec=codec)
    if name == "from a transaction":
        own = {"producer_id": 9, "producer_epoch": 4, "base_sequence": 77}
        return encode_reference(rows(3, 40, 900), codec=codec, transactional=True, **own)
    if name == "merged":
        return small(codec, 900)
    if name == "with offset gaps":
        return encode_reference(rows(3, 6, 900) + rows(12, 300, 900), last_offset=320, codec=codec)
    if name == "log append time":
        kind = TimestampType.LOG_APPEND_TIME
        return encode_reference(
            rows(3, 300, 900), codec=codec, timestamp_type=kind, max_timestamp_ms=NOW_MS + 5
        )
    assert name == "delete horizon"
    horizon = {"base_timestamp_ms": NOW_MS + 10**10, "attribute_bits": DELETE_HORIZON}
    return encode_reference(rows(3, 300, 900), codec=codec, **horizon)


SHAPES = {
    "as it is": True,
    "from a transaction": True,
    "delete horizon": True,
    "merged": False,
    "with offset gaps": False,
    "log append time": False,
}


class Destination:
    """A topic that is written through one connection, batch by batch, each at the log's end."""

    def __init__(self, broker, topic):
        broker.create_topic(topic)
        self.topic = topic
        self.end = 0
        self._client = RawClient(int(broker.bootstrap.rpartition(":")[2]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._client.__exit__()

    def put(self, offset, data):
        """Write a batch that is to land at `offset`; fill up what is missing before it."""
        if offset > self.end:
            self._append(
                self.end, memoryview(bytearray(padding(offset - self.end, timestamp_ms=1)))
            )
        self._append(offset, data)

    def _append(self, offset, data):
        stamp(data, producer_id=PRODUCER_ID, producer_epoch=0, sequence=offset)
        part = build(
            nested(PRODUCE, VERSION, "request", "PartitionProduceData"),
            index=0,
            records=bytes(data),
        )
        topic = build(
            nested(PRODUCE, VERSION, "request", "TopicProduceData"),
            name=self.topic,
            partition_data=(part,),
        )
        request = build(
            message_class(PRODUCE, VERSION, "request"),
            transactional_id=None,
            acks=-1,
            timeout=timedelta(seconds=20),
            topic_data=(topic,),
        )
        self._client.send_frame(request_frame(PRODUCE, VERSION, request))
        _, response = read_response(PRODUCE, VERSION, self._client.receive_frame())
        (partition,) = response.responses[0].partition_responses
        assert (int(partition.error_code), partition.base_offset) == (0, offset)
        self.end = offset + len(decode_reference(bytes(data)))


def copy(source, destination):
    """All pieces of the source into the topic; how many passed as they were."""
    buffer = bytearray(source)
    listed = BatchScanner().scan(buffer, len(buffer))
    verbatim = []
    for piece in Rebatcher().pieces(buffer, listed, 0, listed.count, first=0, end=2**62):
        destination.put(piece.base_offset, piece.data)
        verbatim.append(piece.verbatim)
    return verbatim


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize("name", SHAPES)
def test_kafka_stores_the_piece_and_readers_see_the_source(kafka_431, topic_name, name, codec):
    source = shape(name, codec)
    with Destination(kafka_431, topic_name) as destination:
        assert set(copy(source, destination)) == {SHAPES[name]}
    expected = {
        one.offset: Row(one.offset, one.timestamp_ms, 0, one.key, one.value, one.headers)
        for one in decode_reference(source)
    }
    for found in (
        list(rows_by_librdkafka(kafka_431.bootstrap, topic_name)),
        rows_by_aiokafka(kafka_431.bootstrap, topic_name),
    ):
        assert [one.offset for one in found] == list(range(max(expected) + 1))
        assert [one for one in found if one.offset in expected] == list(expected.values())
        others = [one for one in found if one.offset not in expected]
        assert all((one.key, one.value, one.headers) == (None, None, ()) for one in others)


def test_merged_pieces_of_full_size_are_within_the_default_limit_of_a_topic(kafka_431, topic_name):
    source = b"".join(encode_reference(rows(at, 20, 2000)) for at in range(0, 2400, 20))
    assert len(source) > 2_000_000
    with Destination(kafka_431, topic_name) as destination:
        assert copy(source, destination) == [False] * 3
    found = [one.value for one in rows_by_librdkafka(kafka_431.bootstrap, topic_name)]
    assert found == [one.value for one in decode_reference(source)]


def test_padding_of_many_records_is_accepted_in_one_request(kafka_431, topic_name):
    with Destination(kafka_431, topic_name) as destination:
        copy(encode_reference(rows(100_000, 3)), destination)
        assert destination.end == 100_003
    found = rows_by_librdkafka(kafka_431.bootstrap, topic_name, start=99_999)
    assert [one.value for one in found] == [None, *(one.value for one in rows(100_000, 3))]
