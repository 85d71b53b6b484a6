"""Who leads what: metadata, the connections to each broker, and when to ask again.

Invariants:
1. Metadata is asked for in version 4 or later with automatic creation off: looking never creates a
   topic.
2. Connections are opened when first needed and kept; one that failed is replaced, not repaired.
3. After a fork the child opens its own connections and leaves the parent's alone.
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
    """One partition as a broker last described it."""

    leader: int
    """Node id; -1: there is none now."""
    leader_epoch: int
    """-1: the broker does not say."""
    error: int
    """Kafka's error code, 0 if there is none; 5 means that there is no leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMetadata:
    """One topic as a broker last described it."""

    name: str
    topic_id: bytes | None
    """16 bytes that no other topic ever has; None: the broker is too old (before 3.1)."""
    partitions: Mapping[int, PartitionMetadata]
    """By partition number, ascending."""


class Topology:
    """Metadata cache and connections of one cluster. Not thread-safe.

    Args:
        settings: Of the cluster.
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
        """Ask for one topic now.

        Raises:
            NotFoundError: It does not exist.
            UsageError: We may not see it.
            UnavailableError: No broker answered.
        """
        return self.refresh([name])[name]

    def topics(self) -> list[str]:
        """The names of all topics that we may see, in order."""
        return sorted(self._ask(None))

    def refresh(self, names: Iterable[str]) -> dict[str, TopicMetadata]:
        """Ask for these topics now; see `topic` for errors, of which the first is raised."""
        wanted = sorted(set(names))
        found = self._ask(wanted)
        return {name: self._accept(name, found.get(name)) for name in wanted}

    def forget(self, names: Iterable[str] | None = None) -> None:
        """A broker objected, or could not be reached: ask about topics before their next use.

        Args:
            names: Of the topics; None: all.
        """
        if names is None:
            self._topics.clear()
        else:
            for name in names:
                self._topics.pop(name, None)

    def ensure(self, names: Iterable[str]) -> None:
        """Ask, in one request, for those of the topics that are missing or too old."""
        if missing := [name for name in set(names) if self._cached(name) is None]:
            self.refresh(missing)

    def known(self, name: str) -> TopicMetadata:
        """The topic from the cache, asked for where it is missing or too old."""
        return self._cached(name) or self.topic(name)

    def partition(self, partition: TopicPartition) -> PartitionMetadata:
        """The partition from the cache, asked for where it is missing or too old.

        Raises:
            NotFoundError: There is no such topic or partition.
            UnavailableError: It has no leader now.
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
        """The open connection to a broker by its node id, opened if necessary."""
        return self._connection(self._address(node))

    def connection_at(self, host: str, port: int) -> Connection:
        """The open connection to a broker by its address, opened if necessary."""
        return self._connection((host, port))

    def controller(self) -> Connection:
        """A connection to the controller; where the brokers hide it (KRaft), to one of them."""
        self._leave_parent_alone()
        if self._controller in self._brokers:
            return self.connection(self._controller)
        return self.any_connection()

    def new_connection(self, node: int, kind: type[_C]) -> _C:
        """Open a connection that is the caller's own: he closes it, nobody else uses it."""
        return kind(*self._address(node), self._settings, self._clock, tls=self._tls)

    def nodes(self) -> list[int]:
        """The node ids of the brokers as last heard of, ascending."""
        return sorted(self._brokers)

    def _address(self, node: int) -> tuple[str, int]:
        address = self._brokers.get(node)
        if address is None:
            raise UnavailableError("the leader is not among the cluster's brokers", node=node)
        return address

    def any_connection(self) -> Connection:
        """A connection to some broker: an open one, else a known one, else a bootstrap server.

        Raises:
            UnavailableError: None could be reached; facts name each and why.
            UsageError: One refused our settings; the others would, too.
        """
        self._leave_parent_alone()
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
        self._leave_parent_alone()
        connection = self._connections.get(address)
        if connection is None or connection.closed:
            connection = Connection(*address, self._settings, self._clock, tls=self._tls)
            self._connections[address] = connection
        return connection

    def _leave_parent_alone(self) -> None:
        if self._process_id != (now := os.getpid()):
            # Closing a descriptor here does not end the parent's connection, and sends nothing.
            self.close()
            self._process_id = now

    def _ask(self, names: list[str] | None) -> dict[str, Any]:
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
        """Turn an answer into a value, or into the error that it carries."""
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
