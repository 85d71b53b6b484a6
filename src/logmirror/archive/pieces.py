"""The plan of a read: which objects of an archive count, divided into pieces for parallel tasks.

A plan reads names and sizes, and one footer and one claim of each destination, but no objects. Its
pieces contain the same records even if the archive changes after planning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq

from logmirror.archive.chain import chain
from logmirror.archive.claims import latest_claim
from logmirror.archive.compactions import confirmed, resolve
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import PARQUET, partition_folder, split_name
from logmirror.errors import CorruptionError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from logmirror.archive.chain import ArchiveObject
    from logmirror.stores.base import BlobStore

OBJECTS_MAX: Final = 1000
"""Objects in one piece, at most. It limits the size of a plan, and the cost of a failed piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionObjects:
    """The objects of one partition that count."""

    folder: str
    """`<destination>/<partition>`."""

    extension: str
    objects: tuple[ArchiveObject, ...]
    """A chain, or only the newest snapshot."""

    sizes_bytes: tuple[int, ...]
    """The size of each object."""

    is_snapshot: bool = False

    @property
    def first(self) -> int:
        """The first offset covered; 0 if there are no objects."""
        return self.objects[0].first if self.objects else 0

    @property
    def next_offset(self) -> int:
        """The first source offset that is not archived; 0 if there are no objects."""
        return self.objects[-1].last + 1 if self.objects else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The work of one task: adjacent objects of one partition, and a range of offsets."""

    folder: str
    extension: str
    topic: str
    """The topic of the records; empty if the objects contain it."""

    objects: tuple[ArchiveObject, ...]
    first: int
    """First offset to read."""

    end: int
    """First offset not to read."""

    chain_end: int
    """The end of the chain when the plan was made. Objects after it are not read."""

    is_snapshot: bool = False
    """The piece is a snapshot; all of its rows are read."""


def find_destination(store: BlobStore, wanted: str) -> str:
    """Return the destination to read: the requested one, or the only one.

    Raises:
        UsageError: It does not exist, or none was requested and there are none or several. Facts:
            `found`.
    """
    if wanted and next(iter(store.folders(wanted)), None) is not None:
        return wanted
    found = sorted(store.folders(""))
    if not wanted and len(found) == 1:
        return found[0]
    raise UsageError(
        f"there is no destination {wanted!r} in the archive"
        if wanted
        else "the archive does not hold exactly one destination",
        hint="set the option `destination` to the name of the mirror's destination: the folder "
        "below the root that holds the partitions",
        destination=wanted,
        found=", ".join(found) or "nothing",
    )


def find_partitions(
    store: BlobStore, destination: str, wanted: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the partitions to read, ascending.

    Args:
        store: The store.
        destination: The destination's folder.
        wanted: The requested partitions; None: all.

    Raises:
        UsageError: A requested partition does not exist. Facts: `missing`, `found`.
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
    """Return the topic from the claims; empty if there are no claims."""
    for partition in partitions:
        if claim := latest_claim(store, destination, partition):
            return claim.topic
    return ""


def list_partition(store: BlobStore, destination: str, partition: int) -> PartitionObjects:
    """List a partition and return the objects that count.

    Raises:
        CorruptionError: A name is not an object name, the chain has a gap or an overlap, or the
            newest object violates its format. Facts: `name`.
    """
    folder = partition_folder(destination, partition)

    def select(sizes: Mapping[str, int]) -> PartitionObjects:
        names = sorted(name for name in sizes if split_name(name))
        newest = names[-1] if names else ""
        extension = newest.partition(".")[2] or PARQUET
        is_snapshot = bool(newest) and extension == PARQUET and _is_snapshot(store, folder, newest)
        if is_snapshot:
            objects = chain(sizes, extension=extension, start=None, snapshots=True).objects[-1:]
        else:
            objects = resolve(store, folder, sizes, extension=extension, start=None).objects
        return PartitionObjects(
            folder=folder,
            extension=extension,
            objects=objects,
            sizes_bytes=tuple(sizes[obj.name] for obj in objects),
            is_snapshot=is_snapshot,
        )

    return confirmed(lambda: store.sizes(folder), select)


def _is_snapshot(store: BlobStore, folder: str, name: str) -> bool:
    try:
        with store.open(f"{folder}/{name}") as file:
            pairs = pq.read_metadata(file).metadata
    except KeyError:
        raise CorruptionError(
            "an object was deleted after it was listed", name=name, folder=folder
        ) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the file
        raise CorruptionError(
            "not a whole Parquet file", name=name, folder=folder, reason=str(error)[:200]
        ) from error
    metadata = ObjectMetadata.from_key_values(pairs, name=name)
    return metadata is not None and metadata.is_snapshot


def cut(
    held: PartitionObjects, *, topic: str, piece_bytes: int, first: int = 0, end: int | None = None
) -> Iterator[Piece]:
    """Yield the pieces of a partition, ascending.

    Args:
        held: The objects of the partition.
        topic: The topic of the records.
        piece_bytes: Approximate size of the objects in a piece; a larger object is one piece.
        first: First offset to read.
        end: First offset not to read; None: the end of the chain.
    """
    if held.is_snapshot:
        first, end = 0, None
    last_end = held.next_offset if end is None else min(end, held.next_offset)
    group: list[ArchiveObject] = []
    group_bytes = 0

    def piece() -> Piece:
        return Piece(
            folder=held.folder,
            extension=held.extension,
            topic=topic,
            objects=tuple(group),
            first=max(first, group[0].first),
            end=min(last_end, group[-1].last + 1),
            chain_end=held.next_offset,
            is_snapshot=held.is_snapshot,
        )

    for obj, size_bytes in zip(held.objects, held.sizes_bytes, strict=True):
        if obj.last < first or obj.first >= last_end:
            continue
        if group and (group_bytes + size_bytes > piece_bytes or len(group) == OBJECTS_MAX):
            yield piece()
            group, group_bytes = [], 0
        group.append(obj)
        group_bytes += size_bytes
    if group:
        yield piece()
