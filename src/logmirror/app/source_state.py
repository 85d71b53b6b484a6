"""Partitions at their source, as commands read them: for all flows of all mirrors at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.mirror.ports import SourceView

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.opening import Opening
    from logmirror.mirror.ports import FlowId, Start
    from logmirror.model import EpochEnd, TopicPartition


@dataclass(frozen=True, slots=True)
class SourceState:
    """State of one partition at one moment."""

    log_start: int
    last_stable_offset: int
    epoch_ends: Mapping[int, EpochEnd | None]
    """What the source reports of each leader epoch that was looked up."""

    is_compacted: bool
    """Whether the topic is compacted. Read only if a leader epoch is not in the log."""

    def start(self, flow: FlowId, opening: Opening, topic: TopicMetadata) -> Start:
        """Return where `run` would start a flow of this partition.

        Args:
            flow: The flow.
            opening: Its position, which was read before this state.
            topic: The topic's metadata.

        Raises:
            LogmirrorError: See `Opening.start`.
        """
        view = SourceView(
            topic_id=topic.topic_id,
            log_start=self.log_start,
            last_stable_offset=self.last_stable_offset,
            leader_epoch=topic.partitions[flow.partition].leader_epoch,
            epoch_end=self.epoch_ends.get(opening.epoch(flow)),
        )
        return opening.start(flow, view, compacted=self.is_compacted)


def read_states(
    client: ClusterClient, wanted: Mapping[TopicPartition, set[int]]
) -> dict[TopicPartition, SourceState]:
    """Read the state of partitions, with two requests per leader and one for each round of epochs.

    Args:
        client: The source's cluster.
        wanted: The partitions, each with the leader epochs of the batches that were copied last;
            -1: unknown.

    Raises:
        LogmirrorError: A partition does not exist, or the source did not respond.
    """
    starts = client.list_offsets(wanted, EARLIEST)
    ends = client.list_offsets(wanted, LATEST)
    epoch_ends: dict[TopicPartition, dict[int, EpochEnd | None]] = {each: {} for each in wanted}
    for epochs in _rounds(wanted):
        for partition, end in client.epoch_ends(epochs).items():
            epoch_ends[partition][epochs[partition]] = end
    unknown = {
        partition.topic
        for partition, found in epoch_ends.items()
        for epoch, end in found.items()
        if end is not None and end.leader_epoch != epoch
    }
    policies = {name: client.describe_topic_configs(name).get("cleanup.policy") for name in unknown}
    return {
        partition: SourceState(
            log_start=starts[partition],
            last_stable_offset=ends[partition],
            epoch_ends=epoch_ends[partition],
            is_compacted="compact" in (policies.get(partition.topic) or ""),
        )
        for partition in wanted
    }


def _rounds(wanted: Mapping[TopicPartition, set[int]]) -> Iterator[dict[TopicPartition, int]]:
    """Yield each known epoch of each partition, with one epoch per partition at a time."""
    known = {each: sorted(epochs - {-1}) for each, epochs in wanted.items()}
    for number in range(max(map(len, known.values()), default=0)):
        yield {each: epochs[number] for each, epochs in known.items() if number < len(epochs)}
