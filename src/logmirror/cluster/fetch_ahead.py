"""What will be fetched next, asked for while what came before is worked on.

A fetch that waits for its answer leaves the way to a distant leader idle most of the time. So the
next fetch of each partition is sent before the last one's records are worked on; a leader answers
those of one connection one after the other, and the answers wait in the socket.

An answer is of use if it is the one that is wanted when it is wanted. Whatever else happens to it
(an error, another offset, a connection that broke) is nobody's loss: then the caller fetches as if
nothing had been asked.
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
    """Fetches alone, several under way, answers in order."""

    def __init__(self, *arguments: Any, **named: Any) -> None:  # noqa: ANN401  # its base's own
        self._asked: deque[Asked] = deque()
        super().__init__(*arguments, **named)

    def ask(self, request: FetchRequest) -> bool:
        """Send a fetch; see `fetch` for what it raises.

        Returns:
            False: not now, since it is throttled, or to authenticate again once all is answered.
        """
        now_ms = self._clock.monotonic_ms()
        at_ms = self._reauthenticate_at_ms
        if now_ms < self._throttled_until_ms or (self._asked and at_ms and now_ms >= at_ms):
            return False
        if not self._asked:
            self._ready()
        self._asked.append(self._ask(request))
        return True

    def response(self, view: memoryview) -> Fetched:
        """Receive the answer to the oldest fetch; see `fetch`."""
        return self._take(self._asked.popleft(), view, others_follow=bool(self._asked))


class _Leader(NamedTuple):
    """One leader's connection, and what it was asked, oldest first."""

    connection: FetchConnection
    asked: dict[TopicPartition, FetchRequest]


class FetchAhead:
    """The fetches that a client has asked ahead: one for each partition at most.

    Args:
        topology: Of the cluster.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._leaders: dict[int, _Leader] = {}
        """By node id."""

        self._leader_of: dict[TopicPartition, int] = {}
        """Of the partitions that an answer is to come for."""

    def close(self) -> None:
        """Drop all that was asked."""
        for node in list(self._leaders):
            self._drop(node)

    def ask(self, partition: TopicPartition, request: FetchRequest) -> None:
        """Ask a partition's leader, unless that is not to be had now or was asked already.

        Args:
            partition: Of one topic.
            request: Without a leader epoch; the broker should not wait with its answer.
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
            if leader.connection.ask(request._replace(leader_epoch=metadata.leader_epoch)):
                leader.asked[partition] = request
                self._leader_of[partition] = node
        except LogmirrorError:
            self._drop(node)

    def take(
        self, partition: TopicPartition, wanted: FetchRequest, view: memoryview
    ) -> Fetched | None:
        """The answer that was asked ahead, if it is to what is wanted; waits for it.

        Args:
            partition: Of one topic.
            wanted: A fetch without a leader epoch.
            view: See `Connection.fetch`.

        Returns:
            None: nothing was asked, or something else, or it was in vain.
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
        """Forget a connection and all that was asked there."""
        leader = self._leaders.pop(node, None)
        if leader is not None:
            leader.connection.close()
            for partition in leader.asked:
                del self._leader_of[partition]


def _same(asked: FetchRequest, wanted: FetchRequest) -> bool:
    """Whether an answer to one is an answer to the other."""
    return asked._replace(max_wait_ms=0, max_bytes=0) == wanted._replace(max_wait_ms=0, max_bytes=0)
