"""Driver: one mirror's settings, and the state of its partitions at the source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import UsageError
from logmirror.mirror.ports import FlowId, SourceView

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.ports import ChainStart, DestinationSpec
    from logmirror.mirror.until import Until
    from logmirror.model import TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSpec:
    """One mirror's settings, as the loop uses them."""

    name: str
    source: ConnectionSettings
    """The source's cluster."""

    topic: str
    partitions: tuple[int, ...] | None
    """The replicated partitions. None: all, including those that are added later."""

    destinations: tuple[tuple[str, DestinationSpec], ...]
    """Effective name and settings of each destination."""

    chain_start: ChainStart

    until: Until | None = None
    """Where the copy ends. None: it does not."""


def flows_of(spec: MirrorSpec, numbers: Iterable[int]) -> list[tuple[FlowId, DestinationSpec]]:
    """Return the flow of each destination and each of these partitions, with its settings."""
    numbers = list(numbers)
    return [
        (FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n), written)
        for name, written in spec.destinations
        for n in numbers
    ]


def check_partitions(mirror: MirrorSpec, topic: TopicMetadata) -> Sequence[int]:
    """Return the partitions that a mirror replicates.

    Raises:
        UsageError: The topic has no such partition.
    """
    numbers = sorted(topic.partitions) if mirror.partitions is None else mirror.partitions
    missing = [n for n in numbers if n not in topic.partitions]
    if missing:
        raise UsageError(
            "the topic has no such partition",
            hint="correct `partition` or `partitions` of the mirror",
            mirror=mirror.name,
            topic=mirror.topic,
            missing=missing,
            partition_count=len(topic.partitions),
        )
    return numbers


def source_views(
    client: ClusterClient, partitions: set[TopicPartition], topic_id: bytes | None
) -> dict[TopicPartition, SourceView]:
    """Read log start and last stable offset of these partitions of one topic."""
    starts = client.list_offsets(partitions, EARLIEST)
    ends = client.list_offsets(partitions, LATEST)
    return {
        partition: SourceView(
            topic_id=topic_id, log_start=starts[partition], last_stable_offset=ends[partition]
        )
        for partition in partitions
    }


def compared_views(
    client: ClusterClient, topic: TopicMetadata, epochs: Mapping[TopicPartition, int]
) -> dict[TopicPartition, SourceView]:
    """As `source_views`, with leader epochs.

    Args:
        client: The source's cluster.
        topic: The topic's metadata.
        epochs: For each partition the leader epoch of the last copied batch; -1: unknown.
    """
    views = source_views(client, set(epochs), topic.topic_id)
    known = {partition: epoch for partition, epoch in epochs.items() if epoch >= 0}
    ends = client.epoch_ends(known) if known else {}
    return {
        partition: replace(
            view,
            leader_epoch=topic.partitions[partition.partition].leader_epoch,
            epoch_end=ends.get(partition),
        )
        for partition, view in views.items()
    }
