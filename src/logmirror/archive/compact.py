"""Compact one partition's chain: list, finish interrupted merges, merge, repeat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.archive.compactions import confirmed, explain, resolve
from logmirror.archive.cover import cells
from logmirror.archive.merge import GoneError, Merged, finish, merge

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.archive.chain import ArchiveObject
    from logmirror.archive.cover import Cover
    from logmirror.archive.merge import Archive
    from logmirror.clock import Clock

_ROUNDS: Final = 100
"""Limit on repetitions: of two concurrent compactions, each may find its work done by the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Which objects are merged."""

    target_bytes: int
    """Size limit of a merged object: the sum of the objects that it replaces."""

    min_objects: int
    """Fewer objects in a cell are not merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The pending work of a partition."""

    cover: Cover
    groups: list[tuple[ArchiveObject, ...]]
    """Groups of objects; each group becomes one object."""

    sizes_bytes: dict[str, int]
    """Size of each object, by name."""


def plan(archive: Archive, limits: Limits, *, start: int | None) -> Plan:
    """List a partition and return its pending work; changes nothing.

    Args:
        archive: The partition.
        limits: Which objects are merged.
        start: The first offset of the chain; None: any.

    Raises:
        CorruptionError: The names have no valid cover.
    """
    sizes: dict[str, int] = {}

    def read_names() -> list[str]:
        sizes.clear()
        sizes.update(archive.store.sizes(archive.folder))
        return list(sizes)

    found = confirmed(
        read_names,
        lambda names: resolve(
            archive.store, archive.folder, names, extension=archive.extension, start=start
        ),
    )
    groups = cells(
        found.objects,
        [sizes[obj.name] for obj in found.objects],
        target_bytes=limits.target_bytes,
        min_objects=limits.min_objects,
    )
    return Plan(cover=found, groups=groups, sizes_bytes=sizes)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result for a partition."""

    objects_before: int = 0
    objects_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    merged: int = 0
    """Objects that became part of larger ones."""

    into: int = 0
    """Merged objects created."""

    finished: int = 0
    """Objects deleted that an interrupted compaction left or that a zombie writer republished."""


def compact(  # noqa: PLR0913  # the place, the limits, and the writer's identity
    archive: Archive,
    limits: Limits,
    *,
    start: int | None,
    writer_id: str,
    clock: Clock,
    on_merged: Callable[[Merged], None] = lambda _: None,
) -> Outcome:
    """Merge the small objects of a partition, and delete what merged objects replace.

    Raises:
        CorruptionError: An object or the chain is damaged. Objects merged before are complete;
            nothing is deleted that was not verified.
    """
    outcome = Outcome()
    for number in range(_ROUNDS):
        now = plan(archive, limits, start=start)
        outcome.objects_after = len(now.cover.objects)
        outcome.bytes_after = sum(now.sizes_bytes[obj.name] for obj in now.cover.objects)
        if number == 0:
            outcome.objects_before = outcome.objects_after
            outcome.bytes_before = outcome.bytes_after
        if not (now.cover.replaced or now.groups):
            break
        _finish_all(archive, now.cover, outcome)
        for group in now.groups:
            try:
                merged = merge(archive, group, writer_id=writer_id, clock=clock)
            except GoneError:
                break
            outcome.merged += merged.parts
            outcome.into += 1
            on_merged(merged)
    return outcome


def _finish_all(archive: Archive, found: Cover, outcome: Outcome) -> None:
    digests = explain(archive.store, archive.folder, found)
    for outer, inner in found.replaced.items():
        try:
            outcome.finished += finish(archive, outer, {obj: digests[obj] for obj in inner})
        except GoneError:
            return
