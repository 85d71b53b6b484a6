"""A client for log directories: describes them, and moves partitions between them (KIP-113)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kit.judges.raw_client import RawClient, build, nested
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ALTER, DESCRIBE = Api.ALTER_REPLICA_LOG_DIRS, Api.DESCRIBE_LOG_DIRS


class Replica(NamedTuple):
    """A partition in a log directory."""

    size_bytes: int
    lag: int
    is_future: bool


class LogDirsClient(RawClient):
    """A connection to a broker."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(int(bootstrap.rpartition(":")[2]))

    def move(
        self, wanted: Mapping[str | Path, Mapping[str, tuple[int, ...]]], version: int = 2
    ) -> dict[tuple[str, int], int]:
        """Send AlterReplicaLogDirs; returns the codes by topic and partition."""
        topic_kind = nested(ALTER, version, "request", "AlterReplicaLogDirTopic")
        dir_kind = nested(ALTER, version, "request", "AlterReplicaLogDir")
        dirs = tuple(
            build(
                dir_kind,
                path=str(path),
                topics=tuple(
                    build(topic_kind, name=name, partitions=numbers)
                    for name, numbers in topics.items()
                ),
            )
            for path, topics in wanted.items()
        )
        response = self.ask(ALTER, version, dirs=dirs)
        return {
            (topic.topic_name, one.partition_index): int(one.error_code)
            for topic in response.results
            for one in topic.partitions
        }

    def move_one(self, topic: str, path: str | Path, partition: int = 0) -> int:
        """Move one partition; returns the code."""
        [code] = self.move({path: {topic: (partition,)}}).values()
        return int(code)

    def where(self, topic: str, partition: int = 0) -> dict[str, Replica]:
        """Return the replicas of a partition, by log directory."""
        kind = nested(DESCRIBE, 4, "request", "DescribableLogDirTopic")
        asked = (build(kind, topic=topic, partitions=(partition,)),)
        found = {}
        for one in self.ask(DESCRIBE, 4, topics=asked).results:
            for shown in one.topics:
                for part in shown.partitions:
                    replica = Replica(part.partition_size, part.offset_lag, part.is_future_key)
                    found[one.log_dir] = replica
        return found
