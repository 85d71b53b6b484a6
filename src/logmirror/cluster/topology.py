"""Metadata and connections: the leaders, the brokers, and when to refresh.

Invariants:
1. Metadata is requested in version 4 or later without automatic creation: reading never creates a
   topic.
2. Connections are opened on first use and kept; a failed one is replaced.
3. After a fork the child opens its own connections and does not use the parent's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafka.protocol.metadata import MetadataRequest  # type: ignore[import-untyped]  # no py.typed

from logmirror.cluster.connection import Connection
from logmirror.cluster.retry import NotFoundError
from logmirror.cluster.tls import tls_context
from logmirror.errors import UnavailableError
from logmirror.wire.messages import (
    LEADER_NOT_AVAILABLE,
    UNKNOWN_TOPIC_OR_PARTITION,
    api_error,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.model import TopicPartition

_C = TypeVar("_C", bound=Connection)

_METADATA_VERSION_MIN: Final = 4
_NO_ID: Final = bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMetadata:
    """The metadata of one partition."""

    leader: int
    """Node ID; -1 without a leader."""
    leader_epoch: int
    """-1 if the broker does not report it."""
    error: int
    """Kafka's error code; 0: none, 5: no leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMetadata:
    """The metadata of one topic."""

    name: str
    topic_id: bytes | None
    """16 bytes, unique forever; None if the broker is too old (before 3.1)."""
    partitions: Mapping[int, PartitionMetadata]
    """By partition number, ascending."""


class Topology:
    """Metadata cache and connections of one cluster. Not thread-safe.

    Args:
        settings: The connection settings.
        clock: For ages and deadlines.
    """

    def __init__(self, settings: ConnectionSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._tls: ssl.SSLContext | None = tls_context(settings) if settings.uses_tls else None
        self._process_id = os.getpid()
        self._connections: dict[tuple[str, int], Connection] = {}
        self._brokers: dict[int, tuple[str, int]] = {}
        self._topics: dict[str, tuple[TopicMetadata, int]] = {}
        self._controller = -1
        self.cluster_id: str | None = None

    def close(self) -> None:
        """Close every connection; a later use opens new ones."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def topic(self, name: str) -> TopicMetadata:
        """Request the metadata of one topic.

        Raises:
            NotFoundError: It does not exist.
            UsageError: Not authorized.
            UnavailableError: No broker responded.
        """
        return self.refresh([name])[name]

    def topics(self) -> list[str]:
        """The names of all visible topics, sorted."""
        return sorted(self._request(None))

    def refresh(self, names: Iterable[str]) -> dict[str, TopicMetadata]:
        """Request the metadata of topics; see `topic` for errors. The first error is raised."""
        wanted = sorted(set(names))
        found = self._request(wanted)
        return {name: self._accept(name, found.get(name)) for name in wanted}

    def forget(self, names: Iterable[str] | None = None) -> None:
        """Drop cached metadata, after a broker has refused a request or was unreachable.

        Args:
            names: The topics; None for all.
        """
        if names is None:
            self._topics.clear()
        else:
            for name in names:
                self._topics.pop(name, None)

    def ensure(self, names: Iterable[str]) -> None:
        """Refresh, in one request, the topics whose metadata is missing or too old."""
        if missing := [name for name in set(names) if self._cached(name) is None]:
            self.refresh(missing)

    def known(self, name: str) -> TopicMetadata:
        """The metadata of a topic, refreshed if it is missing or too old."""
        return self._cached(name) or self.topic(name)

    def partition(self, partition: TopicPartition) -> PartitionMetadata:
        """The metadata of a partition, refreshed if it is missing or too old.

        Raises:
            NotFoundError: There is no such topic or partition.
            UnavailableError: It has no leader.
        """
        found = self.known(partition.topic).partitions.get(partition.partition)
        facts: dict[str, Any] = {"topic": partition.topic, "partition": partition.partition}
        if found is None:
            count = len(self.topic(partition.topic).partitions)
            raise NotFoundError("the topic has no such partition", partition_count=count, **facts)
        if found.leader not in self._brokers:
            code = found.error or LEADER_NOT_AVAILABLE
            raise api_error(code, action="the partition cannot be used", **facts)
        return found

    def _cached(self, name: str) -> TopicMetadata | None:
        entry = self._topics.get(name)
        if entry is None:
            return None
        max_age_ms = self._settings.metadata_refresh_ms
        fresh = max_age_ms < 0 or self._clock.monotonic_ms() - entry[1] < max_age_ms
        return entry[0] if fresh else None

    def connection(self, node: int) -> Connection:
        """The connection to a broker by its node ID, opened if necessary."""
        return self._connection(self._address(node))

    def connection_at(self, host: str, port: int) -> Connection:
        """The connection to a broker by its address, opened if necessary."""
        return self._connection((host, port))

    def controller(self) -> Connection:
        """A connection to the controller, or to any broker if the controller is hidden (KRaft)."""
        self._close_after_fork()
        if self._controller in self._brokers:
            return self.connection(self._controller)
        return self.any_connection()

    def new_connection(self, node: int, kind: type[_C]) -> _C:
        """Open a separate connection, which the caller owns and closes."""
        return kind(*self._address(node), self._settings, self._clock, tls=self._tls)

    def nodes(self) -> list[int]:
        """The node IDs of the brokers in the latest metadata, ascending."""
        return sorted(self._brokers)

    def _address(self, node: int) -> tuple[str, int]:
        address = self._brokers.get(node)
        if address is None:
            raise UnavailableError("the leader is not among the cluster's brokers", node=node)
        return address

    def any_connection(self) -> Connection:
        """A connection to any broker: an open one, a known broker, or a bootstrap server.

        Raises:
            UnavailableError: None was reachable; fact `brokers` has the reason for each.
            UsageError: One refused the settings, as the others would.
        """
        self._close_after_fork()
        for connection in self._connections.values():
            if not connection.closed:
                return connection
        reasons: dict[str, str] = {}
        addresses = [*self._brokers.values(), *self._settings.bootstrap_servers]
        deadline_ms = self._clock.monotonic_ms() + self._settings.retry_budget_ms
        for address in dict.fromkeys(addresses):
            try:
                return self._connection(address)
            except UnavailableError as error:
                reasons[f"{address[0]}:{address[1]}"] = str(error)
            if self._clock.monotonic_ms() >= deadline_ms:
                break
        raise UnavailableError(
            "no broker could be reached",
            hint="check the addresses, the network, and security.protocol",
            brokers=reasons,
        )

    def _connection(self, address: tuple[str, int]) -> Connection:
        self._close_after_fork()
        connection = self._connections.get(address)
        if connection is None or connection.closed:
            connection = Connection(*address, self._settings, self._clock, tls=self._tls)
            self._connections[address] = connection
        return connection

    def _close_after_fork(self) -> None:
        if self._process_id != (now := os.getpid()):
            # Closing a descriptor here does not close the parent's connection, and sends nothing.
            self.close()
            self._process_id = now

    def _request(self, names: list[str] | None) -> dict[str, Any]:
        topic_class = MetadataRequest.MetadataRequestTopic
        topics = None if names is None else [topic_class(name=name) for name in names]
        request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        response = self.any_connection().call(request, low=_METADATA_VERSION_MIN)
        if code := getattr(response, "error_code", 0):
            raise api_error(code, action="could not read the cluster's metadata")
        self._brokers = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        self.cluster_id = response.cluster_id
        self._controller = response.controller_id
        in_use = {*self._brokers.values(), *self._settings.bootstrap_servers}
        for address in [address for address in self._connections if address not in in_use]:
            self._connections.pop(address).close()
        return {topic.name: topic for topic in response.topics}

    def _accept(self, name: str, found: Any) -> TopicMetadata:  # noqa: ANN401  # untyped library
        """Return the metadata of a topic, or raise its error."""
        self._topics.pop(name, None)
        code = UNKNOWN_TOPIC_OR_PARTITION if found is None else found.error_code
        if code == UNKNOWN_TOPIC_OR_PARTITION:
            raise NotFoundError(
                "topic does not exist",
                hint="check the name and the cluster; a topic is never created by reading it",
                topic=name,
            )
        if code:
            raise api_error(code, action="could not read the topic's metadata", topic=name)
        topic_id = found.topic_id.bytes if found.topic_id is not None else _NO_ID
        partitions = {
            entry.partition_index: PartitionMetadata(
                leader=entry.leader_id, leader_epoch=entry.leader_epoch, error=entry.error_code
            )
            for entry in sorted(found.partitions, key=lambda entry: int(entry.partition_index))
        }
        metadata = TopicMetadata(
            name=name,
            topic_id=None if topic_id == _NO_ID else topic_id,
            partitions=partitions,
        )
        self._topics[name] = (metadata, self._clock.monotonic_ms())
        return metadata
