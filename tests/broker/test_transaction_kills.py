"""Goal: no transaction is ever half visible, lost after its commit, or left open by a crash.

Method: a stock transactional producer writes to two partitions and commits or aborts, while the
broker is killed at each of its transaction failpoints in turn. A consumer with read_committed reads
through the whole. At the end, two readers find every committed transaction whole, once and in
order, and nothing of the others; the last stable offset is the end of the log. Each transaction
also commits an offset of a group: at the end the group has that of the last one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from kit.judges.clients import rows_by_aiokafka, rows_by_librdkafka
from kit.judges.partition_client import PartitionClient
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.tiers import sized
from logmirror import failpoints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

POINTS = [point for point in failpoints.POINTS if point.startswith("transaction.")]
ROUNDS = sized(1, 2, 8)
PARTITIONS = 2
RECORDS = 5
"""Of a transaction in each partition."""

DEADLINE_S = 60


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    """A broker with small segments, so that transactions span seals."""
    broker = EmbeddedBroker(tmp_path / "broker", bucket=log_bucket, segment_bytes=20_000)
    with broker:
        yield broker


class Writer:
    """Writes transactions, and records the outcome of each. Runs in a thread."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.number = 0
        self.is_over = False
        self.failure: BaseException | None = None
        self._settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "transactional.id": topic,
            # Otherwise librdkafka sends offsets to a broker handle that it has closed, for ever.
            "metadata.recovery.strategy": "none",
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "retry.backoff.ms": 20,
            "log_level": 0,
        }
        self._group = Consumer({"bootstrap.servers": bootstrap, "group.id": topic, "log_level": 0})
        self._thread = threading.Thread(target=self._run)

    def committed_offset(self) -> int:
        """Return the offset that the group has."""
        [found] = self._group.committed([TopicPartition(self.topic, 0)], DEADLINE_S)
        self._group.close()
        return int(found.offset)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current transaction."""
        self.is_over = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the producer hangs"
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            producer = self._new()
            while not self.is_over:
                self.number += 1
                try:
                    self._transaction(producer)
                except KafkaException as error:
                    if error.args[0].fatal():
                        producer = self._new()
                    else:
                        producer.abort_transaction(DEADLINE_S)
                        self.aborted.add(self.number)
        except BaseException as error:  # noqa: BLE001  # reported by `stop`
            self.failure = error

    def _new(self) -> Producer:
        producer = Producer(self._settings)
        producer.init_transactions(DEADLINE_S)
        return producer

    def _transaction(self, producer: Producer) -> None:
        producer.begin_transaction()
        for number in range(RECORDS):
            for partition in range(PARTITIONS):
                value = b"%d-%d-" % (self.number, number) + b"x" * 100
                producer.produce(self.topic, value, partition=partition)
        offsets = [TopicPartition(self.topic, 0, self.number)]
        group = self._group.consumer_group_metadata()
        producer.send_offsets_to_transaction(offsets, group, DEADLINE_S)
        if self.number % 4 == 0:
            producer.flush(DEADLINE_S)
            producer.abort_transaction(DEADLINE_S)
            self.aborted.add(self.number)
        else:
            producer.commit_transaction(DEADLINE_S)
            self.committed.add(self.number)


class Reader:
    """Reads committed records all the time. Runs in a thread."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 100,
            "log_level": 0,
        }
        self._consumer = Consumer(settings)
        self._consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
        self.found: dict[int, list[tuple[int, bytes]]] = {n: [] for n in range(PARTITIONS)}
        self.is_over = False
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self.is_over = True
        self._thread.join(DEADLINE_S)
        self._consumer.close()

    def _run(self) -> None:
        while not self.is_over:
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.found[message.partition()].append((message.offset(), message.value()))
            elif message is not None:
                assert message.error().code() != KafkaError.OFFSET_OUT_OF_RANGE


@pytest.mark.in_bucket
@pytest.mark.thinned
def test_killed_at_every_failpoint_while_transactions_run(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, PARTITIONS, {})
    writer, reader = Writer(broker.bootstrap, topic_name), Reader(broker.bootstrap, topic_name)
    writer.start()
    reader.start()
    for point in POINTS * ROUNDS:
        broker.kill()
        broker.crash_at = f"{point}#7"
        broker.start()
        deadline = time.monotonic() + DEADLINE_S
        while broker.alive:
            assert time.monotonic() < deadline, f"{point} was not reached"
            time.sleep(0.02)
        broker.kill()
        broker.start()
        _wait_for_more(writer)
    writer.stop()
    _wait_for(lambda: _is_caught_up(broker, topic_name, reader))
    reader.stop()

    assert len(writer.committed) > len(POINTS)
    _check(broker.bootstrap, topic_name, writer, reader)


def _wait_for_more(writer: Writer) -> None:
    before = len(writer.committed)
    _wait_for(lambda: len(writer.committed) > before + 1 or writer.failure is not None)


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_caught_up(broker: EmbeddedBroker, topic: str, reader: Reader) -> bool:
    for partition in range(PARTITIONS):
        rows = list(rows_by_librdkafka(broker.bootstrap, topic, partition=partition))
        if [row.offset for row in rows] != [offset for offset, _ in reader.found[partition]]:
            return False
    return True


def _check(bootstrap: str, topic: str, writer: Writer, reader: Reader) -> None:
    seen: list[Counter[int]] = []
    for partition in range(PARTITIONS):
        rows = list(rows_by_librdkafka(bootstrap, topic, partition=partition))
        assert rows == rows_by_aiokafka(bootstrap, topic, partition=partition)
        assert [(row.offset, row.value) for row in rows] == reader.found[partition]
        names = [tuple(map(int, (row.value or b"").split(b"-")[:2])) for row in rows]
        assert names == sorted(set(names)), "duplicate or out of order"
        seen.append(Counter(number for number, _ in names))
    assert seen[0] == seen[1], "a transaction is torn"
    assert set(seen[0].values()) == {RECORDS}, "a transaction is torn"
    assert writer.committed <= set(seen[0]), "a committed transaction is lost"
    assert not writer.aborted & set(seen[0]), "an aborted transaction is visible"
    assert writer.committed_offset() == max(seen[0]), "the group has another offset"
    with PartitionClient(bootstrap, topic) as client:
        fetched = client.fetch(client.log_end)
        assert fetched.last_stable_offset == fetched.high_watermark, "a transaction hangs"
