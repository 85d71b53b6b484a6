"""Driver: what flows with `compaction: log` need beyond others.

A snapshot is continued by merging what the source has added, or built anew from all that the source
has; `FlowState.must_rebuild` says when.
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
    """A flow begins at its position: find out from when its newest snapshot is.

    R7: a source that begins above the position is accepted here, at the start, and nowhere else.
    """
    claim = latest_claim(store, state.flow.destination, state.flow.partition)
    is_continued = claim is not None and claim.covered.first < state.position
    state.current_ms = claim.created_ms if claim and is_continued else 0
    state.rebuild = not is_continued or state.position < state.log_start
    if is_continued and state.position < state.log_start:
        _LOG.warning(
            "the source begins above the newest snapshot: the next one is built from its start",
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
    """Delete all but the newest snapshots, as many as are to be kept."""
    if archive.keep_snapshots is None:
        return
    names = store.names(flow.folder)
    objects = chain(names, extension=archive.extension, start=None, snapshots=True).objects
    for obj in objects[: -archive.keep_snapshots]:
        store.delete(f"{flow.folder}/{obj.name}")
