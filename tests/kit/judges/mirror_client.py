"""MirrorMaker 2's Java client, which applications use to fail over: `MirrorClientJudge.java`.

It reads checkpoints and heartbeats that logmirror wrote, and decides by the names of topics.
"""

from __future__ import annotations

import json
import select
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self

from kit.servers.apache import VERSIONS, ApacheTools

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_POLICY: Final = "org.apache.kafka.connect.mirror.DefaultReplicationPolicy"
IDENTITY_POLICY: Final = "org.apache.kafka.connect.mirror.IdentityReplicationPolicy"

_SOURCE: Final = Path(__file__).with_name("MirrorClientJudge.java")
_READ_MS: Final = 20_000
_RESPONSE_S: Final = 60


class MirrorClientTools(ApacheTools):
    """The client of one release."""

    name: ClassVar[str] = "mirror-client"
    artifacts: ClassVar[tuple[str, ...]] = ("connect-mirror-client",)


class JavaError(Exception):
    """The client threw an exception: its class and its message."""


class Position(NamedTuple):
    """An offset that a group can commit at the target."""

    offset: int
    metadata: str


class MirrorClient:
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
        self._command = MirrorClientTools(version).application(
            _SOURCE,
            "org.apache.kafka.connect.mirror.MirrorClientJudge",
            *(f"{name}={value}" for name, value in given.items()),
        )

    def __enter__(self) -> Self:
        self._errors = tempfile.TemporaryFile()
        # The program ends with its input, and so with this process.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    # -- offsets -----------------------------------------------------------------------------------

    def translate_offsets(self, alias: str, group: str) -> dict[tuple[str, int], Position]:
        """`RemoteClusterUtils.translateOffsets`: the newest checkpoint per topic and partition.

        Args:
            alias: Of the source.
            group: A consumer group.
        """
        return _positions(self._request("translateOffsets", alias, group, str(_READ_MS)))

    def remote_consumer_offsets(self, alias: str, group: str) -> dict[tuple[str, int], Position]:
        """`MirrorClient.remoteConsumerOffsets`: the same, by a client of its own."""
        return _positions(self._request("remoteConsumerOffsets", group, alias, str(_READ_MS)))

    # -- names of topics ---------------------------------------------------------------------------

    def upstream_clusters(self) -> set[str]:
        """Return the aliases of all clusters from which heartbeats arrive."""
        return set(self._request("upstreamClusters"))

    def replication_hops(self, alias: str) -> int:
        """Return the number of replications between a cluster and this one; -1: none."""
        return int(self._request("replicationHops", alias))

    def checkpoint_topics(self) -> set[str]:
        """Return the topics that have checkpoints."""
        return set(self._request("checkpointTopics"))

    def heartbeat_topics(self) -> set[str]:
        """Return the topics that have heartbeats, of this cluster too."""
        return set(self._request("heartbeatTopics"))

    def remote_topics(self) -> set[str]:
        """Return the topics that are replicas, without internal ones."""
        return set(self._request("remoteTopics"))

    def names(self, alias: str, topics: Iterable[str]) -> list[dict[str, Any]]:
        """Return what the policy decides by the name of each topic, without a connection.

        Args:
            alias: An alias, whose topics are named too.
            topics: Names, legal or not, without tabs and line ends.
        """
        found: list[dict[str, Any]] = self._request("names", alias, *topics)
        return found

    # -- records -----------------------------------------------------------------------------------

    def checkpoints(self, topic: str) -> list[tuple[str, str, int, int, int, str]]:
        """Return all checkpoints of a topic as MirrorMaker's class decodes them, oldest first.

        Returns:
            Group, topic, partition, offset in the source, offset in the target, metadata.
        """
        return [tuple(row) for row in self._request("checkpoints", topic)]

    def heartbeats(self, topic: str) -> list[tuple[str, str, int]]:
        """Return all heartbeats of a topic as MirrorMaker's class decodes them, oldest first.

        Returns:
            Alias of the source, alias of the target, time in ms.
        """
        return [tuple(row) for row in self._request("heartbeats", topic)]

    def _request(self, *fields: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\t".join(fields).encode() + b"\n")
        self._process.stdin.flush()
        is_ready, _, _ = select.select([self._process.stdout], [], [], _RESPONSE_S)
        line = self._process.stdout.readline() if is_ready else b""
        if not line:
            self._errors.seek(0)
            log = self._errors.read().decode(errors="replace")[-4000:]
            message = f"no response to {fields[0]} within {_RESPONSE_S} s: {log}"
            raise TimeoutError(message)
        response = json.loads(line)
        if "error" in response:
            raise JavaError(response["error"])
        return response["result"]


def _positions(rows: list[Any]) -> dict[tuple[str, int], Position]:
    return {
        (topic, partition): Position(offset, metadata)
        for topic, partition, offset, metadata in rows
    }
