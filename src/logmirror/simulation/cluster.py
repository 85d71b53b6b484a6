"""Simulated clusters: the interface of `ClusterClient` over one `Log` per topic.

`SourceView` is the source. `TargetView` is the destination: it also returns log end offsets and
producer states, and accepts batches and markers, whose responses can be lost or late.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, cast

from logmirror.cluster.client import EARLIEST, FetchResult
from logmirror.cluster.groups import Groups
from logmirror.cluster.lease import Lease
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.retry import NotFoundError
from logmirror.cluster.topology import PartitionMetadata, TopicMetadata
from logmirror.cluster.transactions import TransactionalProducer
from logmirror.errors import (
    FencedError,
    LogmirrorError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.simulation.pipelines import SourcePipeline, TargetPipeline
from logmirror.simulation.router import SimulatedRouter
from logmirror.simulation.world import write_under_faults
from logmirror.wire.messages import TOPIC_AUTHORIZATION_FAILED, api_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logmirror.cluster.admin import TxnMarker
    from logmirror.cluster.router import Router
    from logmirror.model import EpochEnd, TopicPartition
    from logmirror.simulation.log import Log
    from logmirror.simulation.topics import Topics
    from logmirror.simulation.world import Process

_BATCHES: Final = 3
"""Maximum number of batches in one fetch response."""


class _View(ABC):
    """The requests that both sides support.

    Args:
        process: The process that sends them.
        topics: The topics of the cluster.
    """

    def __init__(self, process: Process, topics: Topics) -> None:
        self._process, self._world, self._topics = process, process.world, topics
        self._router = cast("Router", SimulatedRouter(process, self._ask, topics))
        self.admin = self
        self.groups = Groups(self._router)

    @abstractmethod
    def _ask(self, words: str) -> None:
        """Send a request; raises UnavailableError if the cluster does not respond."""

    def _log(self, topic: str) -> Log:
        log = self._topics.logs.get(topic)
        if log is None:
            raise NotFoundError("no such topic", topic=topic)
        return log

    def topic(self, name: str) -> TopicMetadata:
        """See `ClusterClient.topic`."""
        self._ask("metadata")
        one = PartitionMetadata(leader=1, leader_epoch=self._log(name).epoch, error=0)
        return TopicMetadata(name=name, topic_id=self._topics.ids[name], partitions={0: one})

    def describe_topics(self, names: Iterable[str]) -> dict[str, TopicMetadata]:
        """See `ClusterClient.describe_topics`."""
        return {name: self.topic(name) for name in sorted(names)}

    def create_topic(self, name: str, **_settings: object) -> None:
        """See `Admin.create_topic`."""
        self._ask(f"create {name}")
        if not self._topics.create(name):
            raise UsageError("the topic exists", error="TOPIC_ALREADY_EXISTS")

    def list_offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool = True
    ) -> dict[TopicPartition, int]:
        """See `ClusterClient.list_offsets`."""
        self._ask("list offsets")
        logs = {each: self._log(each.topic) for each in partitions}
        if at == EARLIEST:
            return {each: log.start for each, log in logs.items()}
        return {each: _end(log, read_committed=read_committed) for each, log in logs.items()}

    def try_list_offsets(
        self, partitions: Iterable[TopicPartition], at: int
    ) -> dict[TopicPartition, int | LogmirrorError]:
        """See `ClusterClient.try_list_offsets`."""
        wanted = list(partitions)
        try:
            return {**self.list_offsets(wanted, at)}
        except LogmirrorError as error:
            return {each: error.copy() for each in wanted}

    def epoch_ends(
        self, epochs: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, EpochEnd | None]:
        """See `ClusterClient.epoch_ends`."""
        self._ask("epoch ends")
        return {each: self._log(each.topic).epoch_end(epoch) for each, epoch in epochs.items()}

    def fetch_ahead(  # noqa: B027  # only a hint
        self, partition: TopicPartition, offset: int, size: int, **more: object
    ) -> None:
        """See `ClusterClient.fetch_ahead`; does nothing."""

    def fetch(  # noqa: PLR0913  # the signature of the client
        self,
        partition: TopicPartition,
        offset: int,
        view: memoryview,
        *,
        topic_id: bytes | None,
        max_wait_ms: int = 500,
        read_committed: bool = True,
        last_epoch: int = -1,
    ) -> FetchResult:
        """See `ClusterClient.fetch`."""
        name = partition.topic
        self._ask(f"fetch {offset}")
        if max_wait_ms and offset >= _end(self._log(name), read_committed=read_committed):
            self._world.schedule.sleep_ms(max_wait_ms)
            self._ask("waited")
        log = self._log(name)
        if name in self._topics.unreadable:
            raise api_error(TOPIC_AUTHORIZATION_FAILED, action="could not fetch", topic=name)
        if topic_id is not None and topic_id != self._topics.ids[name]:
            raise PositionError("the topic was deleted and recreated")
        if not log.start <= offset <= log.end:
            raise PositionError(
                "the offset is outside the partition's log",
                offset=offset,
                log_start_offset=log.start,
                log_end_offset=log.end,
            )
        epoch = log.epoch_end(last_epoch) if 0 <= last_epoch <= log.epoch else None
        if epoch and (epoch.leader_epoch < last_epoch or epoch.end_offset < offset):
            return FetchResult(0, log.end, log.last_stable_offset, log.start, (), 0, epoch)
        end = _end(log, read_committed=read_committed)
        data = b"".join(log.read(offset, end, count=_BATCHES))
        if len(data) > len(view):
            return FetchResult(0, log.end, log.last_stable_offset, log.start, (), len(data))
        view[: len(data)] = data
        aborted = log.aborted_from(offset) if read_committed else ()
        return FetchResult(len(data), log.end, log.last_stable_offset, log.start, aborted, 0)

    def close(self) -> None:  # noqa: B027  # no connection is open
        """See `ClusterClient.close`."""


def _end(log: Log, *, read_committed: bool) -> int:
    return log.last_stable_offset if read_committed else log.end


class SourceView(_View):
    """The source, as one process sees it."""

    def __init__(self, process: Process) -> None:
        super().__init__(process, process.world.application.topics)

    def _ask(self, words: str) -> None:
        self._process.touch(f"source: {words}")
        if self._world.source_is_down:
            self._world.schedule.sleep_ms(1000)
            raise UnavailableError("the source did not respond in time")

    def describe_topic_configs(self, name: str) -> dict[str, str | None]:
        """See `ClusterClient.describe_topic_configs`."""
        del name
        self._ask("configs")
        return {"cleanup.policy": "compact" if self._world.application.compacts else "delete"}

    def describe_configs_of_topics(
        self, names: Iterable[str], keys: Iterable[str]
    ) -> dict[str, dict[str, str | None]]:
        """See `ClusterClient.describe_configs_of_topics`."""
        del keys
        return {name: self.describe_topic_configs(name) for name in names}

    def pipeline(self) -> SourcePipeline:
        """See `ClusterClient.pipeline`."""
        return SourcePipeline(self._process, self._topics)


class TargetView(_View):
    """The destination cluster, as one process sees it; also its administration.

    Args:
        process: The process that sends the requests.
        topics: The topics of the cluster.
        grants: Whether the process has ClusterAction.
    """

    def __init__(self, process: Process, topics: Topics, *, grants: bool) -> None:
        super().__init__(process, topics)
        self._grants = grants

    def _ask(self, words: str) -> None:
        self._process.touch(f"target: {words}")
        if self._world.is_down:
            self._world.schedule.sleep_ms(1000)
            raise UnavailableError("the destination did not respond in time")

    def describe_topic_configs(self, name: str) -> dict[str, str | None]:
        """See `ClusterClient.describe_topic_configs`."""
        del name
        self._ask("configs")
        return {"max.message.bytes": "1048588"}

    def broker_configs(self) -> dict[int, dict[str, str | None]]:
        """See `Admin.broker_configs`."""
        self._ask("broker configs")
        return {1: {"producer.id.expiration.ms": "86400000"}}

    def log_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        """See `ClusterClient.log_ends`."""
        self._ask("log ends")
        logs = {each: self._log(each.topic) for each in partitions}
        return {each: LogEnd(log.end, log.epoch) for each, log in logs.items()}

    def producer_states(
        self, producers: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, ProducerState | None]:
        """See `ClusterClient.producer_states`."""
        self._ask("producer states")
        found: dict[TopicPartition, ProducerState | None] = {}
        for each, producer in producers.items():
            memory = self._log(each.topic).producers.get(producer)
            found[each] = None
            if memory is not None:
                rest = (memory.last_sequence, memory.last_timestamp_ms, memory.coordinator_epoch)
                found[each] = ProducerState(memory.epoch, *rest)
        return found

    def pipeline(self, *, transactional_id: str | None = None) -> TargetPipeline:
        """See `ClusterClient.pipeline`."""
        del transactional_id  # each batch has its producer ID
        return TargetPipeline(self._process, self._topics)

    def has_leases(self) -> bool:
        """See `ClusterClient.has_leases`."""
        self._ask("versions")
        return True

    def lease(self, transactional_id: str) -> Lease:
        """See `ClusterClient.lease`."""
        return Lease(self._router, transactional_id)

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = 60_000
    ) -> TransactionalProducer:
        """See `ClusterClient.transactional_producer`."""
        return TransactionalProducer(self._router, transactional_id, timeout_ms=timeout_ms)

    # -- administration --------------------------------------------------------------------------

    def may_write_markers(self) -> bool:
        """See `Admin.may_write_markers`."""
        self._ask("operations")
        return self._grants

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """See `Admin.delete_records`."""
        self._ask("delete records")
        for partition, offset in before.items():
            self._log(partition.topic).delete_before(offset)
        return dict(before)

    def write_txn_markers(
        self,
        markers: Mapping[TopicPartition, Sequence[TxnMarker]],
        *,
        send_until_ms: int | None = None,
    ) -> dict[TopicPartition, LogmirrorError | None]:
        """See `Admin.write_txn_markers`."""
        self._ask("markers")
        if send_until_ms is not None and self._world.schedule.monotonic_ms() >= send_until_ms:
            raise UnavailableError("too late to send")
        now_ms = self._world.schedule.now_ms()

        def write(log: Log, each: Sequence[TxnMarker]) -> LogmirrorError | None:
            for marker in each:
                epoch = marker.coordinator_epoch
                name = (marker.producer_id, marker.producer_epoch)
                if not log.append_marker(*name, epoch, now_ms):
                    return FencedError("a later coordinator has written to this log")
            return None

        return {
            partition: write_under_faults(
                self._process,
                functools.partial(write, self._log(partition.topic), each),
                lambda response: response,
                lambda error: error,
            )
            for partition, each in markers.items()
        }
