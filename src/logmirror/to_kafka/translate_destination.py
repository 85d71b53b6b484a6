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
from logmirror.cluster.client import LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import LogmirrorError, PositionError, UnavailableError, UsageError
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.offset_syncs import create_sync_topic
from logmirror.to_kafka.preserve_destination import PreserveDestination, kafka_spec
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
    from collections.abc import Callable, Collection, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.mirror.observer import Observer
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import ChainStart, DestinationSpec, FlowId, KafkaSpec, SourceView

_LOG = logging.getLogger("logmirror.mirror")

_POLL_MS: Final = 100


class TranslateDestination(PreserveDestination):
    """A `Destination` whose replicas are partitions of other clusters, with new offsets.

    Args:
        client: Returns the client of a cluster, opened on first use.
        clock: Time.
        writer_id: The ID of this run.
        observer: Receives events; None for no events.
    """

    def __init__(
        self,
        client: Callable[[ConnectionSettings], ClusterClient],
        clock: Clock,
        writer_id: str,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(client, clock, observer)
        self._writer_id = writer_id
        self._readers: dict[ConnectionSettings, ProgressReader] = {}
        self._owned: set[FlowId] = set()
        self._prepared: set[object] = set()
        """Clusters with a progress topic, and pairs of source and destination name with a topic for
        syncs."""

        self._target_ids: dict[tuple[ConnectionSettings, str], bytes | None] = {}

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> KafkaSpec:
        """See `Destination.prepare`; creates the topics for progress and offset syncs as well."""
        kafka = super().prepare(spec, source, topic, partitions)
        if kafka.cluster not in self._prepared:
            cluster = self._client(kafka.cluster)
            _create_progress_topic(cluster, kafka.replication_factor)
            _await_progress_topic(cluster, self._clock)
            self._prepared.add(kafka.cluster)
        if (source, kafka.name) not in self._prepared:
            create_sync_topic(source, kafka.name, mirror=kafka.mirror)
            self._prepared.add((source, kafka.name))
        return kafka

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: one topic has the progress of all flows."""
        del chain_start  # a replica begins at the source's log start offset
        kafka = kafka_spec(spec)
        reader = self._reader(kafka)
        target_id = self._client(kafka.cluster).topic(kafka.topic).topic_id
        self._target_ids[(kafka.cluster, kafka.topic)] = target_id
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

    def leader_epochs(
        self, spec: DestinationSpec, found: Mapping[FlowId, int | LogmirrorError | None]
    ) -> dict[FlowId, int]:
        """See `Destination.leader_epochs`: the progress records hold them."""
        kafka = kafka_spec(spec)
        epochs = {}
        for flow, position in found.items():
            progress = self._readers[kafka.cluster].progress(flow_key(kafka, flow))
            if progress and progress.leader_epoch >= 0 and progress.next_offset == position:
                epochs[flow] = progress.leader_epoch
        return epochs

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """See `Destination.check`; without progress, begin at the source's log start offset."""
        kafka = kafka_spec(spec)
        if found is None:
            self._check_not_renamed(kafka, flow, view)
            return view.log_start
        facts = {
            "topic": flow.topic,
            "partition": flow.partition,
            "target_topic": kafka.topic,
            "position": found,
        }
        progress = self._readers[kafka.cluster].progress(flow_key(kafka, flow))
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

    def opened(self, state: FlowState) -> None:
        """See `Destination.opened`: write the owner record, once per run."""
        if state.flow in self._owned:
            return
        kafka = kafka_spec(state.destination)
        key = flow_key(kafka, state.flow)
        batch = encode_owner(key, self._writer_id, self._clock.now_ms())
        with self._client(kafka.cluster).pipeline() as pipeline:
            pipeline.send([(PROGRESS, memoryview(batch))])
            (response,) = pipeline.collect(block=True)
        if response.error is not None:
            raise response.error
        self._owned.add(state.flow)
        failpoints.reach("translate.owned")

    def _reader(self, kafka: KafkaSpec) -> ProgressReader:
        reader = self._readers.get(kafka.cluster)
        if reader is None:
            reader = ProgressReader(self._client(kafka.cluster), clock=self._clock)
            self._readers[kafka.cluster] = reader
        return reader.refresh(may_be_missing=kafka.cluster not in self._prepared)

    def _check_not_renamed(self, kafka: KafkaSpec, flow: FlowId, view: SourceView) -> None:
        """Refuse a renamed mirror, which would copy the same records again."""
        reader = self._readers[kafka.cluster]
        target_id = self._target_ids[(kafka.cluster, kafka.topic)]
        for key, progress in reader.of_target(target(kafka, flow)):
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


def _await_progress_topic(cluster: ClusterClient, clock: Clock) -> None:
    """Wait until the brokers return the topic's metadata, and its leader serves requests."""
    deadline_ms = clock.monotonic_ms() + STALL_MS
    while True:
        try:
            cluster.topic(PROGRESS_TOPIC)
            cluster.list_offsets([PROGRESS], LATEST)
        except (NotFoundError, UnavailableError):
            if clock.monotonic_ms() > deadline_ms:
                raise
            clock.sleep_ms(_POLL_MS)
        else:
            return


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
