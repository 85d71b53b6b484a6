"""Two brokers on this machine, the topics of a run, and their log end offsets."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kit.servers.kafka import ApacheKafka, Listener  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VERSION = "4.3.1"
BATCH_BYTES = 16_384
"""The default `batch.size` of the Java producer."""

_CONFIG = {
    "log.segment.bytes": 1 << 28,
    "log.segment.delete.delay.ms": 1000,  # deleted segments must not fill the page cache
}
_QUIET = {"log_level": 0}


@dataclass(frozen=True)
class Shape:
    """The topic of a run: equal records, uncompressed."""

    record_bytes: int
    partitions: int
    records: int

    @property
    def topic(self) -> str:
        return f"bench-{self.record_bytes}-{self.partitions}"

    @property
    def total_bytes(self) -> int:
        """Bytes of all values."""
        return self.records * self.record_bytes

    def __str__(self) -> str:
        size = "1 KiB" if self.record_bytes == 1024 else f"{self.record_bytes} B"
        return f"{size}, {self.partitions} partition{'s' if self.partitions > 1 else ''}"


class Cluster(ApacheKafka):
    """A broker with the JVM options of a server."""

    def __init__(
        self,
        folder: Path,
        *,
        config: dict[str, object] | None = None,
        listeners: tuple[Listener, ...] = (),
    ) -> None:
        super().__init__(
            VERSION,
            folder,
            config={**_CONFIG, **(config or {})},
            listeners=listeners,
            jvm=(),
            heap="1g",
        )

    def ends(self, topic: str, partitions: int) -> list[int]:
        """Return the high watermark of each partition."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, **_QUIET})
        return next(_ends(admin, topic, partitions))

    def watch_ends(
        self, topic: str, partitions: int, *, every_s: float = 0.05, timeout_s: float
    ) -> Iterator[tuple[float, int]]:
        """Yield (seconds since the epoch, records in the topic) repeatedly."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, **_QUIET})
        until = time.monotonic() + timeout_s
        for ends in _ends(admin, topic, partitions):
            yield time.time(), sum(ends)
            if time.monotonic() > until:
                message = f"{topic} has {sum(ends)} records after {timeout_s} s"
                raise TimeoutError(message)
            time.sleep(every_s)


def _ends(admin: AdminClient, topic: str, partitions: int) -> Iterator[list[int]]:
    asked = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(partitions)}
    while True:
        responses = admin.list_offsets(asked, request_timeout=30)
        yield [response.result(30).offset for response in responses.values()]


def fill(kafka: Cluster, shape: Shape) -> None:
    """Create the topic and produce its records, with the current time as timestamps."""
    kafka.create_topic(shape.topic, shape.partitions)
    produce(kafka, shape, lambda index: index % shape.partitions)


def produce(kafka: Cluster, shape: Shape, partition: Callable[[int], int]) -> None:
    """Produce the records of a shape."""
    settings = {"batch.size": BATCH_BYTES, "linger.ms": 20, "queue.buffering.max.kbytes": 1 << 18}
    producer = Producer({"bootstrap.servers": kafka.bootstrap, **settings, **_QUIET})
    letters = bytes(range(97, 123)) * (shape.record_bytes // 26 + 2)
    values = [letters[start : start + shape.record_bytes] for start in range(26)]
    for index in range(shape.records):
        while True:
            try:
                producer.produce(shape.topic, values[index % 26], partition=partition(index))
                break
            except BufferError:
                producer.poll(0.1)
        if index % 1000 == 0:
            producer.poll(0)
    if producer.flush(120):
        message = "the source does not take its records"
        raise TimeoutError(message)
