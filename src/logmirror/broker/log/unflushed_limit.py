"""The limit of bytes that are acknowledged and not flushed, for all partitions (`flush_rule`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

    from logmirror.broker.log.partition_log import PartitionLog

DEFAULT_UNFLUSHED_BYTES: Final = 256 * 1024 * 1024


class UnflushedLimit:
    """Limits the unflushed bytes of all logs that do not flush before each response.

    At the limit, producers wait (`produce`), and every such log is flushed.

    Attributes:
        size_bytes: Unflushed bytes of all these logs.
        counts_all: Whether logs that flush before each response count too.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.counts_all = False
        self._sizes: dict[PartitionLog, int] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self.size_bytes = 0

    def count(self, log: PartitionLog) -> None:
        """Take over what a log has unflushed."""
        size_bytes = 0
        if log.failure is None and (self.counts_all or not log.flush_rule.on_ack):
            size_bytes = log.unflushed.size_bytes
        self.size_bytes += size_bytes - self._sizes.pop(log, 0)
        if size_bytes:
            self._sizes[log] = size_bytes
        if not self.is_reached:
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def forget(self, log: PartitionLog) -> None:
        """Count nothing of a log that counts elsewhere."""
        self.size_bytes -= self._sizes.pop(log, 0)

    @property
    def is_reached(self) -> bool:
        """Whether producers must wait."""
        return self.size_bytes >= self._limit_bytes

    @property
    def logs(self) -> list[PartitionLog]:
        """The logs with unflushed bytes."""
        return list(self._sizes)

    def room(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that completes when the limit is no longer reached."""
        future = loop.create_future()
        self._waiting.append(future)
        return future
