"""Driver: flows into clusters at the source's offsets.

The position is the log end of the destination's partition (I1). The brokers' idempotent-producer
check keeps out earlier writers as long as the brokers have the producer's state. Without it, a flow
waits at its start for longer than a paused predecessor could still send, and then reads the log end
again; see docs/decisions/0004-kafka-destination.md.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.errors import InternalError, PositionError, UsageError
from logmirror.mirror.observer import Observer, flow_facts
from logmirror.mirror.ports import KafkaSpec
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
    from collections.abc import Callable, Collection, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.errors import LogmirrorError
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import (
        ChainStart,
        DestinationSpec,
        FlowId,
        Receipt,
        SliceResult,
        SourceView,
        Work,
    )

_LOG = logging.getLogger("logmirror.mirror")


LOG_INTERVAL_MS: Final = 10_000
"""Least interval between two log lines about the progress of a flow."""


class _Quiet(NamedTuple):
    """Since when the log of a flow without sequence check ends at a position."""

    at_ms: int
    position: int


class PreserveDestination:
    """A `Destination` whose replicas are partitions of other clusters, with the same offsets."""

    def __init__(
        self,
        client: Callable[[ConnectionSettings], ClusterClient],
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self._client, self._clock = client, clock
        self._observer = observer or Observer([], Recorder(), clock)
        self._producer_state_ages_ms: dict[ConnectionSettings, int] = {}
        self._sequence_checked: dict[FlowId, bool] = {}
        self._quiet_since: dict[FlowId, _Quiet] = {}
        self._progress: dict[FlowId, _Progress] = {}
        self._log_at_ms: dict[FlowId, int] = {}
        self._created: set[tuple[ConnectionSettings, str]] = set()

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> KafkaSpec:
        """See `Destination.prepare`: create or check the destination topic."""
        kafka = kafka_spec(spec)
        report = sync_topic(
            source,
            topic.name,
            self._client(kafka.cluster),
            kafka.topic,
            mode=kafka.topic_sync,
            replication_factor=kafka.replication_factor,
            timestamp_mode="source" if kafka.keeps_timestamps else "destination",
            partitions=partitions,
            clock=self._clock,
        )
        if report.created:
            self._created.add((kafka.cluster, kafka.topic))
        for finding in report.findings:
            level = logging.INFO if finding.severity == "note" else logging.WARNING
            facts = {"mirror": kafka.mirror, "topic": topic.name, "target_topic": kafka.topic}
            _LOG.log(level, "destination: %s", finding, extra={"facts": facts})
        if kafka.cluster not in self._producer_state_ages_ms:
            self._producer_state_ages_ms[kafka.cluster] = self._producer_state_age_ms(kafka.cluster)
        return dataclasses.replace(
            kafka,
            producer_state_age_ms=self._producer_state_ages_ms[kafka.cluster],
            max_message_bytes=self._max_message_bytes(kafka),
            source_id=topic.topic_id,
        )

    def _max_message_bytes(self, kafka: KafkaSpec) -> int:
        """The topic's `max.message.bytes`."""
        try:
            configs = self._client(kafka.cluster).describe_topic_configs(kafka.topic)
        except UsageError:
            return kafka.max_message_bytes  # no permission to read it
        return int(configs.get("max.message.bytes") or kafka.max_message_bytes)

    def _producer_state_age_ms(self, cluster: ConnectionSettings) -> int:
        """Half of the least `producer.id.expiration.ms` of the brokers."""
        try:
            brokers = self._client(cluster).admin.broker_configs().values()
        except UsageError:
            return PRODUCER_STATE_AGE_MS  # no permission to read it
        kept = [configs.get("producer.id.expiration.ms") for configs in brokers]
        return min((int(ms) // 2 for ms in kept if ms), default=PRODUCER_STATE_AGE_MS)

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: two requests per leader, for any number of flows."""
        del chain_start  # a replica begins at the source's log start offset
        kafka = kafka_spec(spec)
        client = self._client(kafka.cluster)
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
            is_created = (kafka.cluster, kafka.topic) in self._created
            is_new = is_created and ends[targets[flow]].end_offset == 0
            age_ms = kafka.producer_state_age_ms
            self._sequence_checked[flow] = is_new or is_sequence_checked(
                states[targets[flow]], now_ms, age_ms
            )
        return {flow: ends[targets[flow]].end_offset for flow in flows}

    def leader_epochs(
        self, spec: DestinationSpec, found: Mapping[FlowId, int | LogmirrorError | None]
    ) -> dict[FlowId, int]:
        """See `Destination.leader_epochs`: none, because the destination's leaders write their own.

        Instead, the last batch is compared at each start (`TailCheck`).
        """
        del spec, found
        return {}

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """See `Destination.check`.

        A position below the source's log start offset is accepted if the replica has no records,
        so that padding fills the offsets in between. The executor compares the last batch of a
        replica with the source before it writes; this does not.
        """
        kafka, position = kafka_spec(spec), found or 0
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
                "destination topic, or a transaction marker was duplicated there. Nothing was "
                "written; compare both topics.",
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
                    self._client(kafka.cluster),
                    where,
                    position,
                    view.log_start,
                    padding_producer_id(writer),
                )
            except PositionError as error:
                raise error.add_facts(**facts) from None
        return position

    def opened(self, state: FlowState) -> None:
        """See `Destination.opened`: without sequence check, wait for predecessors to finish.

        The flow starts when its log has not moved for the quiesce time, so that no predecessor can
        have a batch in flight. A live predecessor is not interrupted.
        """
        kafka = kafka_spec(state.destination)
        # Batches in flight for a deleted source topic have another producer ID, which is not
        # checked.
        if self._sequence_checked[state.flow] and state.topic_id == kafka.source_id:
            return
        wait_ms = quiesce_ms(kafka.max_message_bytes)
        now_ms, since = self._clock.monotonic_ms(), self._quiet_since.get(state.flow)
        if since is not None and since.position == state.position:
            waited_ms = now_ms - since.at_ms
            if wait_ms <= waited_ms <= 2 * wait_ms:
                return  # waited, and read the log end since
        self._quiet_since[state.flow] = _Quiet(now_ms, state.position)
        state.retry_at_ms = now_ms + wait_ms
        state.position_stale = True

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
        state.tail_checked |= result.tail_checked
        state.fenced |= result.fenced
        state.in_flight_max = result.in_flight_max
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
        where = target(kafka_spec(state.destination), state.flow)
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


def kafka_spec(spec: DestinationSpec) -> KafkaSpec:
    """The destination as a `KafkaSpec`."""
    if not isinstance(spec, KafkaSpec):
        raise InternalError("not a cluster", spec=type(spec).__name__)
    return spec
