"""When a log is flushed, if not before each response: `flush-on-ack: false`.

Such a log serves records once they are written to the page cache. It acknowledges them then, too,
except for those of a transaction. So a power loss may take away acknowledged records, `kill -9` may
not. The rule bounds how many: by bytes and offsets of a partition, by the age of its oldest record
that is not flushed, and by `unflushed_limit` in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from logmirror.broker.topic_configs import NEVER
from logmirror.clock import SYSTEM_CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushRule:
    """A topic's rule.

    Attributes:
        messages: Offsets that may be unflushed. 1: a record is flushed before its response.
        bytes: Bytes of a partition that may be unflushed.
        age_ms: Age of the oldest unflushed record at which it is flushed.
    """

    messages: int = 1
    bytes: int = NEVER
    age_ms: int = NEVER

    @property
    def on_ack(self) -> bool:
        """Whether a record is flushed before its response."""
        return self.messages == 1

    def is_due(self, unflushed: Unflushed, offset_count: int, now_ms: int) -> bool:
        """Whether so much must be flushed now."""
        if unflushed.size_bytes >= self.bytes or offset_count >= self.messages:
            return True
        due_ms = self.due_ms(unflushed)
        return due_ms is not None and now_ms >= due_ms

    def due_ms(self, unflushed: Unflushed) -> int | None:
        """Return when the oldest record must be flushed; None if no flush is needed for it."""
        since_ms = unflushed.since_ms
        return None if since_ms is None else since_ms + self.age_ms


class Unflushed:
    """What a log has written and not flushed.

    Attributes:
        since_ms: When the oldest record that is in no flush yet was written, in ms of the monotonic
            clock; None: there is none.
    """

    __slots__ = ("_flushed_bytes", "_written_bytes", "since_ms")

    def __init__(self) -> None:
        self._written_bytes = self._flushed_bytes = 0
        self.since_ms: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that are not flushed."""
        return self._written_bytes - self._flushed_bytes

    def appended(self, size_bytes: int) -> None:
        """Count a batch."""
        self._written_bytes += size_bytes
        if self.since_ms is None:
            self.since_ms = SYSTEM_CLOCK.monotonic_ms()

    def flush_begins(self) -> int:
        """Begin a flush of everything; returns the argument for `flushed`."""
        self.since_ms = None
        return self._written_bytes

    def flushed(self, total_bytes: int) -> None:
        """Record the end of that flush."""
        self._flushed_bytes = total_bytes
