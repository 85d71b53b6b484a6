"""Goal: with `flush-on-ack: false`, a real broker responds at once, and flushes by its rule.

Method: independent clients write and read, and each record has a value of its own. What is durable
is read from the broker's file of durable ends, or from its objects in the bucket, by parsers of
their own.
`tests/broker/log/test_flush_rule.py` drops unflushed writes.
"""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.commits import end_in_bucket
from kit.judges.partition_client import LATEST, Appended, PartitionClient
from kit.judges.transaction_client import TransactionClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

HOUR_MS = 3_600_000
NEVER = str(2**63 - 1)
LIMIT = 100_000
STOP_S = 15
"""Less than what a stop waits for a bucket that is away."""


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(
        tmp_path / "broker",
        bucket=log_bucket,
        flush_on_ack=False,
        flush_ms=HOUR_MS,
        max_unflushed_bytes=LIMIT,
    )
    with broker:
        yield broker


def _durable(broker: EmbeddedBroker) -> int:
    """Return the greatest end of a partition that is durable; 0 without one."""
    if broker.bucket is not None:
        return end_in_bucket(broker.bucket.files)
    data = (broker.log_dir / ".logmirror" / "durable-ends").read_bytes()
    copies = [data[at : at + 64] for at in range(192, len(data), 64)]
    return max((struct.unpack_from(">q", copy, 28)[0] for copy in copies), default=0)


def _await_durable(broker: EmbeddedBroker, end: int) -> None:
    deadline = time.monotonic() + 20
    while _durable(broker) != end:
        assert time.monotonic() < deadline, _durable(broker)
        time.sleep(0.01)


def _value(number: int) -> bytes:
    return b"value %d " % number + b"." * (number * 37 % 50)


def _append(partition: PartitionClient, numbers: range) -> None:
    """Append batches of one record, whose value is that of its offset."""
    for number in numbers:
        record = Record(0, 1_700_000_000_000, 0, None, _value(number), ())
        assert partition.produce(encode_reference([record])) == Appended(0, number)


def _expected(offsets: range) -> list[tuple[int, bytes]]:
    return [(offset, _value(offset)) for offset in offsets]


def _fill(broker: EmbeddedBroker, topic: str, count: int = 5, **configs: str) -> None:
    create_topic(broker.bootstrap, topic, 1, configs)
    with PartitionClient(broker.bootstrap, topic) as partition:
        _append(partition, range(count))


def _read(broker: EmbeddedBroker, topic: str, start: int = 0) -> list[tuple[int, bytes | None]]:
    rows = rows_by_librdkafka(broker.bootstrap, topic, start=start)
    return [(row.offset, row.value) for row in rows]


@pytest.mark.statement("N5", "C17")
def test_b01_acknowledged_records_are_readable_while_none_is_durable(broker, topic_name):
    _fill(broker, topic_name)

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        found = partition.fetch(0)
        assert (found.error_code, found.high_watermark, found.last_stable_offset) == (0, 5, 5)
        assert partition.list_offset(LATEST)[2] == 5
        assert partition.end_of_epoch()[2] == 5
    assert _read(broker, topic_name) == _expected(range(5))
    assert _durable(broker) == 0


@pytest.mark.parametrize("default", [True, False])
def test_b04_flushed_before_the_response_by_default_and_by_the_topics_setting(
    tmp_path, log_bucket, topic_name, default
):
    configs = {} if default else {"flush.messages": "1"}
    with EmbeddedBroker(
        tmp_path / "broker", bucket=log_bucket, flush_on_ack=default, flush_ms=HOUR_MS
    ) as broker:
        _fill(broker, topic_name, **configs)
        assert _durable(broker) == 5


@pytest.mark.in_bucket
def test_a_topic_may_be_flushed_in_the_background_on_a_broker_that_flushes_on_ack(
    tmp_path, log_bucket, topic_name
):
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket) as broker:
        _fill(broker, topic_name, **{"flush.messages": NEVER, "flush.ms": str(HOUR_MS)})
        assert _durable(broker) == 0


@pytest.mark.statement("N4")
def test_b06_a_fetch_that_waits_gets_the_record_at_once(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})

    def write() -> None:
        time.sleep(0.3)
        with PartitionClient(broker.bootstrap, topic_name) as other:
            _append(other, range(1))

    writer = threading.Thread(target=write)
    writer.start()
    began = time.monotonic()
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        found = partition.fetch(0, max_wait_ms=30_000)
    writer.join()

    assert found.high_watermark == 1
    [record] = decode_reference(found.records)
    assert (record.offset, record.value) == (0, _value(0))
    assert time.monotonic() - began < 15
    assert _durable(broker) == 0


@pytest.mark.statement("N3")
def test_n03_records_with_acks_0_are_readable(broker, topic_name):
    acks_0 = {"acks": 0, "enable.idempotence": False}
    create_topic(broker.bootstrap, topic_name, 1, {})
    produce(
        broker.bootstrap, topic_name, [Message(value=b"%d" % n) for n in range(3)], config=acks_0
    )

    deadline = time.monotonic() + 20
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        while partition.fetch(0).high_watermark < 3:
            assert time.monotonic() < deadline
    assert _read(broker, topic_name) == [(n, b"%d" % n) for n in range(3)]


def test_s12_readers_beside_a_writer_get_whole_records_up_to_the_watermark(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    done = threading.Event()
    failures: list[str] = []

    def read() -> None:
        with PartitionClient(broker.bootstrap, topic_name) as partition:
            watermark = 0
            while not done.is_set():
                found = partition.fetch(0)
                if found.error_code or found.high_watermark < watermark:
                    failures.append(f"{found.error_code} {found.high_watermark} < {watermark}")
                watermark = found.high_watermark
                records = decode_reference(found.records or b"")
                values = [(record.offset, record.value) for record in records]
                if values != _expected(range(watermark)):
                    failures.append(f"{watermark}: {records}")

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        for number in range(20):
            _append(partition, range(number, number + 1))
            time.sleep(0.005)
    done.set()
    for reader in readers:
        reader.join()

    assert failures == []


@pytest.mark.statement("B5", "C7")
def test_kill_9_loses_no_records_and_a_machine_that_burns_down_those_that_are_not_flushed(
    broker, topic_name
):
    _fill(broker, topic_name)
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.delete_records(1) == (0, 1)  # flushes all
        _append(partition, range(5, 7))
        assert partition.fetch(1).high_watermark == 7
    broker.kill()
    assert _durable(broker) == 5
    broker.start()

    left = 7 if broker.bucket is None else 5
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.fetch(1).high_watermark == left
        assert partition.list_offset(LATEST)[2] == partition.log_end == left
        _append(partition, range(left, left + 1))
    assert _read(broker, topic_name, start=1) == _expected(range(1, left + 1))


@pytest.mark.statement("T7", "C7")
def test_sigterm_flushes(broker, topic_name):
    _fill(broker, topic_name)

    began = time.monotonic()
    assert broker.stop() == 0
    assert time.monotonic() - began < STOP_S

    assert _durable(broker) == 5
    broker.start()
    assert _read(broker, topic_name) == _expected(range(5))


@pytest.mark.in_bucket
def test_a_change_of_the_setting_applies_to_what_is_not_flushed(broker, topic_name):
    _fill(broker, topic_name)
    resource = ConfigResource(
        ConfigResource.Type.TOPIC,
        topic_name,
        incremental_configs=[
            ConfigEntry("flush.ms", "50", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(20)

    _await_durable(broker, 5)


@pytest.mark.in_bucket
def test_records_are_durable_before_those_before_them_are_deleted(broker, topic_name):
    """Else a power loss would leave a log that ends before its start."""
    _fill(broker, topic_name)

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.delete_records(3) == (0, 3)

    assert _durable(broker) == 5


@pytest.mark.in_bucket
def test_a_transaction_marker_is_durable_before_its_response(broker, topic_name):
    """Else a power loss could leave a transaction open that its coordinator has ended."""
    _fill(broker, topic_name)

    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.write_markers((7, 0)) == {7: 0}

    assert _durable(broker) == 6


@pytest.mark.in_bucket
def test_records_of_a_transaction_are_durable_before_their_response(broker, topic_name):
    """Else it could be committed after a crash without those that were acknowledged."""
    create_topic(broker.bootstrap, topic_name, 1, {})
    with TransactionClient(broker.bootstrap, topic_name) as client:
        writer = client.init()
        assert client.add(writer) == client.produce(writer, 0) == 0
        assert _durable(broker) == 3
        assert client.produce_v2(writer, 3) == 0
        assert _durable(broker) == 6


@pytest.mark.in_bucket
def test_unflushed_bytes_are_limited(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    messages = [Message(value=b"x" * 1000)] * 2000
    small = {"batch.num.messages": 10}
    assert len(produce(broker.bootstrap, topic_name, messages, config=small)) == 2000

    assert _durable(broker) >= 2000 - 2 * LIMIT // 1000  # one flush may be running
