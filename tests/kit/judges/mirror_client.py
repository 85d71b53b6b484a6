"""MirrorMaker 2's Java client, which applications use to fail over: `MirrorClientJudge.java`.

It reads checkpoints and heartbeats that logmirror wrote, and decides by the names of topics.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from kit.judges.java_program import JavaProgram
from kit.servers.apache import VERSIONS, ApacheTools

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_POLICY: Final = "org.apache.kafka.connect.mirror.DefaultReplicationPolicy"
IDENTITY_POLICY: Final = "org.apache.kafka.connect.mirror.IdentityReplicationPolicy"

_SOURCE: Final = Path(__file__).with_name("MirrorClientJudge.java")
_READ_MS: Final = 20_000


class MirrorClientTools(ApacheTools):
    """The client of one release."""

    name: ClassVar[str] = "mirror-client"
    artifacts: ClassVar[tuple[str, ...]] = ("connect-mirror-client",)


class Position(NamedTuple):
    """An offset that a group can commit at the target."""

    offset: int
    metadata: str


class MirrorClient(JavaProgram):
    """A running client of one cluster; a context manager. Each method raises JavaError.

    Args:
        bootstrap: Bootstrap servers of the target; nothing connects to them before it is needed.
        properties: Properties over the defaults: `replication.policy.class` and others.
        version: A release of Apache Kafka.
    """

    def __init__(
        self,
        bootstrap: str,
        properties: Mapping[str, str] | None = None,
        *,
        version: str = VERSIONS[-1],
    ) -> None:
        given = {"bootstrap.servers": bootstrap, **(properties or {})}
        super().__init__(
            MirrorClientTools(version).application(
                _SOURCE,
                "org.apache.kafka.connect.mirror.MirrorClientJudge",
                *(f"{name}={value}" for name, value in given.items()),
            )
        )

    # -- offsets -----------------------------------------------------------------------------------

    def translate_offsets(self, alias: str, group: str) -> dict[tuple[str, int], Position]:
        """`RemoteClusterUtils.translateOffsets`: the newest checkpoint per topic and partition.

        Args:
            alias: Of the source.
            group: A consumer group.
        """
        return _positions(self.request("translateOffsets", alias, group, str(_READ_MS)))

    def remote_consumer_offsets(self, alias: str, group: str) -> dict[tuple[str, int], Position]:
        """`MirrorClient.remoteConsumerOffsets`: the same, by a client of its own."""
        return _positions(self.request("remoteConsumerOffsets", group, alias, str(_READ_MS)))

    # -- names of topics ---------------------------------------------------------------------------

    def upstream_clusters(self) -> set[str]:
        """Return the aliases of all clusters from which heartbeats arrive."""
        return set(self.request("upstreamClusters"))

    def replication_hops(self, alias: str) -> int:
        """Return the number of replications between a cluster and this one; -1: none."""
        return int(self.request("replicationHops", alias))

    def checkpoint_topics(self) -> set[str]:
        """Return the topics that have checkpoints."""
        return set(self.request("checkpointTopics"))

    def heartbeat_topics(self) -> set[str]:
        """Return the topics that have heartbeats, of this cluster too."""
        return set(self.request("heartbeatTopics"))

    def remote_topics(self) -> set[str]:
        """Return the topics that are replicas, without internal ones."""
        return set(self.request("remoteTopics"))

    def names(self, alias: str, topics: Iterable[str]) -> list[dict[str, Any]]:
        """Return what the policy decides by the name of each topic, without a connection.

        Args:
            alias: An alias, whose topics are named too.
            topics: Names, legal or not, without tabs and line ends.
        """
        found: list[dict[str, Any]] = self.request("names", alias, *topics)
        return found

    # -- records -----------------------------------------------------------------------------------

    def checkpoints(self, topic: str) -> list[tuple[str, str, int, int, int, str]]:
        """Return all checkpoints of a topic as MirrorMaker's class decodes them, oldest first.

        Returns:
            Group, topic, partition, offset in the source, offset in the target, metadata.
        """
        return [tuple(row) for row in self.request("checkpoints", topic)]

    def heartbeats(self, topic: str) -> list[tuple[str, str, int]]:
        """Return all heartbeats of a topic as MirrorMaker's class decodes them, oldest first.

        Returns:
            Alias of the source, alias of the target, time in ms.
        """
        return [tuple(row) for row in self.request("heartbeats", topic)]


def _positions(rows: list[Any]) -> dict[tuple[str, int], Position]:
    return {
        (topic, partition): Position(offset, metadata)
        for topic, partition, offset, metadata in rows
    }
