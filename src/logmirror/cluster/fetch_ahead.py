"""Prefetching: the next fetch of each partition is sent while the last one is processed.

A connection to a distant leader is idle most of the time if each fetch waits for its response. So
the next fetch of each partition is sent before the records of the last one are processed. A leader
responds to the requests of one connection in order, and the responses wait in the socket.

A prefetched response is used if it matches the next fetch. After an error, another offset or a
broken connection the caller fetches as if there had been no prefetch.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.cluster.connection import Connection
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from logmirror.cluster.topology import Topology
    from logmirror.model import TopicPartition
    from logmirror.wire.fetch import Asked, Fetched, FetchRequest

_NOWHERE: Final = memoryview(bytearray())


class FetchConnection(Connection):
    """A connection for fetches, several in flight, with responses in order."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  # its base's own
        self._asked: deque[Asked] = deque()
        super().__init__(*arguments, **named)

    def ask(self, request: FetchRequest) -> bool:
        """Send a fetch; see `fetch` for what it raises.

        Returns:
            False if throttled, or if reauthentication is due and fetches are in flight.
        """
        now_ms = self._clock.monotonic_ms()
        at_ms = self._reauthenticate_at_ms
        if now_ms < self._throttled_until_ms or (self._asked and at_ms and now_ms >= at_ms):
            return False
        if not self._asked:
            self._ready()
        self._asked.append(self._send_fetch(request))
        return True

    def response(self, view: memoryview) -> Fetched:
        """Receive the response to the oldest fetch; see `fetch`."""
        return self._receive_fetch(self._asked.popleft(), view, others_follow=bool(self._asked))


class _Leader(NamedTuple):
    """The connection to one leader, and the fetches in flight on it, oldest first."""

    connection: FetchConnection
    asked: dict[TopicPartition, FetchRequest]


class FetchAhead:
    """The prefetches of a client: at most one per partition.

    Args:
        topology: The cluster's metadata and connections.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._leaders: dict[int, _Leader] = {}
        """By node ID."""

        self._leader_of: dict[TopicPartition, int] = {}
        """The leader of each partition with a prefetch in flight."""

    def close(self) -> None:
        """Drop all prefetches."""
        for node in list(self._leaders):
            self._drop(node)

    def ask(self, partition: TopicPartition, request: FetchRequest) -> None:
        """Send a prefetch to the partition's leader, if it is reachable and has none in flight.

        Args:
            partition: The partition.
            request: A fetch without leader epoch and without wait time.
        """
        if partition in self._leader_of:
            return
        node = -1
        try:
            metadata = self._topology.partition(partition)
            node = metadata.leader
            leader = self._leader(node)
            if request.topic_id is not None and not leader.connection.speaks_topic_ids():
                return
            by_id, last_epoch = request.topic_id is not None, request.last_fetched_epoch
            if last_epoch < 0 or metadata.leader_epoch < last_epoch:
                last_epoch = -1
            elif metadata.leader_epoch > last_epoch and not (
                leader.connection.checks_fetched_epochs(by_id=by_id)
            ):
                return  # the next fetch compares the epochs first
            sent = request._replace(
                leader_epoch=metadata.leader_epoch, last_fetched_epoch=last_epoch
            )
            if leader.connection.ask(sent):
                leader.asked[partition] = request
                self._leader_of[partition] = node
        except LogmirrorError:
            self._drop(node)

    def take(
        self, partition: TopicPartition, wanted: FetchRequest, view: memoryview
    ) -> Fetched | None:
        """Wait for the prefetched response, and return it if it matches a fetch.

        Args:
            partition: The partition.
            wanted: A fetch without leader epoch.
            view: See `Connection.fetch`.

        Returns:
            None if there was no prefetch, it does not match, or it failed.
        """
        node = self._leader_of.get(partition)
        if node is None:
            return None
        connection, asked = self._leaders[node]
        fits = _same(asked[partition], wanted)
        try:
            while True:
                oldest = next(iter(asked))
                is_it = oldest == partition
                fetched = connection.response(view if is_it and fits else _NOWHERE)
                del asked[oldest], self._leader_of[oldest]
                if is_it:
                    break
        except LogmirrorError:
            self._drop(node)
            return None
        return fetched if fits and not fetched.head.error_code else None

    def _leader(self, node: int) -> _Leader:
        leader = self._leaders.get(node)
        if leader is None or leader.connection.has_hung_up():
            self._drop(node)
            connection = self._topology.new_connection(node, FetchConnection)
            leader = self._leaders[node] = _Leader(connection, {})
        return leader

    def _drop(self, node: int) -> None:
        """Drop a connection and its prefetches."""
        leader = self._leaders.pop(node, None)
        if leader is not None:
            leader.connection.close()
            for partition in leader.asked:
                del self._leader_of[partition]


def _same(asked: FetchRequest, wanted: FetchRequest) -> bool:
    """Whether the response to one is a response to the other."""
    return asked._replace(max_wait_ms=0, max_bytes=0) == wanted._replace(max_wait_ms=0, max_bytes=0)
