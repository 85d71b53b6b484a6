"""Compact one partition's chain: look, finish what others began, merge, look again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.archive.compactions import explain, resolve, settled
from logmirror.archive.cover import cells
from logmirror.archive.merge import GoneError, Merged, finish, merge

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.archive.chain import Link
    from logmirror.archive.cover import Cover
    from logmirror.archive.merge import Archive
    from logmirror.clock import Clock

_ROUNDS: Final = 100
"""Of two compacts at one partition each may find its work done by the other, but not for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What is merged."""

    target_bytes: int
    """Of a merged object, at most."""

    min_objects: int
    """Fewer are left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What there is to do in a partition."""

    cover: Cover
    groups: list[tuple[Link, ...]]
    """Objects that are merged with each other."""

    sizes_bytes: dict[str, int]
    """By name."""


def plan(archive: Archive, limits: Limits, *, start: int | None) -> Plan:
    """Look at a partition and say what there is to do; changes nothing.

    Args:
        archive: Where it is.
        limits: What is merged.
        start: Where the chain must begin; None: wherever it does.

    Raises:
        CorruptionError: The names have no valid cover.
    """
    sizes: dict[str, int] = {}

    def look() -> list[str]:
        sizes.clear()
        sizes.update(archive.store.sizes(archive.folder))
        return list(sizes)

    found = settled(
        look,
        lambda names: resolve(
            archive.store, archive.folder, names, extension=archive.extension, start=start
        ),
    )
    groups = cells(
        found.links,
        [sizes[link.name] for link in found.links],
        target_bytes=limits.target_bytes,
        min_objects=limits.min_objects,
    )
    return Plan(cover=found, groups=groups, sizes_bytes=sizes)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was done in a partition."""

    objects_before: int = 0
    objects_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    merged: int = 0
    """Objects that became part of larger ones."""

    into: int = 0
    """How many those are."""

    finished: int = 0
    """Objects deleted that an earlier compact had left, or a slow writer brought back."""


def compact(  # noqa: PLR0913  # where, what, and who we are
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
        CorruptionError: An object or the chain is not what it should be. What was merged before
            is whole; nothing unproven is deleted.
    """
    outcome = Outcome()
    for number in range(_ROUNDS):
        now = plan(archive, limits, start=start)
        outcome.objects_after = len(now.cover.links)
        outcome.bytes_after = sum(now.sizes_bytes[link.name] for link in now.cover.links)
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
    for around, inside in found.replaced.items():
        try:
            outcome.finished += finish(archive, around, {link: digests[link] for link in inside})
        except GoneError:
            return
