"""Long handlers share the event loop: they pause between entries, and encode in the executor."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker
    from logmirror.wire.frames import RequestHeader
    from logmirror.wire.serve_messages import ResponseKind

ENTRIES_PER_TURN: Final = 256
"""Entries that a handler processes before other clients have their turn: a few milliseconds."""


class Turns:
    """Counts what a handler has processed.

    Attributes:
        entries: All entries so far.
    """

    def __init__(self) -> None:
        self.entries = 0
        self._turn_ends = ENTRIES_PER_TURN

    async def took(self, entries: int = 1) -> None:
        """Count entries, and let other clients have their turn if there were enough."""
        self.entries += entries
        if self.entries >= self._turn_ends:
            self._turn_ends = self.entries + ENTRIES_PER_TURN
            await asyncio.sleep(0)

    async def encoded(
        self, broker: Broker, kind: ResponseKind, header: RequestHeader, **fields: object
    ) -> bytes:
        """Encode the response; in the executor if it has many entries."""
        if self.entries <= ENTRIES_PER_TURN:
            return kind.frame(header.correlation_id, **fields)
        encode = functools.partial(kind.frame, header.correlation_id, **fields)
        return await asyncio.get_running_loop().run_in_executor(broker.executor, encode)
