"""Driver: flows into clusters at the source's offsets.

The position is the log end of the destination's partition (I1). The brokers' idempotent-producer
check keeps out earlier writers as long as the brokers have the producer's state. Without it, a flow
waits at its start for longer than a paused predecessor could still send, and then reads the log end
again; see docs/decisions/0004-kafka-destination.md.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import InternalError, PositionError, UsageError
from logmirror.mirror.observer import Observer, flow_facts
from logmirror.mirror.ports import Begun
from logmirror.monitoring.metrics import Recorder
from logmirror.to_kafka.idempotence import (
    PRODUCER_STATE_AGE_MS,
    is_sequence_checked,
    padding_producer_id,
    producer_id,
    quiesce_ms,
    target,
)
from logmirror.to_kafka.topic_setup import sync_topic
from logmirror.to_kafka.trimmed import check_trimmed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import (
        ChainStart,
        FlowId,
        KafkaSpec,
        Receipt,
        SliceResult,
        SourceView,
        Start,
        Work,
    )
    from logmirror.to_kafka.translate_progress import ProgressReader

_LOG = logging.getLogger("logmirror.mirror")


LOG_INTERVAL_MS: Final = 10_000
"""Least interval between two log lines about the progress of a flow."""


class _Quiet(NamedTuple):
    """Since when the log of a flow without sequence check ends at a position."""

    at_ms: int
    position: int


@dataclass(slots=True)
class LaneClusters:
    """What the destinations of a lane share: clients, and what is read once for each cluster."""

    client: Callable[[ConnectionSettings], ClusterClient]
    """Returns the client of a cluster, opened on first use."""

    clock: Clock
    producer_state_ages_ms: dict[ConnectionSettings, int] = field(default_factory=dict)
    """How long each cluster keeps a producer's state; see `KafkaSpec.producer_state_age_ms`."""

    created: set[tuple[ConnectionSettings, str]] = field(default_factory=set)
    """The destination topics that this process created."""

    progress_readers: dict[ConnectionSettings, ProgressReader] = field(default_factory=dict)
    """`offsets: translate`: the reader of each cluster's progress topic."""

    prepared: set[object] = field(default_factory=set)
    """`offsets: translate`: clusters with a progress topic, and pairs of source and destination
    name with a topic for syncs."""


class PreserveDestination:
    """A `Destination` whose replicas are partitions of another cluster, with the same offsets.

    Args:
        spec: The destination.
        clusters: What the destinations of the lane share.
        observer: Receives events; None for no events.
    """

    def __init__(
        self, spec: KafkaSpec, clusters: LaneClusters, observer: Observer | None = None
    ) -> None:
        self.spec = spec
        self._clusters, self._clock = clusters, clusters.clock
        self._observer = observer or Observer([], Recorder(), clusters.clock)
        self._source_ids: dict[FlowId, bytes | None] = {}
        """The topic ID of the source when each flow was opened first."""

        self._sequence_checked: dict[FlowId, bool] = {}
        self._quiet_since: dict[FlowId, _Quiet] = {}
        self._progress: dict[FlowId, _Progress] = {}
        self._log_at_ms: dict[FlowId, int] = {}

    @property
    def _client(self) -> ClusterClient:
        return self._clusters.client(self.spec.cluster)

    def prepare(
        self, source: ClusterClient, topic: TopicMetadata, partitions: Collection[int] | None
    ) -> None:
        """See `Destination.prepare`: create or check the destination topic."""
        kafka, ages_ms = self.spec, self._clusters.producer_state_ages_ms
        report = sync_topic(
            source,
            topic.name,
            self._client,
            kafka.topic,
            mode=kafka.topic_sync,
            replication_factor=kafka.replication_factor,
            timestamp_mode="source" if kafka.keeps_timestamps else "destination",
            partitions=partitions,
            clock=self._clock,
        )
        if report.created:
            self._clusters.created.add((kafka.cluster, kafka.topic))
        for finding in report.findings:
            level = logging.INFO if finding.severity == "note" else logging.WARNING
            facts = {"mirror": kafka.mirror, "topic": topic.name, "target_topic": kafka.topic}
            _LOG.log(level, "destination: %s", finding, extra={"facts": facts})
        if kafka.cluster not in ages_ms:
            ages_ms[kafka.cluster] = self._producer_state_age_ms()
        self.spec = dataclasses.replace(
            kafka,
            producer_state_age_ms=ages_ms[kafka.cluster],
            max_message_bytes=self._max_message_bytes(),
            source_id=topic.topic_id,
            topic_id=self._topic_id(),
        )

    def _topic_id(self) -> bytes | None:
        try:
            return self._client.topic(self.spec.topic).topic_id
        except NotFoundError:
            return None  # `topic-sync: off`: `positions` reports it

    def _max_message_bytes(self) -> int:
        """The topic's `max.message.bytes`."""
        try:
            configs = self._client.describe_topic_configs(self.spec.topic)
        except UsageError:
            return self.spec.max_message_bytes  # no permission to read it
        return int(configs.get("max.message.bytes") or self.spec.max_message_bytes)

    def _producer_state_age_ms(self) -> int:
        """Half of the least `producer.id.expiration.ms` of the brokers."""
        try:
            brokers = self._client.admin.broker_configs().values()
        except UsageError:
            return PRODUCER_STATE_AGE_MS  # no permission to read it
        kept = [configs.get("producer.id.expiration.ms") for configs in brokers]
        return min((int(ms) // 2 for ms in kept if ms), default=PRODUCER_STATE_AGE_MS)

    def positions(
        self, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: two requests per leader, for any number of flows."""
        del chain_start  # a replica begins at the source's log start offset
        kafka, client = self.spec, self._client
        targets = {flow: target(kafka, flow) for flow in flows}
        states = client.producer_states(
            {
                targets[flow]: producer_id(kafka.topic, flow.partition, kafka.source_id)
                for flow in flows
            }
        )
        ends = client.log_ends(targets.values())
        now_ms = self._clock.now_ms()
        for flow in flows:
            is_created = (kafka.cluster, kafka.topic) in self._clusters.created
            is_new = is_created and ends[targets[flow]].end_offset == 0
            age_ms = kafka.producer_state_age_ms
            self._sequence_checked[flow] = is_new or is_sequence_checked(
                states[targets[flow]], now_ms, age_ms
            )
        return {flow: ends[targets[flow]].end_offset for flow in flows}

    def leader_epoch(self, flow: FlowId, position: int) -> int:
        """See `Destination.leader_epoch`: none, because the destination's leaders write their own.

        Instead, the last batch is compared at each start (`TailCheck`).
        """
        del flow, position
        return -1

    def check(self, flow: FlowId, found: int | None, view: SourceView) -> int:
        """See `Destination.check`.

        A position below the source's log start offset is accepted if the replica has no records,
        so that padding fills the offsets in between. The executor compares the last batch of a
        replica with the source before it writes; this does not.
        """
        kafka, position = self.spec, found or 0
        facts = {
            "topic": flow.topic,
            "partition": flow.partition,
            "target_topic": kafka.topic,
            "position": position,
        }
        if position > view.last_stable_offset:
            raise PositionError(
                "the destination's log ends beyond the source's",
                hint="the source was truncated or recreated, or another client wrote to the "
                "destination topic, or a transaction marker was duplicated there. If the topic "
                "is mirrored back after a failover, the destination has records that the source "
                "never got: copy into another topic (docs/fail-over.md#fail-back). Nothing was "
                "written.",
                reason="SourceWentBackwards",
                expected=position,
                got=view.last_stable_offset,
                last_stable_offset=view.last_stable_offset,
                **facts,
            )
        if position < view.log_start and kafka.gaps == "fail":
            raise PositionError(
                "the source's log start offset is above the position, and `holes: fail` does not "
                "allow an offset gap",
                hint="set `holes: markers` to begin the replica at the source's log start offset",
                reason="SourceTrimmed",
                log_start=view.log_start,
                **facts,
            )
        if 0 < position < view.log_start:
            where = target(kafka, flow)
            writer = producer_id(where.topic, where.partition, view.topic_id)
            try:
                check_trimmed(
                    self._client,
                    where,
                    position,
                    view.log_start,
                    padding_producer_id(writer),
                )
            except PositionError as error:
                raise error.add_facts(**facts) from None
        return position

    def begin(self, flow: FlowId, start: Start) -> Begun:
        """See `Destination.begin`: without sequence check, wait for predecessors to finish.

        The flow starts when its log has not moved for the quiesce time, so that no predecessor can
        have a batch in flight. A live predecessor is not interrupted.
        """
        source_id = self._source_ids.setdefault(flow, self.spec.source_id)
        # Batches in flight for a deleted source topic have another producer ID, which is not
        # checked.
        if self._sequence_checked[flow] and start.view.topic_id == source_id:
            return Begun()
        wait_ms = quiesce_ms(self.spec.max_message_bytes)
        now_ms, since = self._clock.monotonic_ms(), self._quiet_since.get(flow)
        if since is not None and since.position == start.position:
            waited_ms = now_ms - since.at_ms
            if wait_ms <= waited_ms <= 2 * wait_ms:
                return Begun()  # waited, and read the log end since
        self._quiet_since[flow] = _Quiet(now_ms, start.position)
        return Begun(wait_ms=wait_ms)

    def drifted(self, state: FlowState) -> bool:
        """See `Destination.drifted`."""
        del state
        return False

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """See `Destination.commit`: acknowledged records are durable already."""
        del works
        (result,) = results
        failpoints.reach("commit.received")
        position = state.position
        for receipt in result.receipts:
            if receipt.covered.first != position:
                raise InternalError(
                    "a receipt does not continue the position",
                    position=position,
                    first=receipt.covered.first,
                )
            position = receipt.covered.next_offset
            progress = self._progress.setdefault(state.flow, _Progress(receipt.covered.first))
            progress.add(receipt)
            self._observer.copied(state.flow, receipt)
        self._log_progress(state)
        state.advance(result, position, self._clock.monotonic_ms())
        failpoints.reach("commit.done")
        return result.error

    def _log_progress(self, state: FlowState) -> None:
        """Log what was copied: at once, then at most every `LOG_INTERVAL_MS` for each flow."""
        progress, now_ms = self._progress.get(state.flow), self._clock.monotonic_ms()
        is_last = state.target is not None
        if progress is None or not (is_last or now_ms >= self._log_at_ms.get(state.flow, 0)):
            return
        del self._progress[state.flow]
        self._log_at_ms[state.flow] = now_ms + LOG_INTERVAL_MS
        where = target(self.spec, state.flow)
        _LOG.info(
            "copied",
            extra={
                "facts": {
                    **flow_facts(state.flow),
                    "path": f"{where.topic}/{where.partition}",
                    "from": progress.first,
                    "to": progress.last,
                    "count": progress.record_count,
                    "bytes": progress.size,
                    "elapsed_ms": progress.elapsed_ms,
                    "interval_ms": self._observer.interval_ms(state.flow),
                    "trigger": "arrival",
                }
            },
        )


@dataclass(slots=True)
class _Progress:
    """What was copied since the last log line."""

    first: int
    last: int = -1
    record_count: int = 0
    size: int = 0
    elapsed_ms: int = 0

    def add(self, receipt: Receipt) -> None:
        self.last = receipt.covered.last
        self.record_count += receipt.record_count
        self.size += receipt.object_bytes
        self.elapsed_ms += receipt.elapsed_ms
