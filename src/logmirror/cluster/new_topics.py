"""A topic that was just created: the controller knows it before the brokers and its leader do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.cluster.client import LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.model import TopicPartition

_POLL_MS: Final = 100


def await_leader(
    cluster: ClusterClient, partition: TopicPartition, clock: Clock, *, timeout_ms: int
) -> None:
    """Wait until the brokers return the topic's metadata, and the partition's leader responds.

    Args:
        cluster: Its client.
        partition: A partition of the topic.
        clock: For the wait.
        timeout_ms: The limit. The last request may take the client's retry budget more.

    Raises:
        UsageError: The topic was not visible within the time, or permission is missing.
        UnavailableError: The partition had no leader within the time, or it did not respond.
    """
    deadline_ms = clock.monotonic_ms() + timeout_ms
    while True:
        try:
            found = cluster.topic(partition.topic).partitions.get(partition.partition)
            if found is not None and found.leader >= 0:
                cluster.list_offsets([partition], LATEST)
                return
            error: LogmirrorError = UnavailableError("the topic has no leader yet")
        except (NotFoundError, UnavailableError) as failure:
            error = failure
        if clock.monotonic_ms() > deadline_ms:
            raise error.add_facts(topic=partition.topic, partition=partition.partition)
        clock.sleep_ms(_POLL_MS)
