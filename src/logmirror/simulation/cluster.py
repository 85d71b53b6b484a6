"""Clusters as one process sees them: what `ClusterClient` offers, answered from a `Log`.

`SourceView` is the cluster that is copied. `TargetView` is the one that receives a copy: it also
says where logs really end and what leaders remember of producers, and takes batches and markers,
whose answers may be lost or late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final

from logmirror.cluster.client import EARLIEST, FetchResult
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.produce import NO_ANSWER, ProduceAnswer
from logmirror.cluster.topology import PartitionMetadata, TopicMetadata
from logmirror.errors import (
    FencedError,
    LogmirrorError,
    PositionError,
    UnavailableError,
)
from logmirror.simulation.coordinator import SimulatedFence, SimulatedProducer
from logmirror.simulation.world import written
from logmirror.wire.messages import api_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logmirror.cluster.admin import TxnMarker
    from logmirror.model import TopicPartition
    from logmirror.simulation.coordinator import Transactions
    from logmirror.simulation.log import Log
    from logmirror.simulation.world import Process


TOPIC: Final = "orders"

_BATCHES: Final = 3
"""In one answer to a fetch."""


class _View(ABC):
    """What both sides have in common."""

    def __init__(self, process: Process) -> None:
        self._process, self._world = process, process.world

    @property
    @abstractmethod
    def _log(self) -> Log:
        """The log that is looked at."""

    @property
    @abstractmethod
    def _topic_id(self) -> bytes:
        """Of its topic."""

    @abstractmethod
    def _ask(self, words: str) -> None:
        """Ask the cluster something; raises where it does not answer."""

    def topic(self, name: str) -> TopicMetadata:
        """See `ClusterClient.topic`."""
        self._ask("metadata")
        one = PartitionMetadata(leader=1, leader_epoch=self._log.epoch, error=0)
        return TopicMetadata(name=name, topic_id=self._topic_id, partitions={0: one})

    def describe_topics(self, names: Iterable[str]) -> dict[str, TopicMetadata]:
        """See `ClusterClient.describe_topics`."""
        return {name: self.topic(name) for name in sorted(names)}

    def list_offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool = True
    ) -> dict[TopicPartition, int]:
        """See `ClusterClient.list_offsets`."""
        del read_committed
        self._ask("list offsets")
        log = self._log
        return dict.fromkeys(partitions, log.start if at == EARLIEST else log.stable_end)

    def fetch_ahead(  # noqa: B027  # a hint, of which nothing follows here
        self, partition: TopicPartition, offset: int, size: int, *, topic_id: bytes | None
    ) -> None:
        """See `ClusterClient.fetch_ahead`; nothing is asked ahead."""

    def fetch(
        self,
        partition: TopicPartition,
        offset: int,
        view: memoryview,
        *,
        topic_id: bytes | None,
        max_wait_ms: int = 500,
    ) -> FetchResult:
        """See `ClusterClient.fetch`."""
        del partition
        self._ask(f"fetch {offset}")
        if max_wait_ms and offset >= self._log.stable_end:
            self._world.schedule.sleep_ms(max_wait_ms)
            self._ask("waited")
        log = self._log
        if topic_id is not None and topic_id != self._topic_id:
            raise PositionError("the topic was deleted and created again")
        if not log.start <= offset <= log.end:
            raise PositionError(
                "the offset is outside the partition's log",
                offset=offset,
                log_start_offset=log.start,
                log_end_offset=log.end,
            )
        data = b"".join(log.read(offset, count=_BATCHES))
        if len(data) > len(view):
            return FetchResult(0, log.end, log.stable_end, log.start, (), len(data))
        view[: len(data)] = data
        aborted = log.aborted_from(offset)
        return FetchResult(len(data), log.end, log.stable_end, log.start, aborted, 0)

    def close(self) -> None:  # noqa: B027  # nothing is open
        """See `ClusterClient.close`."""


class SourceView(_View):
    """The source, as one process sees it."""

    @property
    def _log(self) -> Log:
        return self._world.application.log

    @property
    def _topic_id(self) -> bytes:
        return self._world.application.topic_id

    def _ask(self, words: str) -> None:
        self._process.touch(f"source: {words}")
        if self._world.source_is_down:
            self._world.schedule.sleep_ms(1000)
            raise UnavailableError("the source did not answer in time")

    def describe_topic_configs(self, name: str) -> dict[str, str | None]:
        """See `ClusterClient.describe_topic_configs`."""
        del name
        self._ask("configs")
        return {"cleanup.policy": "compact" if self._world.application.compacts else "delete"}


class TargetView(_View):
    """The cluster that receives a copy, as one process sees it; also its administration.

    Args:
        process: Whose view it is.
        log: Of the one partition that is copied.
        transactions: What the cluster's coordinators know.
        grants: Whether markers may be asked for.
    """

    def __init__(
        self, process: Process, log: Log, transactions: Transactions, *, grants: bool
    ) -> None:
        super().__init__(process)
        self._target, self._transactions, self._grants = log, transactions, grants
        self.admin = self

    @property
    def _log(self) -> Log:
        return self._target

    @property
    def _topic_id(self) -> bytes:
        return bytes([200]) * 16

    def _ask(self, words: str) -> None:
        self._process.touch(f"target: {words}")
        if self._world.is_down:
            self._world.schedule.sleep_ms(1000)
            raise UnavailableError("the destination did not answer in time")

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
        return {each: LogEnd(self._target.end, self._target.epoch) for each in partitions}

    def producer_states(
        self, producers: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, ProducerState | None]:
        """See `ClusterClient.producer_states`."""
        self._ask("producer states")
        found: dict[TopicPartition, ProducerState | None] = {}
        for each, producer in producers.items():
            memory = self._target.producers.get(producer)
            found[each] = None
            if memory is not None:
                told = (memory.last_sequence, memory.last_timestamp_ms, memory.coordinator_epoch)
                found[each] = ProducerState(memory.epoch, *told)
        return found

    def pipeline(self) -> TargetPipeline:
        """See `ClusterClient.pipeline`."""
        return TargetPipeline(self._process, self._target)

    def has_fences(self) -> bool:
        """See `ClusterClient.has_fences`."""
        self._ask("versions")
        return True

    def fence(self, transactional_id: str) -> SimulatedFence:
        """See `ClusterClient.fence`."""
        return SimulatedFence(self._process, self._ask, self._transactions, transactional_id)

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int
    ) -> SimulatedProducer:
        """See `ClusterClient.transactional_producer`."""
        del timeout_ms
        return SimulatedProducer(self._process, self._ask, self._transactions, transactional_id)

    # -- administration --------------------------------------------------------------------------

    def may_write_markers(self) -> bool:
        """See `Admin.may_write_markers`."""
        self._ask("operations")
        return self._grants

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """See `Admin.delete_records`."""
        self._ask("delete records")
        for offset in before.values():
            self._target.delete_before(offset)
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
        log, now_ms = self._target, self._world.schedule.now_ms()

        def write(each: Sequence[TxnMarker]) -> LogmirrorError | None:
            for marker in each:
                epoch = marker.coordinator_epoch
                name = (marker.producer_id, marker.producer_epoch)
                if not log.append_marker(*name, epoch, now_ms):
                    return FencedError("a later coordinator has written here")
            return None

        return {
            partition: written(
                self._process,
                lambda each=each: write(each),  # type: ignore[misc]  # bound at once
                lambda answer: answer,
                lambda error: error,
            )
            for partition, each in markers.items()
        }


class TargetPipeline:
    """See `ProducePipeline`: batches on their way to one leader."""

    def __init__(self, process: Process, log: Log) -> None:
        self._process, self._world, self._log = process, process.world, log
        self._answers: deque[ProduceAnswer] = deque()
        self._is_cut = False

    def send(
        self, batches: Sequence[tuple[TopicPartition, memoryview]], *, not_after_ms: int
    ) -> None:
        """See `ProducePipeline.send`."""
        self._process.touch(f"produce {[len(view) for _, view in batches]}")
        if self._world.schedule.monotonic_ms() >= not_after_ms:
            raise UnavailableError("too late to send")
        for partition, view in batches:
            self._answers.append(self._produce(partition, bytes(view)))

    def _produce(self, partition: TopicPartition, data: bytes) -> ProduceAnswer:
        def answered(answer: tuple[int, int]) -> ProduceAnswer:
            code, base = answer
            error = api_error(code, action="could not write") if code else None
            return ProduceAnswer(partition, code, base, -1, 0, error)

        def failed(error: LogmirrorError) -> ProduceAnswer:
            code = error.facts.get("code", NO_ANSWER)
            self._is_cut = True  # what is behind it on the same connection goes with it
            return ProduceAnswer(partition, int(str(code)), -1, -1, -1, error)

        if self._is_cut or self._world.is_down:
            return failed(UnavailableError("the connection is gone"))
        return written(self._process, lambda: self._log.append(data), answered, failed)

    def collect(self, *, block: bool) -> list[ProduceAnswer]:
        """See `ProducePipeline.collect`."""
        if not self._answers or not (block or self._world.chooser.random() < 0.5):  # noqa: PLR2004  # how often
            return []
        self._process.touch("answers")
        found = [self._answers.popleft()]
        if not self._answers:
            self._is_cut = False
        return found
