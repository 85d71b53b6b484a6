"""An archive cut into pieces that are read side by side: which objects count, and who reads which.

Names and sizes decide, and of each destination one footer and one claim; no object is read. What a
plan says is fixed: its pieces show the same records whatever is added to the archive meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from logmirror.archive.chain import chain
from logmirror.archive.claims import latest_claim
from logmirror.archive.compactions import resolve, settled
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import PARQUET, partition_folder, split_name
from logmirror.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from logmirror.archive.chain import Link
    from logmirror.stores.base import BlobStore

OBJECTS_MAX: Final = 1000
"""In one piece: a plan's size grows with its objects, and a failed piece is read again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The objects of one partition that count."""

    folder: str
    """`<destination>/<partition>`."""

    extension: str
    links: tuple[Link, ...]
    """A chain; or the newest snapshot alone."""

    sizes_bytes: tuple[int, ...]
    """Of each."""

    is_snapshot: bool = False

    @property
    def first(self) -> int:
        """Where it begins; 0 if there is nothing."""
        return self.links[0].first if self.links else 0

    @property
    def next_offset(self) -> int:
        """Where it ends: the first source offset that is not archived; 0 if there is nothing."""
        return self.links[-1].last + 1 if self.links else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one reader reads: neighbouring objects of one partition, and which rows of them."""

    folder: str
    extension: str
    topic: str
    """Whose records they are; empty where the objects say it."""

    links: tuple[Link, ...]
    first: int
    """First offset wanted."""

    end: int
    """First offset not wanted any more."""

    chain_end: int
    """Where the chain ended when it was looked at: what lies behind is not asked either."""

    is_snapshot: bool = False
    """One object of latest records by key: all of its rows are wanted."""


def find_destination(store: BlobStore, wanted: str) -> str:
    """Return the destination to read: the wanted one, or the only one.

    Raises:
        UsageError: There is no such one, or there are several. Facts: `found`.
    """
    if wanted and next(iter(store.folders(wanted)), None) is not None:
        return wanted
    found = sorted(store.folders(""))
    if not wanted and len(found) == 1:
        return found[0]
    raise UsageError(
        f"there is no destination {wanted!r} in the archive" if wanted else "which destination",
        hint="`destination` is the folder below the root that holds the partitions: the name of "
        "the mirror's destination",
        destination=wanted,
        found=", ".join(found) or "nothing",
    )


def find_partitions(
    store: BlobStore, destination: str, wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the partitions to read, ascending; None: all that there are.

    Raises:
        UsageError: A wanted one is not there. Facts: `missing`, `found`.
    """
    found = sorted(int(name) for name in store.folders(destination) if name.isdecimal())
    if wanted is None:
        return tuple(found)
    if missing := sorted(set(wanted) - set(found)):
        raise UsageError(
            "the archive has no such partition",
            destination=destination,
            missing=missing,
            found=found,
        )
    return tuple(sorted(set(wanted)))


def find_topic(store: BlobStore, destination: str, partitions: Iterable[int]) -> str:
    """Return the topic that claims name; empty if none is kept."""
    for partition in partitions:
        if claim := latest_claim(store, destination, partition):
            return claim.topic
    return ""


def look(store: BlobStore, destination: str, partition: int) -> Held:
    """List a partition and find the objects that count.

    Raises:
        CorruptionError: A name is not ours, the chain has a gap or an overlap, or the newest object
            is not of its format. Facts: `name`.
    """
    folder = partition_folder(destination, partition)

    def judge(sizes: Mapping[str, int]) -> Held:
        ours = sorted(name for name in sizes if split_name(name))
        extension = ours[-1].partition(".")[2] if ours else PARQUET
        is_snapshot = bool(ours) and extension == PARQUET and _is_snapshot(store, folder, ours[-1])
        if is_snapshot:
            links = chain(sizes, extension=extension, start=None, snapshots=True).links[-1:]
        else:
            links = resolve(store, folder, sizes, extension=extension, start=None).links
        return Held(
            folder=folder,
            extension=extension,
            links=links,
            sizes_bytes=tuple(sizes[link.name] for link in links),
            is_snapshot=is_snapshot,
        )

    return settled(lambda: store.sizes(folder), judge)


def _is_snapshot(store: BlobStore, folder: str, name: str) -> bool:
    try:
        with store.open(f"{folder}/{name}") as file:
            pairs = pq.read_metadata(file).metadata
    except KeyError:
        raise CorruptionError(
            "the object is gone since it was listed", name=name, folder=folder
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's word, not the file's
        raise CorruptionError(
            "not a whole Parquet file", name=name, folder=folder, reason=str(error)[:200]
        ) from error
    metadata = ObjectMetadata.from_key_values(pairs, name=name)
    return metadata is not None and metadata.is_snapshot


def cut(
    held: Held, *, topic: str, piece_bytes: int, first: int = 0, end: int | None = None
) -> Iterator[Piece]:
    """Yield the pieces of a partition, ascending.

    Args:
        held: What there is.
        topic: Whose records they are.
        piece_bytes: Of objects in a piece, about; a larger object is a piece of its own.
        first: First offset wanted.
        end: First offset not wanted any more; None: all.
    """
    if held.is_snapshot:
        first, end = 0, None
    last_end = held.next_offset if end is None else min(end, held.next_offset)
    group: list[Link] = []
    group_bytes = 0

    def piece() -> Piece:
        return Piece(
            folder=held.folder,
            extension=held.extension,
            topic=topic,
            links=tuple(group),
            first=max(first, group[0].first),
            end=min(last_end, group[-1].last + 1),
            chain_end=held.next_offset,
            is_snapshot=held.is_snapshot,
        )

    for link, size_bytes in zip(held.links, held.sizes_bytes, strict=True):
        if link.last < first or link.first >= last_end:
            continue
        if group and (group_bytes + size_bytes > piece_bytes or len(group) == OBJECTS_MAX):
            yield piece()
            group, group_bytes = [], 0
        group.append(link)
        group_bytes += size_bytes
    if group:
        yield piece()
