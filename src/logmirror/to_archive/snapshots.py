"""Driver: additional steps for flows with `compaction: log`.

A new snapshot is a merge of the newest snapshot with the new records, or is rebuilt from all
records at the source; `FlowState.must_rebuild` decides.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from logmirror.archive.chain import chain
from logmirror.archive.claims import latest_claim

if TYPE_CHECKING:
    from logmirror.mirror.ports import ArchiveSpec, FlowId, Start
    from logmirror.stores.base import BlobStore

_LOG = logging.getLogger("logmirror.mirror")


def newest_snapshot(flow: FlowId, start: Start, store: BlobStore) -> tuple[int, bool]:
    """Determine the age of the newest snapshot at the start of a flow.

    R7: a log start offset above the position is accepted here, at the start, and nowhere else.

    Returns:
        When it was written, in milliseconds since 1970, 0 if there is none; and whether the next
        one must be rebuilt.
    """
    claim = latest_claim(store, flow.destination, flow.partition)
    is_continued = claim is not None and claim.covered.first < start.position
    is_trimmed = start.position < start.view.log_start
    if is_continued and is_trimmed:
        _LOG.warning(
            "the log start offset is above the newest snapshot: the next snapshot is rebuilt",
            extra={
                "facts": {
                    "mirror": flow.mirror,
                    "destination": flow.destination,
                    "topic": flow.topic,
                    "partition": flow.partition,
                    "position": start.position,
                    "log_start": start.view.log_start,
                }
            },
        )
    return claim.created_ms if claim and is_continued else 0, not is_continued or is_trimmed


def prune(store: BlobStore, flow: FlowId, archive: ArchiveSpec) -> None:
    """Delete all snapshots except the newest `keep_snapshots`."""
    if archive.keep_snapshots is None:
        return
    names = store.names(flow.folder)
    objects = chain(names, extension=archive.extension, start=None, snapshots=True).objects
    for obj in objects[: -archive.keep_snapshots]:
        store.delete(f"{flow.folder}/{obj.name}")
