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
    from logmirror.mirror.plan import FlowState
    from logmirror.mirror.ports import ArchiveSpec, FlowId
    from logmirror.stores.base import BlobStore

_LOG = logging.getLogger("logmirror.mirror")


def begin_snapshots(state: FlowState, store: BlobStore) -> None:
    """Initialise a flow at its position: determine the age of its newest snapshot.

    R7: a log start offset above the position is accepted here, at the start, and nowhere else.
    """
    claim = latest_claim(store, state.flow.destination, state.flow.partition)
    is_continued = claim is not None and claim.covered.first < state.position
    state.current_ms = claim.created_ms if claim and is_continued else 0
    state.rebuild = not is_continued or state.position < state.log_start
    if is_continued and state.position < state.log_start:
        _LOG.warning(
            "the log start offset is above the newest snapshot: the next snapshot is rebuilt",
            extra={
                "facts": {
                    "mirror": state.flow.mirror,
                    "destination": state.flow.destination,
                    "topic": state.flow.topic,
                    "partition": state.flow.partition,
                    "position": state.position,
                    "log_start": state.log_start,
                }
            },
        )


def prune(store: BlobStore, flow: FlowId, archive: ArchiveSpec) -> None:
    """Delete all snapshots except the newest `keep_snapshots`."""
    if archive.keep_snapshots is None:
        return
    names = store.names(flow.folder)
    objects = chain(names, extension=archive.extension, start=None, snapshots=True).objects
    for obj in objects[: -archive.keep_snapshots]:
        store.delete(f"{flow.folder}/{obj.name}")
