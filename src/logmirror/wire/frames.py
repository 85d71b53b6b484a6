"""Request frames as a server receives them: framing, request header, and a cursor for the fields.

    frame     int32 size | request header | body          size counts everything after itself
    header    int16 api key | int16 version | int32 correlation id | client id | (tagged fields)

The bytes come from untrusted clients. Four rules hold:

1. Every length and count is compared with the rest of the frame before it is used. One that the
   frame cannot hold ends the connection and allocates nothing. (A codec that reserves memory for
   the announced count can be crashed by a frame of thirty bytes.)
2. The size of a frame is checked when its first eight bytes have arrived. The buffer grows with the
   bytes that arrive, not with the announced size.
3. The entries of all arrays of a frame together have a limit (`MAX_ENTRIES`).
4. A malformed frame is a `RemoteProtocolError`, which ends that connection and no other.

Bytes after the last field are ignored, as in Kafka: librdkafka sends some after a Metadata request
for all topics.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable

_INT8: Final = struct.Struct(">b")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_FLOAT64: Final = struct.Struct(">d")
_HEADER: Final = struct.Struct(">hhi")

HEADER_BYTES: Final = 8
"""API key, version and correlation ID: the smallest request."""

FIRST_BUFFER_BYTES: Final = 16 * 1024
KEPT_BUFFER_BYTES: Final = 2 * 1024 * 1024
READ_AHEAD_BYTES: Final = 64 * 1024
MAX_ENTRIES: Final = 50_000
"""Limit for the array entries and tagged fields of one frame, all levels together. A request for
20,000 partitions of as many topics has 40,000."""

_MAX_VARINT_BYTES: Final = 5
_SIZE_BYTES: Final = 4


class RemoteProtocolError(CorruptionError):
    """The peer sent a malformed or unsupported request; only its own connection ends."""


class RequestHeader(NamedTuple):
    """The fixed part of every request header."""

    api_key: int
    version: int
    correlation_id: int


def read_header(frame: memoryview) -> RequestHeader:
    """Read the first eight bytes of a frame."""
    if len(frame) < HEADER_BYTES:
        message = "frame is shorter than a request header"
        raise RemoteProtocolError(message, frame_bytes=len(frame))
    return RequestHeader(*_HEADER.unpack_from(frame, 0))


class Cursor:
    """Reads one frame's fields in order; every read is checked against the frame's end."""

    __slots__ = ("_data", "_end", "_entries_left", "position")

    def __init__(self, data: memoryview, position: int = 0) -> None:
        self._data = data
        self._end = len(data)
        self._entries_left = MAX_ENTRIES
        self.position = position

    @property
    def remaining(self) -> int:
        """The number of unread bytes."""
        return self._end - self.position

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes without copying them."""
        start = self.position
        stop = start + size
        if size < 0 or stop > self._end:
            message = "field exceeds its frame"
            raise RemoteProtocolError(message, position=start, size=size, frame_bytes=self._end)
        self.position = stop
        return self._data[start:stop]

    def _number(self, layout: struct.Struct) -> int:
        start = self.position
        if start + layout.size > self._end:
            message = "frame ends inside a number"
            raise RemoteProtocolError(message, position=start, frame_bytes=self._end)
        self.position = start + layout.size
        value: int = layout.unpack_from(self._data, start)[0]
        return value

    def int8(self) -> int:
        """Read a signed 8-bit integer."""
        return self._number(_INT8)

    def int16(self) -> int:
        """Read a signed 16-bit integer. All integers are big-endian."""
        return self._number(_INT16)

    def int32(self) -> int:
        """Read a signed 32-bit integer."""
        return self._number(_INT32)

    def int64(self) -> int:
        """Read a signed 64-bit integer."""
        return self._number(_INT64)

    def float64(self) -> float:
        """Read a 64-bit floating-point number, possibly infinite or not a number."""
        value: float = _FLOAT64.unpack(self.take(_FLOAT64.size))[0]
        return value

    def uvarint(self) -> int:
        """Read an unsigned varint of at most 32 bits (five bytes)."""
        value = 0
        start = self.position
        if start < self._end and (byte := self._data[start]) < 0x80:  # noqa: PLR2004  # see below
            self.position = start + 1
            return byte  # most have one byte
        for index in range(min(_MAX_VARINT_BYTES, self._end - start)):
            byte = self._data[start + index]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:  # noqa: PLR2004  # the bit that says more follows
                if value > 0xFFFFFFFF:  # noqa: PLR2004  # 32 bits
                    break
                self.position = start + index + 1
                return value
        message = "varint is malformed or exceeds 32 bits"
        raise RemoteProtocolError(message, position=start)

    def count(self, *, compact: bool, least_bytes: int = 1) -> int:
        """Read the length of an array; -1 stands for null.

        Args:
            compact: Whether this version of the message is flexible.
            least_bytes: The smallest size of one element. A count that the rest of the frame cannot
                hold is refused before memory is allocated.
        """
        start = self.position
        found = self.uvarint() - 1 if compact else self.int32()
        if found < -1 or found * least_bytes > self.remaining:
            message = "array count exceeds what its frame can hold"
            raise RemoteProtocolError(message, position=start, count=found)
        self._take_entries(max(0, found))
        return found

    def _take_entries(self, count: int) -> None:
        self._entries_left -= count
        if self._entries_left < 0:
            message = "request has more entries than allowed"
            raise RemoteProtocolError(message, position=self.position, max_entries=MAX_ENTRIES)

    def string(self, *, compact: bool) -> str | None:
        """Read a string; None for null.

        Raises:
            RemoteProtocolError: Too long for the frame, or not UTF-8.
        """
        start = self.position
        size = self.uvarint() - 1 if compact else self.int16()
        if size == -1:
            return None
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            message = "string is not UTF-8"
            raise RemoteProtocolError(message, position=start) from None

    def name(self, *, compact: bool) -> str:
        """Read a string that must not be null."""
        start = self.position
        found = self.string(compact=compact)
        if found is None:
            message = "string must not be null"
            raise RemoteProtocolError(message, position=start)
        return found

    def blob(self, *, compact: bool) -> memoryview | None:
        """Read bytes without copying them; None for null."""
        size = self.uvarint() - 1 if compact else self.int32()
        return None if size == -1 else self.take(size)

    def tagged_fields(self, known: Callable[[int, Cursor], None] | None = None) -> None:
        """Read the tagged fields that end every flexible structure.

        Args:
            known: Called with each tag and a cursor over its bytes.

        Raises:
            RemoteProtocolError: The tags do not ascend, or one occurs twice.
        """
        count = self.count_of_tags()
        last = -1
        for _ in range(count):
            tag = self.uvarint()
            if tag <= last:
                message = "tagged fields do not ascend"
                raise RemoteProtocolError(message, position=self.position, tag=tag)
            last = tag
            content = self.take(self.uvarint())
            if known is not None:
                known(tag, Cursor(content))

    def count_of_tags(self) -> int:
        """Read the number of tagged fields; each takes at least two bytes."""
        start = self.position
        found = self.uvarint()
        if not found:
            return 0
        if found * 2 > self.remaining:
            message = "more tagged fields than the frame can hold"
            raise RemoteProtocolError(message, position=start, count=found)
        self._take_entries(found)
        return found


def body_cursor(frame: memoryview, *, flexible: bool) -> Cursor:
    """Return a cursor at the start of the body.

    The client ID is not compact, even in flexible headers. It is checked and ignored.
    """
    cursor = Cursor(frame, HEADER_BYTES)
    cursor.string(compact=False)
    if flexible:
        cursor.tagged_fields()
    return cursor


def read_client_id(frame: memoryview) -> str:
    """Read the client ID of a request; empty if it has none."""
    return Cursor(frame, HEADER_BYTES).string(compact=False) or ""


def pack_uvarint(value: int) -> bytes:
    """Return an unsigned varint."""
    out = bytearray()
    while value > 0x7F:  # noqa: PLR2004  # seven bits a byte
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class FrameBuffer:
    """Collects a connection's bytes and returns whole frames, without copying them.

    A frame is a view of this buffer, valid until the next `free_space`.

    Args:
        limit_of: Returns the size limit of a frame in bytes, by API key.

    Attributes:
        is_raw: Whether frames have no request header: the tokens of SASL after a SaslHandshake of
            version 0. Their limit is that of API key -1.
    """

    def __init__(self, limit_of: Callable[[int], int]) -> None:
        self._limit_of = limit_of
        self._data = bytearray(FIRST_BUFFER_BYTES)
        self._view = memoryview(self._data)
        self._start = 0
        self._end = 0
        self._needed = _SIZE_BYTES
        self.is_raw = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes that arrived and were not returned yet."""
        return self._end - self._start

    @property
    def capacity_bytes(self) -> int:
        """The buffer's current size."""
        return len(self._data)

    @property
    def needed_bytes(self) -> int:
        """Size of the next frame, size field included; 4 if unknown."""
        return self._needed

    def free_space(self) -> memoryview:
        """Return the buffer for the next bytes, never empty.

        It ends shortly after the awaited frame, because bytes beyond a frame are moved to the front
        later.
        """
        have = self.buffered_bytes
        if have == 0:
            self._start = self._end = 0
            if len(self._data) > KEPT_BUFFER_BYTES:
                self._replace(FIRST_BUFFER_BYTES)
        if self._end == len(self._data) or self._start + self._needed > len(self._data):
            # Twice what arrived, so that an announced size alone reserves nothing.
            wanted = min(max(self._needed, have) + READ_AHEAD_BYTES, 2 * have)
            self._replace(max(wanted, len(self._data)))
        return self._view[self._end : self._end + max(self._needed - have, READ_AHEAD_BYTES)]

    def _replace(self, capacity_bytes: int, *, is_new: bool = False) -> None:
        have = self.buffered_bytes
        if capacity_bytes == len(self._data) and not is_new:
            self._data[:have] = self._data[self._start : self._end]
        else:
            data = bytearray(capacity_bytes)
            data[:have] = self._view[self._start : self._end]
            self._data, self._view = data, memoryview(data)
        self._start, self._end = 0, have

    def received(self, size: int) -> None:
        """Count `size` bytes as written to `free_space`."""
        self._end += size

    def next_frame(self) -> memoryview | None:
        """Return the next frame without its size field, or None if it is incomplete.

        Raises:
            RemoteProtocolError: The size is negative, too small for a request, or over the limit.
        """
        have = self.buffered_bytes
        if have < _SIZE_BYTES:
            self._needed = _SIZE_BYTES
            return None
        size = _INT32.unpack_from(self._data, self._start)[0]
        if size < (0 if self.is_raw else HEADER_BYTES):
            message = "frame is shorter than a request header"
            raise RemoteProtocolError(message, frame_bytes=size)
        if not self.is_raw and have < _SIZE_BYTES + HEADER_BYTES:
            self._needed = _SIZE_BYTES + HEADER_BYTES
            return None
        api_key = -1
        if not self.is_raw:
            api_key = _INT16.unpack_from(self._data, self._start + _SIZE_BYTES)[0]
        if size > (limit := self._limit_of(api_key)):
            message = "frame exceeds the size limit for this API"
            raise RemoteProtocolError(
                message, api_key=api_key, frame_bytes=size, max_frame_bytes=limit
            )
        self._needed = _SIZE_BYTES + size
        if have < self._needed:
            return None
        first = self._start + _SIZE_BYTES
        self._start += self._needed
        self._needed = _SIZE_BYTES
        return self._view[first : first + size]

    def detach(self) -> int:
        """Leave the buffer to the frame that `next_frame` just returned; it stays valid.

        Unread bytes move to a new buffer. Returns the size of the buffer that was left.
        """
        left_bytes = len(self._data)
        have = self.buffered_bytes
        self._replace(max(FIRST_BUFFER_BYTES, have), is_new=True)
        return left_bytes

    def put_back(self, frame: memoryview) -> None:
        """Undo the `next_frame` that just returned this frame."""
        self._start -= _SIZE_BYTES + len(frame)
