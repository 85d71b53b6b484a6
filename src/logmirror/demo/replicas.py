"""The replicas of the demo, observed from outside: files, and a topic in another broker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from logmirror.archive.naming import split_name
from logmirror.clock import SYSTEM_CLOCK
from logmirror.demo.flights import INSTALL
from logmirror.errors import CorruptionError, LogmirrorError, UsageError

try:
    from confluent_kafka import Consumer, KafkaException, TopicPartition
except ImportError as error:
    raise UsageError("the package confluent-kafka is missing", hint=INSTALL) from error

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


_SILENCE_S: Final = 20

Row = tuple[int, int, bytes | None, bytes | None]
"""Offset, timestamp in milliseconds, key, value."""


@dataclass(slots=True, kw_only=True)
class FileReplica:
    """The topic in files of one format."""

    format: str
    extension: str
    folder: Path
    records_at_kill: int = 0
    seconds: float = 0
    """Time from the start of a mirror to its last progress in this format; sum of both runs."""

    faults: list[LogmirrorError] = field(default_factory=list)

    @property
    def mirror(self) -> str:
        """Name of the mirror that writes it."""
        return self.folder.name

    def objects(self) -> Iterator[Path]:
        """Yield the published objects."""
        for path in self.folder.glob(f"*/*.{self.extension}"):
            if split_name(path.name):
                yield path

    def published(self) -> int:
        """Return the number of records that the names of the published objects cover."""
        names = [split_name(path.name) for path in self.objects()]
        return sum(name[1] - name[0] + 1 for name in names if name)

    def time_since(self, started_ms: int) -> None:
        """Add the time of a run, from its start to its last published object."""
        written_ms = [path.stat().st_mtime_ns // 1_000_000 for path in self.objects()]
        self.seconds += max(0, max(written_ms, default=0) - started_ms) / 1000

    def compared(self) -> int:
        """Return the count that `verify` must report if it compared everything: objects."""
        return len(list(self.objects()))

    def config(self) -> list[str]:
        """Return its part of the mirror's configuration."""
        root = f'"{self.folder.parent}"'.replace("$", "$$")
        return [
            f"    destinations: [{{type: filesystem, root: {root}}}]",
            f"    format: {self.format}",
        ]

    def row(self) -> list[str]:
        """Return its row of the result table, without the verdict."""
        objects = list(self.objects())
        size = sum(path.stat().st_size for path in objects)
        numbers = (self.published(), self.records_at_kill, len(objects), size)
        return [self.format, *(f"{number:,}" for number in numbers), f"{self.seconds:.1f}"]


class TopicReplica:
    """The topic in the second broker.

    Args:
        address: Address of the broker.
        topic: Name of the topic; it need not exist yet.
        partitions: Number of partitions.
    """

    format = "kafka"

    def __init__(self, address: str, topic: str, partitions: int) -> None:
        self.mirror = f"{topic}-standby"
        self.address, self.topic, self.partitions = address, topic, partitions
        self.records_at_kill = 0
        self.seconds: float = 0
        self.faults: list[LogmirrorError] = []
        self._published, self._grown_ms = 0, 0
        # Without auto-commit: a closing consumer would wait for the group coordinator.
        self._client = {
            "bootstrap.servers": address,
            "group.id": "demo",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        self._consumer = Consumer(self._client)

    def published(self) -> int:
        """Return the sum of the high watermarks, or the last known one if the broker is down."""
        try:
            ends = [
                self._consumer.get_watermark_offsets(TopicPartition(self.topic, n), timeout=5)
                for n in range(self.partitions)
            ]
        except KafkaException:
            return self._published  # the topic does not exist yet, or the broker has stopped
        found = sum(max(end[1], 0) for end in ends if end)
        if found > self._published:
            self._published, self._grown_ms = found, SYSTEM_CLOCK.now_ms()
        return self._published

    def time_since(self, started_ms: int) -> None:
        """Add the time of a run, from its start to the last increase."""
        self.seconds += max(0, self._grown_ms - started_ms) / 1000

    def compared(self) -> int:
        """Return the count that `verify` must report if it compared everything: offsets."""
        return self._published

    def config(self) -> list[str]:
        """Return its part of the mirror's configuration."""
        return [f'    destinations: [{{type: kafka, bootstrap-servers: "{self.address}"}}]']

    def row(self) -> list[str]:
        """Return its row of the result table, without the verdict."""
        numbers = [f"{self._published:,}", f"{self.records_at_kill:,}"]
        return [self.format, *numbers, "-", "-", f"{self.seconds:.1f}"]

    def rows(self, partition: int, count: int) -> Iterator[Row]:
        """Yield `count` records of a partition, read by librdkafka, and one more if it exists."""
        consumer = Consumer({**self._client, "enable.partition.eof": True})
        consumer.assign([TopicPartition(self.topic, partition, 0)])
        try:
            for _ in range(count + 1):
                message = consumer.poll(_SILENCE_S)
                if message is None or message.error():
                    return
                key, value = message.key(), message.value()
                yield message.offset() or 0, message.timestamp()[1], key, value
        finally:
            consumer.close()

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def verify_faults(
    replica: FileReplica | TopicReplica, flows: list[dict[str, Any]], partitions: int
) -> Iterator[LogmirrorError]:
    """Yield the problems that `logmirror verify` reported for a replica.

    Yields one more error if it did not compare the whole replica.
    """
    for flow in flows:
        for problem in flow["problems"]:
            yield CorruptionError(
                f"verify: {problem['message']}", hint=problem["hint"], **problem["facts"]
            )
    compared = sum(flow["compared_with_source"] for flow in flows)
    if len(flows) != partitions or compared != replica.compared():
        yield CorruptionError(
            "verify did not compare the whole replica with the source",
            format=replica.format,
            partitions=len(flows),
            expected=replica.compared(),
            compared=compared,
        )
