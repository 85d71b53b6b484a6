"""Goal: stock clients write and read as with Kafka.

Method: each client writes with each of its codecs; three independent readers then read the same
records at the same offsets. The codec is checked in the log, because a client may silently not
compress.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import aiokafka
import kafka
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kit.judges.clients import (
    Message,
    kcat,
    odd_messages,
    produce,
    rows_by_aiokafka,
    rows_by_kcat,
    rows_by_librdkafka,
)
from logmirror.wire.batch_header import parse_header
from logmirror.wire.compression import Codec

if TYPE_CHECKING:
    from kit.servers.embedded import EmbeddedBroker

pytestmark = pytest.mark.in_bucket

CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def _codecs_in_log(broker: EmbeddedBroker, topic: str) -> set[int]:
    found = set()
    for path in (broker.log_dir / topic / "0").iterdir():
        data = path.read_bytes() if path.suffix in (".open", ".batches") else b""
        position = 0
        while position < len(data):
            header = parse_header(data, position)
            found.add(header.attributes & 7)
            position += 12 + int.from_bytes(data[position + 8 : position + 12])
    return found


@pytest.mark.parametrize("idempotent", [True, False])
@pytest.mark.parametrize("codec", CODECS)
def test_librdkafka_writes_and_everybody_reads(embedded, topic_name, codec, idempotent):
    # Chance does not compress, and librdkafka sends as it is what does not shrink.
    messages = odd_messages(1400, seed=CODECS[codec]) + [Message(value=b"a" * 500)] * 100
    messages = [message._replace(timestamp_ms=message.timestamp_ms or 1000) for message in messages]
    config = {"compression.type": codec, "enable.idempotence": idempotent, "linger.ms": 5}

    offsets = produce(embedded.bootstrap, topic_name, messages, config=config)

    assert sorted(offsets) == list(range(1500))
    by_librdkafka = list(rows_by_librdkafka(embedded.bootstrap, topic_name))
    assert [(row.key, row.value, row.headers, row.timestamp_ms) for row in by_librdkafka] == [
        tuple(message) for message in messages
    ]
    assert rows_by_aiokafka(embedded.bootstrap, topic_name) == by_librdkafka
    by_kcat = rows_by_kcat(embedded.bootstrap, topic_name)
    assert by_kcat == [row._replace(headers=()) for row in by_librdkafka]
    assert CODECS[codec] in _codecs_in_log(embedded, topic_name)


@pytest.mark.parametrize("codec", [None, "gzip", "lz4", "zstd"])  # its snappy needs a compiler
def test_kafka_python_writes_and_reads(embedded, topic_name, codec):
    producer = kafka.KafkaProducer(
        bootstrap_servers=embedded.bootstrap, compression_type=codec, acks="all"
    )
    sent = [producer.send(topic_name, value=b"v%d" % n, key=b"k") for n in range(500)]
    producer.flush()
    assert [future.get(10).offset for future in sent] == list(range(500))
    producer.close()

    consumer = kafka.KafkaConsumer(
        bootstrap_servers=embedded.bootstrap, enable_auto_commit=False, consumer_timeout_ms=10_000
    )
    partition = kafka.TopicPartition(topic_name, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    found = [record.value for _, record in zip(range(500), consumer, strict=False)]
    assert consumer.end_offsets([partition]) == {partition: 500}
    consumer.close()

    assert found == [b"v%d" % n for n in range(500)]
    assert CODECS[codec or "none"] in _codecs_in_log(embedded, topic_name)


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
def test_aiokafka_writes_and_reads(embedded, topic_name, codec):
    async def write() -> None:
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=embedded.bootstrap, compression_type=codec, enable_idempotence=True
        )
        await producer.start()
        sent = [await producer.send(topic_name, b"v%d" % n) for n in range(500)]
        await producer.flush()
        assert [(await future).offset for future in sent] == list(range(500))
        await producer.stop()

    asyncio.run(write())

    rows = rows_by_aiokafka(embedded.bootstrap, topic_name)
    assert [row.value for row in rows] == [b"v%d" % n for n in range(500)]
    assert CODECS[codec or "none"] in _codecs_in_log(embedded, topic_name)


@pytest.mark.in_bucket(tier="test")
def test_kcat_lists_writes_and_reads(embedded, topic_name):
    lines = b"".join(b"line %d\n" % n for n in range(100))

    kcat("-P", "-b", embedded.bootstrap, "-t", topic_name, "-z", "lz4", stdin=lines)

    assert kcat("-C", "-q", "-e", "-b", embedded.bootstrap, "-t", topic_name) == lines
    listing = kcat("-L", "-b", embedded.bootstrap).decode()
    assert f'topic "{topic_name}" with 1 partitions' in listing


@pytest.mark.in_bucket(tier="test")
@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_every_kind_of_acknowledgement(embedded, topic_name, acks):
    produce(embedded.bootstrap, topic_name, [Message(value=b"first")])

    config = {"acks": acks, "enable.idempotence": False}
    produce(embedded.bootstrap, topic_name, [Message(value=b"x")] * 50, config=config)

    consumer = _consumer(embedded)
    consumer.assign([TopicPartition(topic_name, 0, 0)])
    found = []
    while len(found) < 51:
        message = consumer.poll(20)
        assert message is not None
        assert message.error() is None
        found.append(message.offset())
    consumer.close()
    assert found == list(range(51))


def test_messages_of_a_megabyte_pass_and_larger_ones_are_refused(embedded, topic_name):
    produce(embedded.bootstrap, topic_name, [Message(value=b"x" * 999_000)] * 3)

    with pytest.raises(RuntimeError, match="MSG_SIZE_TOO_LARGE"):
        produce(
            embedded.bootstrap,
            topic_name,
            [Message(value=os.urandom(2_000_000))],
            config={"message.max.bytes": 3_000_000},
        )

    assert len(list(rows_by_librdkafka(embedded.bootstrap, topic_name))) == 3


def _consumer(broker: EmbeddedBroker, **config: object) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **config,
        }
    )


def test_a_consumer_at_the_end_gets_the_next_record_when_it_is_written(embedded, topic_name):
    produce(embedded.bootstrap, topic_name, [Message(value=b"old")])
    consumer = _consumer(embedded, **{"fetch.wait.max.ms": 20_000})
    consumer.assign([TopicPartition(topic_name, 0, 1)])
    assert consumer.poll(0.5) is None

    produce(embedded.bootstrap, topic_name, [Message(value=b"new")])

    message = consumer.poll(10)
    assert message is not None
    assert (message.offset(), message.value()) == (1, b"new")
    consumer.close()


def test_an_offset_beyond_the_end_is_out_of_range(embedded, topic_name):
    produce(embedded.bootstrap, topic_name, [Message(value=b"x")])
    consumer = _consumer(embedded)
    consumer.assign([TopicPartition(topic_name, 0, 100)])

    message = consumer.poll(20)

    assert message is not None
    code = message.error().code()
    assert code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)  # noqa: SLF001  # the library gives its codes no public name
    consumer.close()


@pytest.mark.in_bucket(tier="test")
@pytest.mark.statement("C12")
def test_offsets_by_time_are_those_of_the_first_record_not_older(embedded, topic_name):
    times = [1_700_000_000_000 + n * 1000 for n in range(2000)]
    messages = [Message(value=os.urandom(500), timestamp_ms=time_ms) for time_ms in times]
    produce(embedded.bootstrap, topic_name, messages, config={"compression.type": "lz4"})
    consumer = _consumer(embedded)

    def ask(time_ms: int) -> int:
        [found] = consumer.offsets_for_times([TopicPartition(topic_name, 0, time_ms)], 20)
        return int(found.offset)

    assert [ask(times[n]) for n in (0, 1, 777, 1999)] == [0, 1, 777, 1999]
    assert [ask(times[n] - 1) for n in (0, 1, 777, 1999)] == [0, 1, 777, 1999]
    assert ask(times[-1] + 1) == -1
    assert consumer.get_watermark_offsets(TopicPartition(topic_name, 0), timeout=10) == (0, 2000)
    consumer.close()


def test_an_admin_client_creates_describes_and_deletes(embedded, topic_name):
    admin = AdminClient({"bootstrap.servers": embedded.bootstrap})
    wanted = NewTopic(topic_name, 5, 1, config={"segment.bytes": "123456"})
    admin.create_topics([wanted])[topic_name].result(20)

    assert len(admin.list_topics(topic_name, timeout=10).topics[topic_name].partitions) == 5
    with pytest.raises(Exception, match="TOPIC_ALREADY_EXISTS"):
        admin.create_topics([wanted])[topic_name].result(20)
    admin.delete_topics([topic_name])[topic_name].result(20)
    assert topic_name not in admin.list_topics(timeout=10).topics
    with pytest.raises(Exception, match="UNKNOWN_TOPIC_OR_PART"):
        admin.delete_topics([topic_name])[topic_name].result(20)


def test_many_partitions_and_producers_at_once(embedded, topic_name):
    admin = AdminClient({"bootstrap.servers": embedded.bootstrap})
    admin.create_topics([NewTopic(topic_name, 8, 1)])[topic_name].result(20)
    producers = [Producer({"bootstrap.servers": embedded.bootstrap}) for _ in range(4)]
    failures: list[object] = []

    for number in range(4000):
        producers[number % 4].produce(
            topic_name,
            value=b"%d" % number,
            partition=number % 8,
            on_delivery=lambda error, _: failures.append(error) if error else None,
        )
    assert [producer.flush(30) for producer in producers] == [0] * 4

    assert failures == []
    values = {
        partition: [
            int(row.value or b"")
            for row in rows_by_librdkafka(embedded.bootstrap, topic_name, partition=partition)
        ]
        for partition in range(8)
    }
    assert values == {partition: list(range(partition, 4000, 8)) for partition in range(8)}


def test_codec_numbers_are_those_of_the_format():
    assert {codec.name.lower(): codec.value for codec in Codec} == CODECS
