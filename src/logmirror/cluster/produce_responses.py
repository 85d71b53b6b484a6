"""The responses of a produce pipeline: exactly one per batch, in order for each partition.

Invariants:
1. Every batch that is added gets exactly one response. Those of one partition come in the order in
   which the batches were added.
2. The response of a batch that was not sent waits for those of the batches sent before it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from logmirror.cluster.produce_connection import ProduceConnection
    from logmirror.errors import LogmirrorError
    from logmirror.model import TopicPartition

NO_RESPONSE: Final = -2
"""`ProduceResponse.error_code` if no broker has responded; not a Kafka error code."""


class ProduceResponse(NamedTuple):
    """The outcome of one batch."""

    partition: TopicPartition
    error_code: int
    """Kafka's error code. 0: written. `NO_RESPONSE`: no response; see `error`."""
    base_offset: int
    """The offset of the first record. With an error it is -1 or what the broker says; see 7, 20."""
    log_append_time_ms: int
    """The broker's time on a topic with LogAppendTime, else -1. For a duplicate (error 0, nothing
    written again, the first base offset) Apache Kafka returns a time on every topic."""
    log_start_offset: int
    """The log start offset; -1 if the broker does not report it."""
    error: LogmirrorError | None
    """None: written. `OutcomeUnknownError`: read the log end. `UnavailableError`: not written. Its
    facts are `topic`, `partition`, and Kafka's `code` and `error` if there is one."""


class PendingResponses:
    """The batches of one pipeline whose responses were not collected yet."""

    def __init__(self) -> None:
        self._ready: list[ProduceResponse] = []
        self._counts: Counter[TopicPartition] = Counter()
        """Batches whose responses were not collected."""
        self._awaited: Counter[TopicPartition] = Counter()
        """Batches that were sent and have no response yet."""
        self._failed: Counter[TopicPartition] = Counter()
        """Failures that were not collected."""
        self._connection_of: dict[TopicPartition, ProduceConnection] = {}
        self._unsent: dict[TopicPartition, list[ProduceResponse]] = {}
        """Responses of unsent batches, which wait for those of the batches sent before."""

    @property
    def has_ready(self) -> bool:
        """Whether a response can be collected."""
        return bool(self._ready)

    def count(self, partition: TopicPartition | None = None) -> int:
        """The number of batches without a collected response: of a partition, or in all."""
        return self._counts.total() if partition is None else self._counts[partition]

    def has_failure(self, partition: TopicPartition) -> bool:
        """Whether a failure of the partition was not collected."""
        return bool(self._failed[partition])

    def connection_of(self, partition: TopicPartition) -> ProduceConnection | None:
        """The connection that carried the partition's uncollected batches."""
        return self._connection_of.get(partition)

    def add_sent(self, partition: TopicPartition, connection: ProduceConnection) -> None:
        """Add a batch that is sent over a connection."""
        self._counts[partition] += 1
        self._awaited[partition] += 1
        self._connection_of[partition] = connection

    def add_unsent(self, partition: TopicPartition, why: LogmirrorError) -> None:
        """Add a batch that cannot be sent."""
        self._counts[partition] += 1
        self._respond_unsent(partition, why)

    def respond(self, response: ProduceResponse) -> None:
        """Accept a broker's response to the oldest batch of its partition."""
        if response.error is not None:
            self._failed[response.partition] += 1
        self._ready.append(response)
        self._finish_one(response.partition)

    def lose(self, partition: TopicPartition, why: LogmirrorError) -> None:
        """Respond to a batch that was sent, and whose response is lost."""
        self._ready.append(self._failure(partition, why))
        self._finish_one(partition)

    def cut_off(self, partition: TopicPartition, why: LogmirrorError) -> None:
        """Respond to a batch that was added as sent, and was not sent whole."""
        self._respond_unsent(partition, why)
        self._finish_one(partition)

    def collect(self) -> list[ProduceResponse]:
        """Return the responses that are ready, each once."""
        responses, self._ready = self._ready, []
        for response in responses:
            self._counts[response.partition] -= 1
            if not self._counts[response.partition]:
                del self._counts[response.partition]
                self._connection_of.pop(response.partition, None)
            if response.error is not None:
                self._failed[response.partition] -= 1
        return responses

    def _respond_unsent(self, partition: TopicPartition, why: LogmirrorError) -> None:
        self._unsent.setdefault(partition, []).append(self._failure(partition, why))
        if not self._awaited[partition]:
            self._ready += self._unsent.pop(partition)

    def _failure(self, partition: TopicPartition, why: LogmirrorError) -> ProduceResponse:
        error = why.copy(topic=partition.topic, partition=partition.partition)
        self._failed[partition] += 1
        return ProduceResponse(partition, NO_RESPONSE, -1, -1, -1, error)

    def _finish_one(self, partition: TopicPartition) -> None:
        """Count one batch of the partition as finished."""
        self._awaited[partition] -= 1
        if not self._awaited[partition]:
            del self._awaited[partition]
            self._ready += self._unsent.pop(partition, ())
