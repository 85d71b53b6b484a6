"""The copies that the demo makes, as anybody sees them from outside: files, and a topic."""

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
class Copy:
    """One format's copy of the topic, in files."""

    format: str
    extension: str
    folder: Path
    records_at_kill: int = 0
    seconds: float = 0
    """From the start of a mirror to its last progress in this format, both runs together."""

    faults: list[LogmirrorError] = field(default_factory=list)

    @property
    def mirror(self) -> str:
        """The name of its mirror."""
        return self.folder.name

    def objects(self) -> Iterator[Path]:
        """The objects that are visible now."""
        for path in self.folder.glob(f"*/*.{self.extension}"):
            if split_name(path.name):
                yield path

    def published(self) -> int:
        """How many records the names of the visible objects cover."""
        names = [split_name(path.name) for path in self.objects()]
        return sum(name[1] - name[0] + 1 for name in names if name)

    def time_since(self, started_ms: int) -> None:
        """Add the time that a run took for this format, by the age of its objects."""
        written_ms = [path.stat().st_mtime_ns // 1_000_000 for path in self.objects()]
        self.seconds += max(0, max(written_ms, default=0) - started_ms) / 1000

    def compared(self) -> int:
        """What `verify` counts when it has compared all of this copy: objects."""
        return len(list(self.objects()))

    def config(self) -> list[str]:
        """The lines of its mirror that say where it goes and how."""
        root = f'"{self.folder.parent}"'.replace("$", "$$")
        return [
            f"    destinations: [{{type: filesystem, root: {root}}}]",
            f"    format: {self.format}",
        ]

    def row(self) -> list[str]:
        """Its line of the last table, without the verdict."""
        objects = list(self.objects())
        size = sum(path.stat().st_size for path in objects)
        numbers = (self.published(), self.records_at_kill, len(objects), size)
        return [self.format, *(f"{number:,}" for number in numbers), f"{self.seconds:.1f}"]


class TopicCopy:
    """The copy in another broker.

    Args:
        address: Of that broker.
        topic: Its name there; it need not exist yet.
        partitions: How many it has.
    """

    format = "kafka"

    def __init__(self, address: str, topic: str, partitions: int) -> None:
        self.mirror = f"{topic}-standby"
        self.address, self.topic, self.partitions = address, topic, partitions
        self.records_at_kill = 0
        self.seconds: float = 0
        self.faults: list[LogmirrorError] = []
        self._seen, self._grown_ms = 0, 0
        # Nothing is committed: a consumer that closes would wait for a group's coordinator.
        self._client = {
            "bootstrap.servers": address,
            "group.id": "demo",
            "enable.auto.commit": False,
            "log_level": 0,
        }
        self._consumer = Consumer(self._client)

    def published(self) -> int:
        """How many offsets the topic has, as of now or as last seen."""
        try:
            ends = [
                self._consumer.get_watermark_offsets(TopicPartition(self.topic, n), timeout=5)
                for n in range(self.partitions)
            ]
        except KafkaException:
            return self._seen  # the topic is not there yet, or the broker not any more
        found = sum(max(end[1], 0) for end in ends if end)
        if found > self._seen:
            self._seen, self._grown_ms = found, SYSTEM_CLOCK.now_ms()
        return self._seen

    def time_since(self, started_ms: int) -> None:
        """Add the time from the start of a run to the last growth that was seen."""
        self.seconds += max(0, self._grown_ms - started_ms) / 1000

    def compared(self) -> int:
        """What `verify` counts when it has compared all of this copy: offsets."""
        return self._seen

    def config(self) -> list[str]:
        """The lines of its mirror that say where it goes."""
        return [f'    destinations: [{{type: kafka, bootstrap-servers: "{self.address}"}}]']

    def row(self) -> list[str]:
        """Its line of the last table, without the verdict."""
        numbers = [f"{self._seen:,}", f"{self.records_at_kill:,}"]
        return [self.format, *numbers, "-", "-", f"{self.seconds:.1f}"]

    def rows(self, partition: int, count: int) -> Iterator[Row]:
        """The records of a partition as librdkafka reads them: `count`, and one more if any."""
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
        """Let go of the broker."""
        self._consumer.close()


def verify_faults(
    copy: Copy | TopicCopy, flows: list[dict[str, Any]], partitions: int
) -> Iterator[LogmirrorError]:
    """What `logmirror verify` has against a copy."""
    for flow in flows:
        for problem in flow["problems"]:
            yield CorruptionError(
                f"verify: {problem['message']}", hint=problem["hint"], **problem["facts"]
            )
    compared = sum(flow["compared_with_source"] for flow in flows)
    if len(flows) != partitions or compared != copy.compared():
        yield CorruptionError(
            "verify did not compare the whole copy with the source",
            format=copy.format,
            partitions=len(flows),
            expected=copy.compared(),
            compared=compared,
        )
