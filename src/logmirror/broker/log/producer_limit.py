"""The limit for the producer states of all partitions together.

A client can invent producer IDs, so the limit per partition does not bound a broker with many
partitions. Beyond the limit, the producer whose last write is the oldest loses its state. It may
continue with any sequence (P4 in `producer_state`), but a batch that it resends is stored again.
Kafka drops a producer by age (`producer.id.expiration.ms`), with the same effect.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final, Protocol

_LOG: Final = logging.getLogger(__name__)
_LOG_EVERY: Final = 10_000


class Producers(Protocol):
    """The producers of one partition."""

    def drop(self, producer_id: int) -> None:
        """Drop the state of one producer."""


class ProducerLimit:
    """The producers of one broker, the oldest write first. Runs on the event loop.

    Args:
        max_producers: Limit for the states of all partitions together.
    """

    def __init__(self, max_producers: int) -> None:
        self._max_producers = max_producers
        self._order: OrderedDict[tuple[Producers, int], None] = OrderedDict()
        self._dropped = 0

    def __len__(self) -> int:
        return len(self._order)

    def wrote(self, state: Producers, producer_id: int) -> None:
        """Record a write; drops the oldest producer beyond the limit."""
        key = state, producer_id
        self._order[key] = None
        self._order.move_to_end(key)
        if len(self._order) <= self._max_producers:
            return
        (oldest, oldest_id), _ = self._order.popitem(last=False)
        oldest.drop(oldest_id)
        if self._dropped % _LOG_EVERY == 0:
            _LOG.warning(
                "more than %d producers: the oldest lose their idempotent-producer check",
                self._max_producers,
            )
        self._dropped += 1

    def dropped(self, state: Producers, producer_id: int) -> None:
        """Forget a producer whose state is gone."""
        self._order.pop((state, producer_id), None)
