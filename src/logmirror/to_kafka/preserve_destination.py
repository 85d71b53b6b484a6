"""Driver: flows into clusters, at the source's offsets.

The position is the real log end of the destination's partition, nothing else (I1). Who wrote before
us is kept out by the broker's sequence guard, as long as the broker remembers the producer. Where
it does not, a flow waits at its start for longer than a predecessor that was paused could still
send what it had prepared, and then looks again; see docs/decisions/0004-kafka-destination.md.
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
    producer_id,
    quiesce_ms,
    target,
)
from logmirror.to_kafka.topic_setup import sync_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

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


TELL_MS: Final = 10_000
"""Between two log lines about the progress of a flow."""


class _Quiet(NamedTuple):
    """A flow without a guard has been seen to end there at that moment."""

    at_ms: int
    position: int


class KafkaCopies:
    """A `Destination` whose copies are partitions of other clusters."""

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
        self._tell_at_ms: dict[FlowId, int] = {}
        self._created: set[tuple[ConnectionSettings, str]] = set()

    def prepare(
        self,
        spec: DestinationSpec,
        source: ClusterClient,
        topic: TopicMetadata,
        partitions: Collection[int] | None,
    ) -> KafkaSpec:
        """See `Destination.prepare`: make or check the destination's topic."""
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
        """The largest batch that the topic takes."""
        try:
            configs = self._client(kafka.cluster).describe_topic_configs(kafka.topic)
        except UsageError:
            return kafka.max_message_bytes  # we may not see it
        return int(configs.get("max.message.bytes") or kafka.max_message_bytes)

    def _producer_state_age_ms(self, cluster: ConnectionSettings) -> int:
        """How old records may be for us to count on a broker's memory: half of what it keeps."""
        try:
            brokers = self._client(cluster).admin.broker_configs().values()
        except UsageError:
            return PRODUCER_STATE_AGE_MS  # we may not see it
        kept = [brokers_own.get("producer.id.expiration.ms") for brokers_own in brokers]
        return min((int(ms) // 2 for ms in kept if ms), default=PRODUCER_STATE_AGE_MS)

    def positions(
        self, spec: DestinationSpec, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`: two requests to each leader, for any number of flows."""
        del chain_start  # the copy begins where the source does
        kafka = kafka_spec(spec)
        client, of = self._client(kafka.cluster), {flow: target(kafka, flow) for flow in flows}
        guards = client.producer_states(
            {of[flow]: producer_id(kafka.topic, flow.partition, kafka.source_id) for flow in flows}
        )
        ends = client.log_ends(of.values())
        now_ms = self._clock.now_ms()
        for flow in flows:
            is_made = (kafka.cluster, kafka.topic) in self._created
            is_new = is_made and ends[of[flow]].end_offset == 0
            age_ms = kafka.producer_state_age_ms
            self._sequence_checked[flow] = is_new or is_sequence_checked(
                guards[of[flow]], now_ms, age_ms
            )
        return {flow: ends[of[flow]].end_offset for flow in flows}

    def check(
        self, spec: DestinationSpec, flow: FlowId, found: int | None, view: SourceView
    ) -> int:
        """See `Destination.check`.

        A position below the source's log start is let pass where the copy may still have to take
        the offsets that the source no longer has; who writes looks at what is there first.
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
                hint="the source was cut or created again, or someone else wrote to the "
                "destination's topic. Nothing was written; compare the two.",
                reason="SourceWentBackwards",
                expected=position,
                got=view.last_stable_offset,
                last_stable_offset=view.last_stable_offset,
                **facts,
            )
        if position < view.log_start and kafka.gaps == "fail":
            raise PositionError(
                "the source begins above the position of the copy, and `holes: fail` allows no "
                "offset without a record",
                hint="set `holes: markers` to let the copy begin where the source does",
                reason="SourceTrimmed",
                log_start=view.log_start,
                **facts,
            )
        return position

    def opened(self, state: FlowState) -> None:
        """See `Destination.opened`: wait for predecessors that no guard keeps out.

        Until nobody has written for so long that nobody can have anything on its way: whoever is
        alive is left alone.
        """
        kafka = kafka_spec(state.destination)
        # What is still on its way from a topic that is no more has another name than ours.
        if self._sequence_checked[state.flow] and state.topic_id == kafka.source_id:
            return
        wait_ms = quiesce_ms(kafka.max_message_bytes)
        now_ms, since = self._clock.monotonic_ms(), self._quiet_since.get(state.flow)
        if since is not None and since.position == state.position:
            waited_ms = now_ms - since.at_ms
            if wait_ms <= waited_ms <= 2 * wait_ms:
                return  # waited, and looked since
        self._quiet_since[state.flow] = _Quiet(now_ms, state.position)
        state.retry_at_ms = now_ms + wait_ms
        state.lost = True

    def drifted(self, state: FlowState) -> bool:
        """See `Destination.drifted`."""
        del state
        return False

    def commit(
        self, state: FlowState, works: Sequence[Work], results: Sequence[SliceResult]
    ) -> LogmirrorError | None:
        """See `Destination.commit`: what was acknowledged is there already."""
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
            told = self._progress.setdefault(state.flow, _Progress(receipt.covered.first))
            told.add(receipt)
            self._observer.copied(state.flow, receipt)
        self._tell(state)
        state.proven |= result.proven
        state.fenced |= result.fenced
        state.advance(result, position, self._clock.monotonic_ms())
        failpoints.reach("commit.done")
        return result.error

    def _tell(self, state: FlowState) -> None:
        """A log line for what was copied: at once, then at most every `TELL_MS` for each flow."""
        progress, now_ms = self._progress.get(state.flow), self._clock.monotonic_ms()
        is_last = state.target is not None
        if progress is None or not (is_last or now_ms >= self._tell_at_ms.get(state.flow, 0)):
            return
        del self._progress[state.flow]
        self._tell_at_ms[state.flow] = now_ms + TELL_MS
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
    """What was copied since it was last told."""

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
    """The destination of a flow into a cluster."""
    if not isinstance(spec, KafkaSpec):
        raise InternalError("not a cluster", spec=type(spec).__name__)
    return spec
