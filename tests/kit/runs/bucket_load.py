"""Clients of brokers on a bucket: a producer and a consumer in threads of their own, whatever
happens to the brokers meanwhile, and a reader of what is stored."""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from kit.judges.clients import rows_by_librdkafka

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.servers.bucket_broker import BucketBroker
    from kit.servers.embedded import EmbeddedBroker

PARTITIONS: Final = 4
_RECONNECT: Final[Mapping[str, object]] = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "log_level": 0,
}


class Load:
    """A producer in a thread, and what was acknowledged to it.

    Args:
        bootstrap: `host:port`.
        topic: The topic.
        per_s: Records per second at most, so that a long test does not fill the disk.
        partitions: How many the topic has.
        options: Of the client.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str,
        *,
        per_s: float = math.inf,
        partitions: int = PARTITIONS,
        **options: object,
    ) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "linger.ms": 2,
                "message.timeout.ms": 120_000,
                "batch.num.messages": 50,
                **_RECONNECT,
                **options,
            }
        )
        self.acked: dict[tuple[int, int], bytes] = {}
        self.unplaced: list[tuple[int, bytes]] = []
        """Partition and value of what was acknowledged without an offset. librdkafka does that to
        a batch that got an error, if the next one is acknowledged before it is sent again."""

        self.failures: list[object] = []
        self.sent = 0
        self.last_acked_s = 0.0
        """When the last record was acknowledged, by `time.monotonic`."""

        self._topic, self._per_s, self._partitions = topic, per_s, partitions
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _delivered(self, error: object, message: Any) -> None:
        if error is not None:
            self.failures.append(error)
        else:
            self.last_acked_s = time.monotonic()
            if message.offset() is None:
                self.unplaced.append((message.partition(), message.value()))
            else:
                self.acked[message.partition(), message.offset()] = message.value()

    def _run(self) -> None:
        began_s = time.monotonic()
        while not self._done.is_set():
            value = b"%d-" % self.sent + b"x" * (self.sent % 700)
            if self.sent > self._per_s * (time.monotonic() - began_s):
                self._producer.poll(0.002)
            elif len(self._producer) < 2_000:
                self._producer.produce(
                    self._topic,
                    value=value,
                    partition=self.sent % self._partitions,
                    on_delivery=self._delivered,
                )
                self.sent += 1
            self._producer.poll(0.01 if len(self._producer) > 200 else 0)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send no more."""
        self._done.set()
        self._thread.join()

    def flush(self, timeout_s: float = 60) -> int:
        """Wait for what was sent; returns how much was not delivered."""
        return self._producer.flush(timeout_s)

    def placed(self, found: Mapping[tuple[int, int], bytes | None]) -> dict[tuple[int, int], bytes]:
        """Return what was acknowledged, with the offsets found for records acknowledged without."""
        places = {(at[0], value): at for at, value in found.items() if at not in self.acked}
        return self.acked | {places[one]: one[1] for one in self.unplaced}

    def wait_for(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many more records are acknowledged."""
        until, deadline = len(self.acked) + count, time.monotonic() + timeout_s
        while len(self.acked) < until:
            assert time.monotonic() < deadline, "the producer makes no progress"
            time.sleep(0.01)

    def wait_for_sent(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many records were handed to the client in all."""
        deadline = time.monotonic() + timeout_s
        while self.sent < count:
            assert time.monotonic() < deadline, "the producer's queue is full"
            time.sleep(0.01)


class Reading:
    """A consumer of all partitions in a thread. An offset that does not exist is an error."""

    def __init__(
        self, bootstrap: str, topic: str, *, partitions: int = PARTITIONS, **options: object
    ) -> None:
        self._partitions = range(partitions)
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "reading",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                **_RECONNECT,
                **options,
            }
        )
        self._consumer.assign([TopicPartition(topic, n, 0) for n in self._partitions])
        self.rows: list[tuple[int, int, bytes | None]] = []
        """Partition, offset and value, as they came."""

        self.errors: list[object] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._done.is_set():
            for message in self._consumer.consume(500, 0.1):
                if message.error() is None:
                    row = message.partition(), message.offset(), message.value()
                    self.rows.append(row)
                else:
                    self.errors.append(message.error())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._consumer.close()

    def wait_for(self, count: int, timeout_s: float = 60) -> None:
        """Wait until so many records were read in all."""
        deadline = time.monotonic() + timeout_s
        while len(self.rows) < count:
            assert time.monotonic() < deadline, f"the consumer makes no progress: {self.errors}"
            time.sleep(0.01)

    def found(self) -> dict[tuple[int, int], bytes | None]:
        """Return what was read; checks that each record came once, in order."""
        nexts = dict.fromkeys(self._partitions, 0)
        for partition, offset, _ in self.rows:
            assert offset == nexts[partition]
            nexts[partition] += 1
        return {(partition, offset): value for partition, offset, value in self.rows}


def create(broker: BucketBroker, topic: str, partitions: int = PARTITIONS) -> None:
    """Create a topic."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)


def stored(
    broker: BucketBroker | EmbeddedBroker, topic: str, starts: Mapping[int, int] | None = None
) -> dict[tuple[int, int], bytes | None]:
    """Read a topic from its start, or from these offsets."""
    return {
        (partition, row.offset): row.value
        for partition in range(PARTITIONS)
        for row in rows_by_librdkafka(
            broker.bootstrap, topic, partition=partition, start=(starts or {}).get(partition, 0)
        )
    }
