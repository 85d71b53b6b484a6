"""Replicas as groups see them, without reading records: what exists, where it begins and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

from logmirror.cluster.client import EARLIEST
from logmirror.cluster.retry import NotFoundError
from logmirror.groups.translation import Log, Translated, preserved, recreated, translated
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.groups.offset_syncs import SyncIndex
    from logmirror.mirror.ports import KafkaSpec

CONSUMERS: Final = ("consumer", "")
"""Protocol types of groups that commit offsets of their own topics."""

NO_EPOCH: Final = -1
"""Leader epochs of the source mean nothing at the destination: a consumer would loop on one."""


class Replica(NamedTuple):
    """A partition and its replica."""

    mirror: str
    source: TopicPartition
    written: KafkaSpec
    target: TopicPartition
    """The partition at the destination."""

    @classmethod
    def of(cls, mirror: str, source: TopicPartition, written: KafkaSpec) -> Self:
        """Return the replica of a partition."""
        return cls(mirror, source, written, TopicPartition(written.topic, source.partition))


def translation(
    replica: Replica,
    offset: int,
    log: Log | None,
    syncs: Mapping[TopicPartition, SyncIndex],
    topic_id: bytes | None,
) -> Translated:
    """Return where a group continues in a replica.

    Args:
        replica: The replica.
        offset: The group's committed offset at the source.
        log: The bounds of the replica's log; None: there is no such partition.
        syncs: The offset syncs by partition of the source.
        topic_id: The ID of the replica's topic; None: not known.
    """
    if log is None:
        return Translated(None, offset, "the destination has no such partition", "not-replicated")
    if replica.written.offsets == "preserve":
        return preserved(offset, log)
    known = syncs.get(replica.source)
    if known is not None and None not in {topic_id, known.topic_id} and known.topic_id != topic_id:
        return recreated(log)
    return translated(offset, log, known)


def described(client: ClusterClient, names: Collection[str]) -> dict[str, TopicMetadata]:
    """Describe the topics that exist, with one request if all do."""
    try:
        return client.describe_topics(names)
    except NotFoundError:
        found: dict[str, TopicMetadata] = {}
        for name in names:
            try:
                found[name] = client.topic(name)
            except NotFoundError:
                continue
        return found


def topic_ids(topics: Mapping[str, TopicMetadata]) -> dict[str, bytes | None]:
    """Return the IDs of topics; None: not known."""
    return {name: topic.topic_id for name, topic in topics.items()}


def logs(
    client: ClusterClient,
    topics: Mapping[str, TopicMetadata],
    partitions: Collection[TopicPartition],
) -> dict[TopicPartition, Log]:
    """Return the bounds of the partitions that exist.

    Args:
        client: The destination.
        topics: The topics that exist.
        partitions: What is asked for.
    """
    existing = [
        one
        for one in partitions
        if one.topic in topics and one.partition in topics[one.topic].partitions
    ]
    starts = client.list_offsets(existing, EARLIEST)
    ends = client.log_ends(existing)
    return {one: Log(starts[one], ends[one].end_offset) for one in existing}
