"""Driver: one mirror, and what its source says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.errors import LogmirrorError, UsageError
from logmirror.mirror.ports import FlowId, SourceView

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.ports import ChainStart, DestinationSpec
    from logmirror.model import TopicPartition


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSpec:
    """One mirror as the loop sees it: addresses and rules, no secrets spelled out."""

    name: str
    source: ConnectionSettings
    topic: str
    partitions: tuple[int, ...] | None
    """None: all, also those that appear later."""

    destinations: tuple[tuple[str, DestinationSpec], ...]
    """Effective name, and how the copy is written there."""

    chain_start: ChainStart


def flows_of(spec: MirrorSpec, numbers: Iterable[int]) -> list[tuple[FlowId, DestinationSpec]]:
    """Each destination's flow of each of these partitions."""
    numbers = list(numbers)
    return [
        (FlowId(mirror=spec.name, destination=name, topic=spec.topic, partition=n), written)
        for name, written in spec.destinations
        for n in numbers
    ]


def check_partitions(mirror: MirrorSpec, topic: TopicMetadata) -> Sequence[int]:
    """The partitions that a mirror copies of its topic.

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


def position(found: int | LogmirrorError | None) -> int | None:
    """A position that was found; raises the error that was found instead."""
    if isinstance(found, LogmirrorError):
        raise found
    return found


def source_views(
    client: ClusterClient, partitions: set[TopicPartition], topic_id: bytes | None
) -> dict[TopicPartition, SourceView]:
    """What the source says of these partitions of one topic now."""
    starts = client.list_offsets(partitions, EARLIEST)
    ends = client.list_offsets(partitions, LATEST)
    return {
        partition: SourceView(
            topic_id=topic_id, log_start=starts[partition], last_stable_offset=ends[partition]
        )
        for partition in partitions
    }
