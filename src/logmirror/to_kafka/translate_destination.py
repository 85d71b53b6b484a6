"""Driver: flows into clusters at new offsets, of the records that a consumer sees.

The position is in the progress record of the last committed transaction (I1, `translate_progress`).
The run that started last owns its flows: it writes so to the progress topic once, at its start, and
a run that finds another owner there stops. So of two instances the newer one continues, and the
older one fences it at most once before it stops; see docs/decisions/0005-translate.md.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.cluster.new_topics import await_leader
from logmirror.cluster.offset_syncs import create_sync_topic
from logmirror.errors import (
    LogmirrorError,
    PositionError,
    UsageError,
)
from logmirror.mirror.ports import Begun
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.preserve_destination import PreserveDestination
from logmirror.to_kafka.translate_progress import (
    PROGRESS,
    PROGRESS_CONFIGS,
    PROGRESS_TOPIC,
    STALL_MS,
    ProgressReader,
    current,
    encode_owner,
    flow_key,
    taken_over,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.observer import Observer
    from logmirror.mirror.ports import ChainStart, FlowId, KafkaSpec, SourceView, Start
    from logmirror.to_kafka.preserve_destination import LaneClusters
    from logmirror.to_kafka.translate_progress import FlowKey

_LOG = logging.getLogger("logmirror.mirror")

_POLL_MS: Final = 100


class TranslateDestination(PreserveDestination):
    """A `Destination` whose replicas are partitions of another cluster, with new offsets.

    Args:
        spec: The destination.
        clusters: What the destinations of the lane share.
        writer_id: The ID of this run.
        observer: Receives events; None for no events.
    """

    def __init__(
        self,
        spec: KafkaSpec,
        clusters: LaneClusters,
        writer_id: str,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(spec, clusters, observer)
        self._writer_id = writer_id
        self._owned: set[FlowId] = set()
        self._target_id: bytes | None = None
        """The topic ID at the destination."""

    def prepare(
        self, source: ClusterClient, topic: TopicMetadata, partitions: Collection[int] | None
    ) -> None:
        """See `Destination.prepare`; creates the topics for progress and offset syncs as well."""
        super().prepare(source, topic, partitions)
        kafka, prepared = self.spec, self._clusters.prepared
        if kafka.cluster not in prepared:
            _create_progress_topic(self._client, kafka.replication_factor)
            await_leader(self._client, PROGRESS, self._clock, timeout_ms=STALL_MS)
            prepared.add(kafka.cluster)
        if (source, kafka.name) not in prepared:
            create_sync_topic(source, kafka.name, self._clock, mirror=kafka.mirror)
            prepared.add((source, kafka.name))

    def positions(
        self, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: one topic has the progress of all flows."""
        del chain_start  # a replica begins at the source's log start offset
        kafka, reader = self.spec, self._refreshed_reader()
        target_id = self._client.topic(kafka.topic).topic_id
        self._target_id = target_id
        reader.await_markers(flow_key(kafka, flow) for flow in flows)
        found: dict[FlowId, int | LogmirrorError | None] = {}
        for flow in flows:
            owner = reader.owner(flow_key(kafka, flow))
            if flow in self._owned and owner != self._writer_id:
                found[flow] = taken_over(flow, owner)
            else:
                progress = current(reader, kafka, flow, target_id)
                found[flow] = None if progress is None else progress.next_offset
        return found

    def leader_epoch(self, flow: FlowId, position: int) -> int:
        """See `Destination.leader_epoch`: the progress records hold them."""
        progress = self._reader.progress(flow_key(self.spec, flow))
        return progress.leader_epoch if progress and progress.next_offset == position else -1

    def check(self, flow: FlowId, found: int | None, view: SourceView) -> int:
        """See `Destination.check`; without progress, begin at the source's log start offset."""
        kafka = self.spec
        progress = self._reader.progress(flow_key(kafka, flow))
        if found is None or progress is None:
            self._check_not_renamed(flow, view)
        if found is None:
            return view.log_start
        facts = {
            "topic": flow.topic,
            "partition": flow.partition,
            "target_topic": kafka.topic,
            "position": found,
        }
        source_id = None if progress is None else progress.source_topic_id
        if source_id is not None and view.topic_id not in (None, source_id):
            raise PositionError(
                "the source topic is not the one that was copied",
                hint="it was recreated, or is in another cluster. The copied records are kept; "
                "copy the new topic with another mirror name, or into another topic.",
                reason="SourceRecreated",
                expected_topic_id=source_id.hex(),
                found_topic_id=(view.topic_id or b"").hex(),
                **facts,
            )
        if found > view.last_stable_offset:
            raise PositionError(
                "the source ends below the position",
                hint="it was truncated (unclean leader election, or a restored disk). The copied "
                "records are kept; compare them with the source first.",
                reason="SourceWentBackwards",
                expected=found,
                got=view.last_stable_offset,
                last_stable_offset=view.last_stable_offset,
                **facts,
            )
        if found < view.log_start:
            raise PositionError(
                "the source no longer has the next record: retention or DeleteRecords removed it",
                hint="the source has deleted the records between position and log_start. The "
                "copied records are kept; to copy the remaining ones, use another mirror name.",
                reason="SourceTrimmed",
                log_start=view.log_start,
                **facts,
            )
        return found

    def begin(self, flow: FlowId, start: Start) -> Begun:
        """See `Destination.begin`: write the owner record, once per run."""
        del start
        if flow not in self._owned:
            self._own(flow)
        return Begun()

    def _own(self, flow: FlowId) -> None:
        key = flow_key(self.spec, flow)
        batch = encode_owner(key, self._writer_id, self._clock.now_ms())
        with self._client.pipeline() as pipeline:
            pipeline.send([(PROGRESS, memoryview(batch))])
            (response,) = pipeline.collect(block=True)
        if response.error is not None:
            raise response.error
        self._owned.add(flow)
        failpoints.reach("translate.owned")

    def _key(self, flow: FlowId) -> FlowKey:
        return flow_key(self.spec, flow)

    @property
    def _reader(self) -> ProgressReader:
        """The reader of the cluster's progress, which `positions` has made."""
        return self._clusters.progress_readers[self.spec.cluster]

    def _refreshed_reader(self) -> ProgressReader:
        cluster, readers = self.spec.cluster, self._clusters.progress_readers
        if cluster not in readers:
            readers[cluster] = ProgressReader(self._client, clock=self._clock)
        return readers[cluster].refresh(may_be_missing=cluster not in self._clusters.prepared)

    def _check_not_renamed(self, flow: FlowId, view: SourceView) -> None:
        """Refuse a renamed mirror, which would copy the same records again."""
        kafka, target_id = self.spec, self._target_id
        for key, progress in self._reader.of_target(target(kafka, flow)):
            is_same = (progress.source_topic_id, progress.target_topic_id) == (
                view.topic_id,
                target_id,
            )
            if view.topic_id and target_id and is_same and key != flow_key(kafka, flow):
                raise PositionError(
                    "a mirror with another name has copied this topic to the same destination",
                    hint="restore the mirror's name, or copy into another topic: otherwise the "
                    "destination would have every record twice",
                    reason="MirrorRenamed",
                    topic=flow.topic,
                    partition=flow.partition,
                    target_topic=kafka.topic,
                    copied_by=key.mirror,
                    position=progress.next_offset,
                )


def _create_progress_topic(cluster: ClusterClient, replication_factor: int) -> None:
    try:
        cluster.admin.create_topic(
            PROGRESS_TOPIC,
            partition_count=1,
            replication_factor=replication_factor,
            configs=PROGRESS_CONFIGS,
        )
    except UsageError as error:
        if error.facts.get("error") == "TOPIC_ALREADY_EXISTS":
            return
        try:
            cluster.topic(PROGRESS_TOPIC)
        except UsageError:
            raise UsageError(
                f"the progress topic cannot be created: {error.message}",
                hint=f"create {PROGRESS_TOPIC} with one partition and cleanup.policy=compact, or "
                "allow its creation",
                **error.facts,
            ) from error
