"""Clients in threads of their own beside those of `bucket_load`: a producer of transactions, and a
consumer in a group, whatever happens to the broker meanwhile."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from kit.runs.bucket_load import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Callable

_RECORDS: Final = 3
"""Of a transaction, in each partition."""

_ABORTED: Final = 3
"""One of so many transactions is aborted."""


def _wait(is_true: Callable[[], bool], what: Callable[[], str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


class Transactions:
    """A transactional producer (`acks=all`): some of its transactions are aborted.

    Args:
        bootstrap: `host:port`.
        topic: The topic, with `PARTITIONS` partitions.
    """

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": f"transactions of {topic}",
                "acks": "all",
                "linger.ms": 2,
                "log_level": 0,
            }
        )
        self.committed: dict[tuple[int, int], bytes] = {}
        """The values, by partition and offset."""

        self.aborted: dict[tuple[int, int], bytes] = {}
        self.failures: list[object] = []
        self._topic, self._done = topic, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._producer.init_transactions(60)
            number = 0
            while not self._done.is_set():
                self._one(number)
                number += 1
        except KafkaException as error:
            self.failures.append(error)

    def _one(self, number: int) -> None:
        written: dict[tuple[int, int], bytes] = {}

        def delivered(error: object, message: Any) -> None:
            if error is not None:
                self.failures.append(error)
            else:
                written[message.partition(), message.offset()] = message.value()

        self._producer.begin_transaction()
        for place in range(_RECORDS * PARTITIONS):
            value = b"%d-%d" % (number, place)
            self._producer.produce(
                self._topic, value, partition=place % PARTITIONS, on_delivery=delivered
            )
        self._producer.flush(60)  # also what is aborted is in the log
        if number % _ABORTED == 1:
            self._producer.abort_transaction(60)
            self.aborted |= written
        else:
            self._producer.commit_transaction(60)
            self.committed |= written

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the transaction in progress, and begin no more."""
        self._done.set()
        self._thread.join()

    def wait_for(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many more transactions have been committed, and one was aborted."""
        until = len(self.committed) + count * _RECORDS * PARTITIONS
        _wait(
            lambda: len(self.committed) >= until and len(self.aborted) > 0,
            lambda: f"transactions make no progress: {self.failures}",
            timeout_s,
        )


class Member:
    """A consumer in a group, which subscribes, reads what is committed, and commits offsets.

    Args:
        bootstrap: `host:port`.
        group: The group; it begins at the start of each partition.
        topics: What it reads.
    """

    def __init__(self, bootstrap: str, group: str, *topics: str) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "log_level": 0,
        }
        self._topics = topics
        self.rows: list[tuple[str, int, int, bytes | None]] = []
        """Topic, partition, offset and value, as they came."""

        self.errors: list[object] = []

    def _run(self) -> None:
        consumer = Consumer(self._settings)
        try:
            consumer.subscribe([*self._topics])
            while not self._done.is_set():
                self._take(consumer)
        except KafkaException as error:
            self.errors.append(error)
        finally:
            consumer.close()

    def _take(self, consumer: Consumer) -> None:
        messages = consumer.consume(500, 0.1)
        for message in messages:
            if message.error() is not None:
                self.errors.append(message.error())
                continue
            row = message.topic(), message.partition(), message.offset(), message.value()
            self.rows.append(row)
        if messages:
            consumer.commit(asynchronous=False)

    def __enter__(self) -> Self:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def restart(self) -> None:
        """Leave the group, and join it as another member."""
        self.__exit__()
        self.__enter__()

    def wait_for(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many records were read in all."""
        _wait(
            lambda: len(self.rows) >= count,
            lambda: f"{len(self.rows)} of {count} records read: {self.errors}",
            timeout_s,
        )

    def found(self, topic: str) -> dict[tuple[int, int], bytes | None]:
        """Return what was read of a topic; checks that each record came once, in order."""
        rows = [row[1:] for row in self.rows if row[0] == topic]
        last: dict[int, int] = {}
        for partition, offset, _ in rows:
            assert offset > last.get(partition, -1), (topic, partition, offset)
            last[partition] = offset
        return {(partition, offset): value for partition, offset, value in rows}


def committed(bootstrap: str, group: str, *topics: str) -> dict[tuple[str, int], int]:
    """Return the committed offsets of a group, by topic and partition."""
    asked = [TopicPartition(topic, number) for topic in topics for number in range(PARTITIONS)]
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    try:
        return {(one.topic, one.partition): one.offset for one in consumer.committed(asked, 60)}
    finally:
        consumer.close()
