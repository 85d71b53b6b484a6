"""Receives fetch responses: the head is parsed, the records go straight into the caller's view.

Invariants:
1. A frame larger than the cap is refused before memory is allocated for it.
2. The records are received into the view without a copy, and without Python work per batch or
   record.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from logmirror.errors import CorruptionError
from logmirror.wire.fetch import Fetched, FetchHead, head_bytes_hint, parse_fetch_head

if TYPE_CHECKING:
    from logmirror.cluster.transport import Transport
    from logmirror.wire.fetch import Asked

_FRAME_SLACK_BYTES: Final = 1 << 20
"""What a fetch response may hold besides the records: the aborted transactions."""
_SLOWEST_BYTES_PER_MS: Final = 128
"""A transfer slower than 128 kB/s counts as broken; a large response may take its time."""
_INT: Final = struct.Struct(">i")


class FetchReceiver:
    """Receives the fetch responses of one connection.

    Args:
        transport: The connection's bytes.
        scratch: A buffer for heads, which the connection may use in between.
        frame_bytes_max: The largest frame, unless the view is larger.
    """

    def __init__(self, transport: Transport, scratch: memoryview, frame_bytes_max: int) -> None:
        self._transport, self._scratch = transport, scratch
        self._frame_bytes_max = frame_bytes_max

    def receive(self, asked: Asked, view: memoryview, *, others_follow: bool) -> Fetched:
        """Receive the response to a fetch.

        Args:
            asked: The fetch.
            view: Receives the records.
            others_follow: Whether bytes behind the response belong to another one.

        Raises:
            UnavailableError: No response in time, or the connection broke.
            CorruptionError: The bytes are not a response to this request.
        """
        request, version, correlation_id, deadline_ms = asked
        head_view = self._scratch
        wanted = head_bytes_hint(request, version)
        if others_follow:
            self._transport.receive(head_view, 0, _INT.size, deadline_ms)
            wanted = min(wanted, _INT.size + max(_INT.unpack_from(head_view)[0], 0))
            filled = self._transport.receive(head_view, _INT.size, wanted, deadline_ms)
        else:
            filled = self._transport.receive_some(head_view[:wanted], deadline_ms)
        while True:
            parsed = (
                parse_fetch_head(
                    request,
                    version=version,
                    correlation_id=correlation_id,
                    buffer=head_view,
                    filled=filled,
                )
                if filled >= _INT.size
                else _INT.size
            )
            if not isinstance(parsed, int):
                break
            if filled >= _INT.size:
                self._check_frame(_INT.unpack_from(head_view)[0], view)
            if parsed > len(head_view):  # many aborted transactions
                larger = memoryview(bytearray(max(parsed, 2 * len(head_view))))
                larger[:filled] = head_view[:filled]
                head_view = larger
            filled = self._transport.receive(head_view, filled, parsed, deadline_ms)
        return self._receive_records(parsed, head_view, filled, view, deadline_ms)

    def _check_frame(self, size: int, view: memoryview) -> None:
        cap = max(self._frame_bytes_max, len(view) + _FRAME_SLACK_BYTES)
        self._transport.check_frame(size, cap)

    def _receive_records(
        self,
        head: FetchHead,
        head_view: memoryview,
        filled: int,
        view: memoryview,
        deadline_ms: int,
    ) -> Fetched:
        frame_bytes = _INT.size + int(_INT.unpack_from(head_view)[0])
        self._check_frame(frame_bytes - _INT.size, view)
        if filled > frame_bytes:
            raise CorruptionError(
                "bytes follow a fetch response that no request explains",
                host=self._transport.host,
                port=self._transport.port,
            )
        deadline_ms += head.record_bytes // _SLOWEST_BYTES_PER_MS
        size = head.record_bytes
        if head.error_code or size > len(view):
            self._transport.discard(frame_bytes - filled, deadline_ms)
            return Fetched(head, 0, 0 if head.error_code else size)
        early = min(filled - head.head_bytes, size)
        view[:early] = head_view[head.head_bytes : head.head_bytes + early]
        self._transport.receive(view, early, size, deadline_ms)
        rest = frame_bytes - max(head.head_bytes + size, filled)
        if rest:
            self._transport.discard(rest, deadline_ms)
        return Fetched(head, size, 0)
