"""Grouping of works that read the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.mirror.ports import Work


def units(works: Iterable[Work]) -> list[list[Work]]:
    """Group works into archives that read the same partition from the same offset.

    A work into a cluster forms a group of its own: it follows the source and forwards batches
    unchanged, so there is no decoding to share. So does a snapshot, which may start reading at
    another offset.
    """
    found: dict[object, list[Work]] = {}
    for number, work in enumerate(works):
        part = work.slice
        key: object = (work.source, part.flow.source, part.topic_id, part.first, part.leader_epoch)
        alone = work.destination.follows or work.destination.compaction
        found.setdefault(number if alone else key, []).append(work)
    return list(found.values())
