"""Simulated produce pipelines, whose responses can be lost or late.

As with real brokers, the responses of one partition are in the order of its requests; between
partitions, the order is arbitrary. After a failure, nothing more is sent to a partition until the
failure was collected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Final, Self

from logmirror.cluster.produce_responses import NO_RESPONSE, ProduceResponse
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.simulation.world import write_under_faults
from logmirror.wire.messages import api_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.model import TopicPartition
    from logmirror.simulation.log import Appended
    from logmirror.simulation.topics import Topics
    from logmirror.simulation.world import Process

_SOON: Final = 0.5
"""Probability that a response has arrived at a non-blocking `collect`."""

_LOST: Final = 0.1
"""Probability that a write to the source gets no response; half of these are not performed."""


class _Pipeline(ABC):
    """See `ProducePipeline`.

    Args:
        process: The process that sends.
        topics: The topics of the cluster.
    """

    def __init__(self, process: Process, topics: Topics) -> None:
        self._process, self._world, self._topics = process, process.world, topics
        self._responses: dict[TopicPartition, deque[ProduceResponse]] = {}
        self._failed: set[TopicPartition] = set()

    @abstractmethod
    def _write(self, partition: TopicPartition, data: bytes) -> ProduceResponse:
        """Write a batch, subject to the pending faults."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See `ProducePipeline.close`; batches that were sent stay written."""
        self._responses.clear()
        self._failed.clear()

    def in_flight(self) -> int:
        """See `ProducePipeline.in_flight`."""
        return sum(map(len, self._responses.values()))

    def send(
        self,
        batches: Sequence[tuple[TopicPartition, memoryview]],
        *,
        not_after_ms: int | None = None,
    ) -> None:
        """See `ProducePipeline.send`."""
        self._process.touch(f"produce {[len(view) for _, view in batches]}")
        if not_after_ms is not None and self._world.schedule.monotonic_ms() >= not_after_ms:
            raise UnavailableError("too late to send")
        for partition, view in batches:
            if partition in self._failed:
                response = _failure(partition, UnavailableError("not sent after a failure"))
            else:
                response = self._write(partition, bytes(view))
            if response.error is not None:
                self._failed.add(partition)
            self._responses.setdefault(partition, deque()).append(response)

    def collect(self, *, block: bool) -> list[ProduceResponse]:
        """See `ProducePipeline.collect`."""
        chooser, waiting = self._world.chooser, list(self._responses)
        if not waiting or not (block or chooser.random() < _SOON):
            return []
        self._process.touch("responses")
        partition = waiting[chooser.randrange(len(waiting))] if len(waiting) > 1 else waiting[0]
        responses = self._responses[partition]
        found = responses.popleft()
        if not responses:
            del self._responses[partition]
            self._failed.discard(partition)
        return [found]

    def _responded(self, partition: TopicPartition, appended: Appended) -> ProduceResponse:
        code, base = appended
        error = api_error(code, action="could not write") if code else None
        return ProduceResponse(partition, code, base, -1, 0, error)


class TargetPipeline(_Pipeline):
    """Produces to the destination cluster."""

    def _write(self, partition: TopicPartition, data: bytes) -> ProduceResponse:
        if self._world.is_down:
            return _failure(partition, UnavailableError("the connection was closed"))
        return write_under_faults(
            self._process,
            lambda: self._topics.append(partition.topic, data),
            lambda appended: self._responded(partition, appended),
            lambda error: _failure(partition, error),
        )


class SourcePipeline(_Pipeline):
    """Produces to the source, for offset syncs."""

    def _write(self, partition: TopicPartition, data: bytes) -> ProduceResponse:
        chooser = self._world.chooser
        if self._world.source_is_down or partition.topic not in self._topics.logs:
            return _failure(partition, UnavailableError("the connection was closed"))
        is_lost = chooser.random() < _LOST
        if is_lost and chooser.random() < _SOON:
            return _failure(partition, OutcomeUnknownError("no response to a write"))
        appended = self._topics.append(partition.topic, data)
        if is_lost:
            return _failure(partition, OutcomeUnknownError("no response to a write"))
        return self._responded(partition, appended)


def _failure(partition: TopicPartition, error: LogmirrorError) -> ProduceResponse:
    code = error.facts.get("code", NO_RESPONSE)
    return ProduceResponse(partition, int(str(code)), -1, -1, -1, error)
