"""Sets the throttle time of an encoded response, in milliseconds (KIP-219).

Handlers encode it as 0. Most responses begin with it, Produce ends with it, some do not have it.
"""

from __future__ import annotations

import functools
from struct import Struct
from typing import Final

from logmirror.wire import serve_consumer_groups, serve_fetch, serve_produce
from logmirror.wire.serve_messages import MESSAGES

_INT32: Final = Struct(">i")
_HEADER_BYTES: Final = 8
"""The size of the frame, and the correlation ID."""

_FIELD: Final = "throttle_time_ms"


@functools.cache
def throttle_position(api_key: int, version: int) -> int | None:
    """Return where a frame has the throttle time; counted from its end if negative.

    None if the response does not have it, or has it behind fields of variable size.
    """
    if api_key == serve_produce.API_KEY:
        return serve_produce.THROTTLE_FROM_END[version >= serve_produce.FLEXIBLE_FROM]
    if api_key == serve_fetch.API_KEY:
        return _HEADER_BYTES + (version >= serve_fetch.FLEXIBLE_FROM)
    if api_key in {serve_consumer_groups.HEARTBEAT_KEY, serve_consumer_groups.DESCRIBE_KEY}:
        return _HEADER_BYTES + 1
    _, response = MESSAGES[api_key]
    first = next(name for name, field in response.fields.items() if field.for_version_q(version))
    if first != _FIELD:
        return None
    return _HEADER_BYTES + bool(response.flexible_version_q(version))


def set_throttle_time(frame: bytearray, api_key: int, version: int, delay_ms: int) -> None:
    """Set the throttle time of a response, if it has a place for it.

    Args:
        frame: The response, its size field included; of a Fetch, the part before the first records.
        api_key: Its API.
        version: Its version.
        delay_ms: The throttle time.
    """
    position = throttle_position(api_key, version)
    if position is not None:
        at = position if position >= 0 else len(frame) + position
        _INT32.pack_into(frame, at, delay_ms)
