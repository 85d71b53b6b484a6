"""Requests of producers to an owner of a bucket, handled by the product's own code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from kit.runs.bucket_reads import MARKERS
from logmirror.broker.handlers.produce import ProduceResponse, _append
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.reading import StorageError
from logmirror.broker.transactions.markers import marker_epoch
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.frames import RequestHeader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kit.runs.bucket_brokers import Owner
    from logmirror.broker.log.partition_transactions import Marker
    from logmirror.errors import LogmirrorError
    from logmirror.wire.serve_produce import Produced

_MAX_BYTES: Final = 10_000
_HEADER: Final = RequestHeader(0, 9, 0)


def produce(
    owner: Owner, number: int, data: bytes, values: list[bytes], done: Callable[[Produced], None]
) -> None:
    """Handle a batch of an idempotent producer.

    Args:
        owner: The owner.
        number: The partition.
        data: The batch.
        values: Those of its records.
        done: Called with the response, unless the owner crashes before.
    """
    topic = owner.topics.by_name["t"]
    broker: Any = SimpleNamespace(commits=owner.commits)

    def complete() -> None:
        if not owner.is_dead:
            done(responses[0])

    response = ProduceResponse(_HEADER, -1, complete)
    responses = response.add_topic(topic.name)
    records = memoryview(bytearray(data))
    checked = check_batch(records, max_bytes=_MAX_BYTES)
    _append(broker, topic, number, records, checked, response, responses)
    if not responses[0].error:
        _expect(owner, number, responses[0].base_offset, values)
    response.release()


def mark(
    owner: Owner,
    number: int,
    marker: Marker,
    ended_ms: int,
    done: Callable[[LogmirrorError | None], None],
) -> None:
    """Append a transaction marker, if it is not there, as the coordinator does.

    Args:
        owner: The owner.
        number: The partition.
        marker: The marker.
        ended_ms: When its transaction has ended; it identifies the transaction.
        done: Called when the marker is durable, or with the failure, unless the owner crashes.
    """
    log = owner.logs[number]
    prepared: Any = SimpleNamespace(producer_id=marker.producer_id, ended_ms=ended_ms)
    try:
        log.check_online()
        epoch = marker_epoch(log.producers, prepared)
        if epoch is not None:
            at = log.append_marker(marker._replace(coordinator_epoch=epoch), ended_ms)
            kind = MarkerType.COMMIT if marker.is_commit else MarkerType.ABORT
            _expect(owner, number, at, [MARKERS[kind]])
    except StorageError as error:
        done(error)
        return
    log.when_durable(log.log_end, lambda failure: None if owner.is_dead else done(failure))
    owner.commits.schedule(log)


def _expect(owner: Owner, number: int, first: int, values: Sequence[bytes]) -> None:
    """Report what was appended, and when it is durable."""

    def durable(failure: LogmirrorError | None) -> None:
        if failure is None and not owner.is_dead:
            for offset, value in enumerate(values, first):
                owner.sink.durable(owner, number, offset, value)

    for offset, value in enumerate(values, first):
        owner.sink.appended(number, offset, value)
    owner.logs[number].when_durable(first + len(values), durable)
    owner.commits.schedule(owner.logs[number])
