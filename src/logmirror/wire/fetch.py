"""The client's Fetch (key 1, versions 4-16), encoded by hand: one partition per request.

Versions 4 to 12 name the topic, 13 to 16 give its ID. From 12 on the message is flexible: compact
lengths (unsigned varint of length + 1) and tagged fields. The response, in the order of the bytes:

    size                    int32
    correlation id          int32
    tagged fields           12+
    throttle ms             int32
    error code              int16   7+
    session id              int32   7+
    topic count             int32   12+: compact
    topic name or id        string  12: compact string, 13+: 16 bytes
    partition count         int32   12+: compact
    partition               int32
    error code              int16
    high watermark          int64
    last stable offset      int64
    log start offset        int64   5+
    aborted transactions    count, then int64 producer id, int64 first offset (12+: tagged fields)
    preferred read replica  int32   11+
    record size             int32   12+: compact
    -- here the head ends --
    records                 that many bytes
    tagged fields           12+: of partition, topic, response; the rest of the frame

Without records, the first tagged field of the partition may be a diverging epoch (KIP-595): the end
of the largest epoch that the log shares with the sender.

Invariants:
1. Records are neither read nor copied here: the caller receives them into its own buffer.
2. Every length is checked against the frame before it is used.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from logmirror.errors import CorruptionError
from logmirror.model import EpochEnd
from logmirror.wire.messages import FETCH

FETCH_VERSION_MIN: Final = 4
"""The first version with record batches of magic 2; older brokers are refused."""
FETCH_VERSION_BY_NAME_MAX: Final = 12
FETCH_VERSION_BY_ID_MIN: Final = 13
FETCH_VERSION_EPOCHS_MIN: Final = 12
"""The first version in which the broker compares `last_fetched_epoch` with its log."""
FETCH_VERSION_MAX: Final = 16

_FLEXIBLE: Final = 12
_UUID_BYTES: Final = 16
_LENGTH_BYTES: Final = 4
_VARINT_BYTES_MAX: Final = 5

_SIZE: Final = struct.Struct(">i")
_ABORTED: Final = struct.Struct(">qq")
_ABORTED_TAGGED: Final = struct.Struct(">qqx")
_DIVERGING_TAG: Final = 0
_DIVERGING: Final = struct.Struct(">iq")


class FetchRequest(NamedTuple):
    """A fetch of one partition."""

    topic: str
    topic_id: bytes | None
    """16 bytes; used from version 13 on."""
    partition: int
    leader_epoch: int
    """-1 if unknown. A broker with another epoch responds with an error."""
    offset: int
    max_bytes: int
    max_wait_ms: int
    min_bytes: int
    read_committed: bool
    """Whether to stop at the last stable offset and list the aborted transactions."""
    last_fetched_epoch: int = -1
    """The leader epoch of the batch before `offset`; -1 if unknown. Sent from version 12 on: a log
    that does not hold this epoch up to `offset` responds with `FetchHead.diverging`."""


class FetchHead(NamedTuple):
    """The part of a response before the records."""

    error_code: int
    high_watermark: int
    last_stable_offset: int
    """-1 if the broker does not report it."""
    log_start_offset: int
    """-1 if the broker does not report it, and always below version 5."""
    aborted: tuple[tuple[int, int], ...]
    """(producer ID, first offset) of each aborted transaction that overlaps the records."""
    record_bytes: int
    head_bytes: int
    """Size of the head in bytes, size field included: where the records begin in the frame. After
    an error the rest of the frame is undefined."""
    throttle_ms: int
    """How long the broker will not read the next request, in ms."""
    diverging: EpochEnd | None = None
    """Not None: the log does not hold `last_fetched_epoch` up to the offset of the request."""


class Fetched(NamedTuple):
    """A Fetch response whose records are in the caller's view."""

    head: FetchHead
    size: int
    """Bytes of records in the view. The last batch may be truncated; the first may begin before the
    requested offset."""
    needed_bytes: int
    """If not 0: the view was too small and is unchanged; it needs at least this many bytes."""


class Asked(NamedTuple):
    """A Fetch in flight, and the deadline of its response (monotonic clock)."""

    request: FetchRequest
    version: int
    correlation_id: int
    deadline_ms: int


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:  # noqa: PLR2004  # seven bits a byte
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_fetch(
    request: FetchRequest, *, version: int, correlation_id: int, client_id: bytes
) -> bytes:
    """Return the request frame, size field included.

    Args:
        request: The request.
        version: 4 to 12, or 13 to 16 with `request.topic_id`.
        correlation_id: Returned in the response.
        client_id: UTF-8.
    """
    flexible = version >= _FLEXIBLE
    parts = [
        struct.pack(">hhih", FETCH, version, correlation_id, len(client_id)),
        client_id,
        b"\0" if flexible else b"",
        b"" if version >= 15 else b"\xff\xff\xff\xff",  # noqa: PLR2004  # replica id -1: a consumer
        struct.pack(
            ">iiib",
            request.max_wait_ms,
            request.min_bytes,
            request.max_bytes,
            1 if request.read_committed else 0,
        ),
    ]
    if version >= 7:  # noqa: PLR2004  # session 0, epoch -1: no fetch session
        parts.append(struct.pack(">ii", 0, -1))
    parts.append(b"\x02" if flexible else b"\0\0\0\1")
    parts.append(_topic_bytes(request, version))
    parts.append(b"\x02" if flexible else b"\0\0\0\1")
    parts.append(struct.pack(">i", request.partition))
    if version >= 9:  # noqa: PLR2004  # the version that changed the layout
        parts.append(struct.pack(">i", request.leader_epoch))
    parts.append(struct.pack(">q", request.offset))
    if flexible:
        parts.append(struct.pack(">i", request.last_fetched_epoch))
    if version >= 5:  # noqa: PLR2004  # the version that changed the layout
        parts.append(b"\xff\xff\xff\xff\xff\xff\xff\xff")  # log start -1: for followers
    parts.append(struct.pack(">i", request.max_bytes))
    if flexible:
        parts.append(b"\0\0\1\1\0")  # no tags, no tags; no forgotten topics, no rack, no tags
    elif version >= 11:  # noqa: PLR2004  # the version that changed the layout
        parts.append(b"\0\0\0\0\0\0")
    elif version >= 7:  # noqa: PLR2004  # the version that changed the layout
        parts.append(b"\0\0\0\0")
    body = b"".join(parts)
    return _SIZE.pack(len(body)) + body


def _topic_bytes(request: FetchRequest, version: int) -> bytes:
    """Return the topic's name or ID as this version encodes it, in request and response."""
    if version >= FETCH_VERSION_BY_ID_MIN:
        if request.topic_id is None or len(request.topic_id) != _UUID_BYTES:
            message = f"fetch version {version} needs a topic id of 16 bytes"
            raise ValueError(message)
        return request.topic_id
    name = request.topic.encode()
    if version >= _FLEXIBLE:
        return _varint(len(name) + 1) + name
    return struct.pack(">h", len(name)) + name


def head_bytes_hint(request: FetchRequest, version: int) -> int:
    """Return the size for a first read: a head with records and without aborted transactions.

    It may include up to 4 bytes of records, because the last length is a varint of unknown size. A
    response with an error may be shorter.
    """
    return _fixed_bytes(version) + len(_topic_bytes(request, version))


def _fixed_bytes(version: int) -> int:
    if version >= _FLEXIBLE:
        return 4 + 4 + 1 + 4 + 2 + 4 + 1 + 1 + 4 + 2 + 8 + 8 + 8 + 1 + 4 + _VARINT_BYTES_MAX
    size = 4 + 4 + 4 + 4 + 4 + 4 + 2 + 8 + 8 + 4 + 4
    for since, extra in ((5, 8), (7, 6), (11, 4)):
        size += extra if version >= since else 0
    return size


class _MoreNeededError(Exception):
    """The head is incomplete; `args[0]` is the number of bytes of the frame needed to continue."""


class _Reader:
    """A cursor over the part of the frame that has arrived."""

    __slots__ = ("buffer", "filled", "frame", "position")

    def __init__(self, buffer: memoryview, filled: int) -> None:
        self.buffer = buffer
        self.filled = filled
        self.position = 0
        self.frame = _LENGTH_BYTES
        self.frame = _LENGTH_BYTES + int(self.take(">i")[0])

    def need(self, count: int) -> int:
        """Return the position of the next `count` bytes, and skip them."""
        begin, end = self.position, self.position + count
        if count < 0 or end > self.frame:
            message = "lengths in a Fetch response exceed its frame"
            raise CorruptionError(message, frame_bytes=self.frame, wanted=end)
        if end > self.filled:
            raise _MoreNeededError(end)
        self.position = end
        return begin

    def take(self, layout: str) -> tuple[int, ...]:
        return struct.unpack_from(layout, self.buffer, self.need(struct.calcsize(layout)))

    def bytes(self, count: int) -> bytes:
        begin = self.need(count)
        return bytes(self.buffer[begin : begin + count])

    def varint(self) -> int:
        value = 0
        for shift in range(0, 7 * _VARINT_BYTES_MAX, 7):
            byte = self.buffer[self.need(1)]
            value |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return value
        raise CorruptionError("varint in a Fetch response is longer than 5 bytes")

    def tags(self) -> None:
        for _ in range(self.varint()):
            self.varint()
            self.need(self.varint())

    def count(self, *, flexible: bool) -> int:
        """Return the length of an array or a byte string; -1 for null."""
        return self.varint() - 1 if flexible else self.take(">i")[0]


def parse_fetch_head(
    request: FetchRequest, *, version: int, correlation_id: int, buffer: memoryview, filled: int
) -> FetchHead | int:
    """Read the head of a response from the bytes that have arrived.

    Args:
        request: The request.
        version: The request's version.
        correlation_id: The request's correlation ID.
        buffer: The frame from its size field on.
        filled: Bytes of the frame that have arrived.

    Returns:
        The head; or the number of bytes of the frame, more than `filled`, that are needed. Call
        again, from the start, when they have arrived.

    Raises:
        CorruptionError: The response does not match the request, or is malformed.
    """
    try:
        return _parse(request, version, correlation_id, _Reader(buffer, filled))
    except _MoreNeededError as more:
        return int(more.args[0])


def _parse(request: FetchRequest, version: int, correlation_id: int, reader: _Reader) -> FetchHead:
    flexible = version >= _FLEXIBLE
    if (found := reader.take(">i")[0]) != correlation_id:
        raise CorruptionError(
            "response has another request's correlation ID", expected=correlation_id, found=found
        )
    if flexible:
        reader.tags()
    (throttle_ms,) = reader.take(">i")
    top_error = 0
    if version >= 7:  # noqa: PLR2004  # the version that changed the layout
        top_error, _session = reader.take(">hi")
    if (topics := reader.count(flexible=flexible)) != 1:
        if top_error and topics <= 0:
            return FetchHead(top_error, -1, -1, -1, (), 0, reader.position, throttle_ms)
        raise CorruptionError("Fetch response does not have exactly one topic", topic_count=topics)
    expected = _topic_bytes(request, version)
    if (name := reader.bytes(len(expected))) != expected:
        raise CorruptionError("Fetch response is for another topic", found=name.hex())
    partitions = reader.count(flexible=flexible)
    partition, error, high, stable = reader.take(">ihqq")
    if partitions != 1 or partition != request.partition:
        raise CorruptionError(
            "Fetch response is for another partition",
            partition_count=partitions,
            expected=request.partition,
            found=partition,
        )
    start = reader.take(">q")[0] if version >= 5 else -1  # noqa: PLR2004  # the version that changed the layout
    aborted = _aborted(reader, version, flexible=flexible)
    if version >= 11:  # noqa: PLR2004  # the version that changed the layout
        reader.need(4)
    size = max(reader.count(flexible=flexible), 0)
    _check_end(reader, size, flexible=flexible)
    error, records_at = error or top_error, reader.position
    diverging = None
    if not (error or size) and flexible and request.last_fetched_epoch >= 0:
        diverging = _diverging(reader)
    return FetchHead(error, high, stable, start, aborted, size, records_at, throttle_ms, diverging)


def _diverging(reader: _Reader) -> EpochEnd | None:
    """Read the tagged fields of a partition without records."""
    found = None
    for _ in range(reader.varint()):
        tag, size = reader.varint(), reader.varint()
        begin = reader.need(size)
        if tag == _DIVERGING_TAG:
            if size < _DIVERGING.size:
                raise CorruptionError("diverging epoch in a Fetch response is too short", size=size)
            found = EpochEnd(*_DIVERGING.unpack_from(reader.buffer, begin))
    return found if found is None or found.leader_epoch >= 0 else None


def _aborted(reader: _Reader, version: int, *, flexible: bool) -> tuple[tuple[int, int], ...]:
    count = reader.count(flexible=flexible)
    if count <= 0:
        return ()
    layout = _ABORTED_TAGGED if flexible else _ABORTED
    begin = reader.position
    # Including what follows the list, so that a long list is not read twice for a few more bytes.
    reader.need(count * layout.size + (4 if version >= 11 else 0) + (1 if flexible else 4))  # noqa: PLR2004  # the version that changed the layout
    reader.position = begin + count * layout.size
    data = reader.buffer[begin : reader.position]
    if not flexible or not any(bytes(data[_ABORTED.size :: layout.size])):
        return tuple((producer_id, first) for producer_id, first in layout.iter_unpack(data))
    # Entries with tagged fields, which no version has so far.
    reader.position = begin
    entries = []
    for _ in range(count):
        producer_id, first_offset = reader.take(">qq")
        entries.append((producer_id, first_offset))
        reader.tags()
    return tuple(entries)


def _check_end(reader: _Reader, size: int, *, flexible: bool) -> None:
    """Check that the records fit the frame; before version 12 they end it."""
    rest = reader.frame - reader.position - size
    if rest < 0 or (rest != 0 and not flexible):
        raise CorruptionError(
            "record size of a Fetch response does not match its frame",
            record_bytes=size,
            left_bytes=reader.frame - reader.position,
        )
