"""Whether the marker of a prepared transaction is in a partition's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker.log.producer_state import NO_COORDINATOR

if TYPE_CHECKING:
    from logmirror.broker.log.producer_state import ProducerState
    from logmirror.broker.transactions.transaction import Transaction


def marker_epoch(producers: ProducerState, prepared: Transaction) -> int | None:
    """Return the coordinator epoch of the marker to append; None: the log has the marker.

    The markers of a transaction have a timestamp that no other transaction of its producer has.
    An epoch that WriteTxnMarkers used for this producer is kept, because a lower one is refused.
    """
    known = producers.get(prepared.producer_id)
    if known is None or known.coordinator_epoch == NO_COORDINATOR:
        return 0
    is_open = producers.transactions.start_of(prepared.producer_id) is not None
    is_last = known.last_timestamp_ms == prepared.ended_ms
    return None if is_last and not is_open else known.coordinator_epoch
