"""Log directories of brokers: what they hold, and moves of replicas between them (KIP-113).

Invariants:
1. Each broker describes its own directories, and moves its own replicas.
2. A request for the directory to which a replica moves already changes nothing. So a request whose
   response is lost is sent again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafka.protocol.admin import (  # type: ignore[import-untyped]  # ships no py.typed
    AlterReplicaLogDirsRequest,
    DescribeLogDirsRequest,
)
from kafka.protocol.metadata import MetadataRequest  # type: ignore[import-untyped]  # no py.typed

from logmirror.cluster.router import by_topic
from logmirror.errors import CorruptionError
from logmirror.model import TopicPartition
from logmirror.wire.messages import CLUSTER_AUTHORIZATION_FAILED, api_error, error_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from logmirror.cluster.connection import Connection
    from logmirror.cluster.router import Router

_DESCRIBE: Final = "could not describe the log directories"
_MOVE: Final = "could not move replicas to other log directories"
_METADATA_MIN: Final = 4
"""The first Metadata version that creates no topic."""

_SIZES_FROM: Final = 4
"""The first DescribeLogDirs version with the sizes of volumes (Apache Kafka 3.3)."""


class Replica(NamedTuple):
    """A replica in a log directory, or the copy that is to become it."""

    size_bytes: int
    lag: int
    """How many offsets a copy is behind its replica."""

    is_future: bool
    """Whether it is the copy of a move."""


class LogDir(NamedTuple):
    """A log directory of a broker."""

    node: int
    path: str
    error: str
    """Kafka's name of the error; empty: there is none."""

    replicas: Mapping[TopicPartition, Replica]
    usable_bytes: int | None
    """What can be written to its volume; None: not known."""

    is_cordoned: bool = False
    """Whether the broker refuses moves to it (KIP-1066)."""


class LogDirs:
    """The log directories of a cluster. Not thread-safe.

    Args:
        router: The connections.
    """

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(
        self, nodes: Collection[int] = (), partitions: Iterable[TopicPartition] | None = None
    ) -> list[LogDir]:
        """Describe the log directories of brokers.

        Args:
            nodes: Only those of these brokers. Empty: of all.
            partitions: Only these partitions. None: all.

        Raises:
            UsageError: No permission (Describe on the cluster), or no such broker.
            UnavailableError: A broker was not reachable within the budget.
        """
        topics = None if partitions is None else by_topic(partitions, lambda one: one.partition)
        made = DescribeLogDirsRequest.DescribableLogDirTopic
        request = DescribeLogDirsRequest(
            topics=None
            if topics is None
            else [made(topic=name, partitions=numbers) for name, numbers in topics.items()]
        )
        found: dict[int, list[LogDir]] = {}

        def attempt() -> None:
            topology = self._router.topology
            topology.refresh([])
            for node in nodes or topology.nodes():
                if node not in found:
                    found[node] = _describe_once(topology.connection(node), node, request)

        self._router.retry.run(attempt, _DESCRIBE)
        return [one for node in sorted(found) for one in found[node]]

    def nodes(self) -> list[int]:
        """Return the node IDs of the brokers, with a new request.

        Raises:
            UnavailableError: No broker was reachable within the budget.
        """

        def attempt() -> list[int]:
            self._router.topology.refresh([])
            return self._router.topology.nodes()

        return self._router.retry.run(attempt, "could not list the brokers")

    def assignments(self, topics: Collection[str]) -> dict[TopicPartition, tuple[int, ...]]:
        """Return the brokers that have replicas of each partition, the preferred leader first.

        Topics that do not exist, or are not visible to this user, are left out.

        Raises:
            UnavailableError: No broker was reachable within the budget.
        """
        made = MetadataRequest.MetadataRequestTopic
        request = MetadataRequest(
            topics=[made(name=name) for name in topics], allow_auto_topic_creation=False
        )

        def attempt() -> dict[TopicPartition, tuple[int, ...]]:
            response = self._router.topology.any_connection().call(request, low=_METADATA_MIN)
            return {
                TopicPartition(topic.name, entry.partition_index): tuple(entry.replica_nodes)
                for topic in response.topics
                if not topic.error_code
                for entry in topic.partitions
            }

        return self._router.retry.run(attempt, "could not read the replicas") if topics else {}

    def move(self, node: int, targets: Mapping[TopicPartition, str]) -> dict[TopicPartition, str]:
        """Request that a broker moves replicas, with one request.

        The directory in which a replica is cancels its move.

        Args:
            node: The broker, from `nodes` or `describe`.
            targets: The log directory for each partition.

        Returns:
            For each partition Kafka's name of the error. Empty: the move has begun, or is not
            needed.

        Raises:
            UnavailableError: The broker was not reachable within the budget.
            CorruptionError: The response does not contain a partition.
        """
        dirs: dict[str, list[TopicPartition]] = {}
        for partition, path in targets.items():
            dirs.setdefault(path, []).append(partition)
        made = AlterReplicaLogDirsRequest.AlterReplicaLogDir
        request = AlterReplicaLogDirsRequest(
            dirs=[
                made(
                    path=path,
                    topics=[
                        made.AlterReplicaLogDirTopic(name=name, partitions=numbers)
                        for name, numbers in by_topic(some, lambda one: one.partition).items()
                    ],
                )
                for path, some in dirs.items()
            ]
        )

        def attempt() -> dict[TopicPartition, str]:
            response = self._router.topology.connection(node).call(request, low=1)
            return {
                TopicPartition(topic.topic_name, entry.partition_index): _name(entry.error_code)
                for topic in response.results
                for entry in topic.partitions
            }

        found = self._router.retry.run(attempt, _MOVE, broker=node)
        if missing := [str(partition) for partition in targets if partition not in found]:
            raise CorruptionError("a response does not contain a requested partition", left=missing)
        return {partition: found[partition] for partition in targets}


def _describe_once(connection: Connection, node: int, request: Any) -> list[LogDir]:  # noqa: ANN401  # untyped library
    response = connection.call(request, low=1)
    # Before version 3 the error of the whole response is an empty list.
    code = getattr(response, "error_code", 0) or 0
    if not code and not response.results:
        code = CLUSTER_AUTHORIZATION_FAILED
    if code:
        raise api_error(code, action=_DESCRIBE, broker=node)
    has_sizes = connection.version_of(type(request)) >= _SIZES_FROM
    return [
        LogDir(
            node,
            one.log_dir,
            _name(one.error_code),
            {
                TopicPartition(topic.name, entry.partition_index): Replica(
                    entry.partition_size, entry.offset_lag, entry.is_future_key
                )
                for topic in one.topics
                for entry in topic.partitions
            },
            one.usable_bytes if has_sizes and one.usable_bytes >= 0 else None,
            bool(one.is_cordoned),
        )
        for one in response.results
    ]


def _name(code: int) -> str:
    return error_of(code).name if code else ""
