"""The log cleaner, for logs whose batches were encoded by the product.

As in Apache Kafka, the newest record of each key stays, records of aborted transactions are removed
and do not count as newest, and nothing at or above the last stable offset is cleaned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.wire.batch_header import parse_header
from logmirror.wire.records import decode_reference, encode_reference

if TYPE_CHECKING:
    from logmirror.simulation.log import Entry, Log


def clean(log: Log, until: int) -> None:
    """Clean the batches below an offset; the last batch of the log stays.

    Args:
        log: The log. Control records stay.
        until: Where the cleaner stops, as the active segment begins there.
    """
    if not log.entries:
        return
    until = min(until, log.last_stable_offset, log.entries[-1].base)
    dirty = [one for one in log.entries if one.last < until and not one.is_control]
    latest: dict[bytes | None, int] = {}
    for entry in dirty:
        if not _is_aborted(log, entry):
            latest |= {record.key: record.offset for record in decode_reference(entry.data)}
    kept: list[Entry] = []
    for entry in log.entries:
        if entry.is_control or entry.last >= until:
            kept.append(entry)
        elif not _is_aborted(log, entry):
            kept += _cleaned(entry, latest)
    log.entries = kept


def _is_aborted(log: Log, entry: Entry) -> bool:
    return any(
        who == entry.producer_id and first <= entry.base < end for who, first, end in log.aborted
    )


def _cleaned(entry: Entry, latest: dict[bytes | None, int]) -> list[Entry]:
    records = decode_reference(entry.data)
    left = [record for record in records if latest[record.key] == record.offset]
    if len(left) == len(records):
        return [entry]
    if not left:
        return []
    header = parse_header(entry.data, 0)
    data = encode_reference(
        left,
        base_offset=entry.base,
        last_offset=entry.last,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        leader_epoch=header.leader_epoch,
        transactional=header.is_transactional,
    )
    return [entry._replace(data=data)]
