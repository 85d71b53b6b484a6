"""Which works are carried out together, because they read the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.mirror.ports import KafkaSpec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logmirror.mirror.ports import Work


def units(works: Iterable[Work]) -> list[list[Work]]:
    """Put works together that read one partition from one offset into archives.

    A work into a cluster is a unit by itself: it waits at the source for what comes, and forwards
    batches as they are, so there is no decoding to share. So is a snapshot, which may begin to read
    elsewhere.
    """
    found: dict[object, list[Work]] = {}
    for number, work in enumerate(works):
        asked = work.slice
        key: object = (work.source, asked.flow.source, asked.topic_id, asked.first)
        alone = isinstance(work.destination, KafkaSpec) or work.destination.compaction
        found.setdefault(number if alone else key, []).append(work)
    return list(found.values())
