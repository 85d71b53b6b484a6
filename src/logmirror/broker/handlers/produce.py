"""Produce (key 0, versions 3-11): appends record batches.

Batches are checked, assigned offsets and written when the request arrives. The response is sent
when the last of them is durable, for acks=1 as for acks=all: there is one replica. With acks=0
there is no response; the records become durable all the same.

Deviations from Kafka:

- The request's timeout is not used: a response before the flush could only mean "unknown", which
  the client's own timeout means already.
- A batch with the log-append-time bit is refused for every topic. Kafka refuses it for topics with
  `message.timestamp.type=LogAppendTime`; for others it clears the bit, which silently changes the
  timestamps of the records.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.batch_check import RefusedBatchError, check_batch, is_transactional, stamp
from logmirror.broker.log.partition_log import StorageError
from logmirror.broker.log.producer_state import RefusedSequenceError
from logmirror.broker.topics import TopicDeletedError
from logmirror.wire.serve_produce import (
    Produced,
    ProduceRequest,
    pack_produce_response,
    parse_produce,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.broker.broker import Broker
    from logmirror.broker.topics import Topic
    from logmirror.errors import LogmirrorError
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_LEGAL_ACKS: Final = (-1, 0, 1)


class ProduceResponse:
    """The response to one Produce request, which waits for the disk.

    Attributes:
        frame: The response frame. None until complete; empty for acks=0.
    """

    __slots__ = ("_acks", "_header", "_on_complete", "_topics", "_waiting", "frame")

    def __init__(self, header: RequestHeader, acks: int, on_complete: Callable[[], None]) -> None:
        self._header = header
        self._acks = acks
        self._on_complete = on_complete
        self._topics: list[tuple[str, list[Produced]]] = []
        self._waiting = 1
        self.frame: bytes | bytearray | None = None

    def add_topic(self, name: str) -> list[Produced]:
        """Add a topic; returns the list for the responses of its partitions."""
        responses: list[Produced] = []
        self._topics.append((name, responses))
        return responses

    def wait_for(self, responses: list[Produced]) -> Callable[[LogmirrorError | None], None]:
        """Wait for the partition that was added last; returns the callback for its outcome."""
        self._waiting += 1
        place = len(responses) - 1

        def outcome(failure: LogmirrorError | None) -> None:
            if failure is not None:
                gone = isinstance(failure, TopicDeletedError)
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if gone else _STORAGE
                responses[place] = Produced(responses[place].partition, code, -1, -1)
            self.release()

        return outcome

    def release(self) -> None:
        """Count one outcome; the last one encodes the frame."""
        self._waiting -= 1
        if self._waiting:
            return
        if self._acks == 0:
            self.frame = b""
        else:
            _, version, correlation_id = self._header
            self.frame = pack_produce_response(version, correlation_id, self._topics)
        self._on_complete()


_STORAGE: Final = ErrorCode.KAFKA_STORAGE_ERROR


def produce(
    broker: Broker, header: RequestHeader, frame: memoryview, on_complete: Callable[[], None]
) -> ProduceResponse:
    """Handle Produce.

    Args:
        broker: The broker.
        header: The request's header.
        frame: The request. Batch headers are changed in place; no reference to it is kept.
        on_complete: Called once when the response's `frame` is set, possibly before this returns.

    Raises:
        RemoteProtocolError: The frame is not a Produce request.
    """
    request = parse_produce(frame, header.version)
    refused = _refusal(request)
    response = ProduceResponse(header, request.acks, on_complete)
    for name, partitions in request.topics:
        topic = broker.topics.by_name.get(name)
        responses = response.add_topic(name)
        for number, records in partitions:
            if refused is not None:
                responses.append(Produced(number, refused, -1, -1))
            elif topic is None or not 0 <= number < len(topic.logs):
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                responses.append(Produced(number, code, -1, -1))
            else:
                _append(broker, topic, number, records, response, responses)
    response.release()
    return response


def _refusal(request: ProduceRequest) -> ErrorCode | None:
    """Return the error code of an invalid request, for all its partitions; None if it is valid."""
    if request.acks not in _LEGAL_ACKS:
        return ErrorCode.INVALID_REQUIRED_ACKS
    if request.transactional_id is not None:
        return ErrorCode.INVALID_TXN_STATE
    for _, partitions in request.topics:
        for _, records in partitions:
            if is_transactional(records):
                return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    return None


def _append(  # noqa: PLR0913, PLR0917  # one partition of a request
    broker: Broker,
    topic: Topic,
    number: int,
    records: memoryview | None,
    response: ProduceResponse,
    responses: list[Produced],
) -> None:
    log = topic.logs[number]
    append_time_ms = -1
    try:
        log.check_online()
        facts = check_batch(records, max_bytes=topic.configs.max_message_bytes)
        assert records is not None  # noqa: S101  # checked
        known = None
        if facts.producer_id >= 0:
            known = log.producers.find_duplicate(
                facts.producer_id, facts.producer_epoch, facts.base_sequence, facts.record_count
            )
        if known is None:
            if topic.configs.is_log_append_time:
                append_time_ms = broker.clock.now_ms()
                facts = stamp(records, facts, append_time_ms)
            base_offset = log.append(records, facts)
            end = log.log_end
        else:
            # A duplicate. It waits with the first attempt, if that is not durable yet. As in Kafka,
            # the timestamp in the response, that of the stored records, marks it as a duplicate.
            base_offset, end = known.base_offset, known.last_offset + 1
            append_time_ms = known.timestamp_ms
    except (RefusedBatchError, RefusedSequenceError) as refused:
        _LOG.info("%s-%d: refused a batch: %s", topic.name, number, refused)
        responses.append(Produced(number, refused.code, -1, -1))
        return
    except StorageError as error:
        _LOG.warning("%s-%d: %s", topic.name, number, error)
        responses.append(Produced(number, _STORAGE, -1, -1))
        return
    responses.append(Produced(number, 0, base_offset, log.log_start, append_time_ms))
    log.when_durable(end, response.wait_for(responses))
    broker.commits.schedule(log)
