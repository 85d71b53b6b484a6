"""Apache Kafka's MirrorMaker 2 reads the offset syncs that logmirror writes.

Its formatter prints them. Its checkpoint connector, alone in a Connect worker, translates group
offsets with them, as it does with MirrorMaker's own syncs. In dedicated mode it copies topics,
which logmirror takes over.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from kit.judges.clients import rows_by_librdkafka
from kit.servers.apache import ApacheTools
from kit.servers.machine import HOST, Process

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SOURCE_ALIAS: Final = "origin"
CHECKPOINTS: Final = f"{SOURCE_ALIAS}.checkpoints.internal"

_FORMATTER: Final = "org.apache.kafka.connect.mirror.formatters.OffsetSyncFormatter"
_INTERVALS: Final = (
    "refresh.topics.interval.seconds",
    "refresh.groups.interval.seconds",
    "emit.checkpoints.interval.seconds",
    "sync.group.offsets.interval.seconds",
)
_REPLICATION_FACTORS: Final = (
    "replication.factor",
    *(f"{name}.topic.replication.factor" for name in ("checkpoints", "heartbeats", "offset-syncs")),
    *(f"{name}.storage.replication.factor" for name in ("offset", "status", "config")),
)
_BYTES: Final = "org.apache.kafka.connect.converters.ByteArrayConverter"


class MirrorMakerTools(ApacheTools):
    """The programs of one release, including MirrorMaker's classes."""

    name: ClassVar[str] = "mirrormaker"
    artifacts: ClassVar[tuple[str, ...]] = ("connect-mirror", "kafka-tools")

    def printed_syncs(self, bootstrap: str, topic: str, count: int) -> list[str]:
        """Return the console consumer's output for the first `count` offset syncs."""
        result = self.run(
            "kafka-console-consumer",
            *("--bootstrap-server", bootstrap, "--topic", topic, "--from-beginning"),
            *("--formatter", _FORMATTER, "--max-messages", str(count)),
        )
        return result.stdout.splitlines()

    def start_checkpoints(  # noqa: PLR0913  # two clusters and what is translated
        self,
        source: str,
        target: str,
        *,
        alias: str,
        topic: str,
        groups: str,
        folder: Path,
        interval_s: int = 1,
    ) -> Process:
        """Start a Connect worker that translates group offsets of the source for the target.

        Args:
            source: Bootstrap servers.
            target: Bootstrap servers.
            alias: Alias of the target.
            topic: The topic whose offsets are translated.
            groups: A regular expression.
            folder: The worker's directory.
            interval_s: How often groups are looked up, and checkpoints are written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        worker = {
            "bootstrap.servers": target,
            "key.converter": _BYTES,
            "value.converter": _BYTES,
            "offset.storage.file.filename": folder / "offsets",
            "listeners": f"http://{HOST}:0",
        }
        connector = {
            "name": "checkpoints",
            "connector.class": "org.apache.kafka.connect.mirror.MirrorCheckpointConnector",
            "replication.policy.class": (
                "org.apache.kafka.connect.mirror.IdentityReplicationPolicy"
            ),
            "source.cluster.alias": SOURCE_ALIAS,
            "target.cluster.alias": alias,
            "source.cluster.bootstrap.servers": source,
            "target.cluster.bootstrap.servers": target,
            "topics": topic,
            "groups": groups,
            "emit.checkpoints.interval.seconds": interval_s,
            "refresh.groups.interval.seconds": interval_s,
            "checkpoints.topic.replication.factor": 1,
            "offset-syncs.topic.replication.factor": 1,
        }
        for name, properties in (("worker", worker), ("connector", connector)):
            text = "".join(f"{key}={value}\n" for key, value in properties.items())
            (folder / f"{name}.properties").write_text(text)
        command = self.java_command(
            "org.apache.kafka.connect.cli.ConnectStandalone",
            *(str(folder / f"{name}.properties") for name in ("worker", "connector")),
            heap="512m",
            jvm=("-XX:TieredStopAtLevel=1",),
            log_level="INFO",
        )
        return Process(command, log=folder / "connect.log")

    def start_dedicated(
        self,
        clusters: Mapping[str, str],
        topic: str,
        folder: Path,
        properties: Mapping[str, object] | None = None,
    ) -> Process:
        """Start MirrorMaker in dedicated mode, with short intervals.

        Args:
            clusters: Bootstrap servers of the source and of the target, by alias.
            topic: The topic that is copied.
            folder: Its directory.
            properties: Properties over these.
        """
        folder.mkdir(parents=True, exist_ok=True)
        source, target = clusters
        settings: dict[str, object] = {
            "clusters": f"{source},{target}",
            **{f"{alias}.bootstrap.servers": servers for alias, servers in clusters.items()},
            f"{source}->{target}.enabled": "true",
            f"{source}->{target}.topics": topic,
            f"{source}->{target}.groups": f"{topic}.*",
            f"{target}->{source}.enabled": "false",
            f"{target}->{source}.emit.heartbeats.enabled": "false",
            "tasks.max": 2,
            "sync.topic.acls.enabled": "false",
            "sync.group.offsets.enabled": "true",
            **dict.fromkeys(_INTERVALS, 1),
            **dict.fromkeys(_REPLICATION_FACTORS, 1),
            "offset.flush.interval.ms": 60_000,
            "session.timeout.ms": 6_000,
            "heartbeat.interval.ms": 1_000,
            "scheduled.rebalance.max.delay.ms": 0,
            "listeners": f"http://{HOST}:0",
            **(properties or {}),
        }
        path = folder / "mirrormaker.properties"
        path.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = self.java_command(
            "org.apache.kafka.connect.mirror.MirrorMaker",
            str(path),
            heap="512m",
            jvm=("-XX:TieredStopAtLevel=1",),
            log_level="INFO",
        )
        return Process(command, log=folder / "mirrormaker.log")


class Checkpoint(NamedTuple):
    """A translated offset."""

    group: str
    topic: str
    partition: int
    upstream: int
    downstream: int


def checkpoints(bootstrap: str) -> list[Checkpoint]:
    """Return all checkpoints that MirrorMaker wrote to the target, oldest first."""
    found: list[Checkpoint] = []
    for row in rows_by_librdkafka(bootstrap, CHECKPOINTS):
        assert row.key is not None
        assert row.value is not None
        (size,) = struct.unpack_from(">h", row.key)
        group, rest = row.key[2 : 2 + size], row.key[2 + size :]
        (size,) = struct.unpack_from(">h", rest)
        (partition,) = struct.unpack_from(">i", rest, 2 + size)
        _, upstream, downstream = struct.unpack_from(">hqq", row.value)
        topic = rest[2 : 2 + size].decode()
        found.append(Checkpoint(group.decode(), topic, partition, upstream, downstream))
    return found
