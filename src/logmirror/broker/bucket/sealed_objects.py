"""The objects of sealed segments in a store, and the producer states beside them.

    <topic>@<topic ID>/<partition>/<first>-<last>.batches   a native archive object
    .logmirror/broker/producers/<topic>@<topic ID>/<partition>/<next>
                                                            producer state before an offset

The topic ID is in the name because an owner that wakes from a pause may still delete a topic that
was created again meanwhile: no name is ever used again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.archive.chain import ArchiveObject, chain
from logmirror.archive.naming import NATIVE, format_name, split_name
from logmirror.broker.bucket.chain import PRODUCERS
from logmirror.broker.bucket.tiling import tiled
from logmirror.broker.metadata import short_form
from logmirror.errors import CorruptionError
from logmirror.model import OffsetRange
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Iterable

    from logmirror.stores.base import BlobStore, Buffer

_DIGITS: Final = 20


class SealedObject(NamedTuple):
    """An object of a partition."""

    first: int
    next: int
    size_bytes: int


def folder_of(topic: str, topic_id: uuid.UUID, partition: int) -> str:
    """Return the folder of a partition's objects."""
    return f"{topic}@{short_form(topic_id)}/{partition}"


def object_name(folder: str, first: int, after: int) -> str:
    """Return the name of a segment's object."""
    return f"{folder}/{format_name(OffsetRange(first=first, last=after - 1), NATIVE)}"


def producers_name(folder: str, offset: int) -> str:
    """Return the name of the producer state before an offset."""
    return f"{PRODUCERS}/{folder}/{offset:0{_DIGITS}d}"


def upload(  # noqa: PLR0913, PLR0917  # the parts of an object
    store: BlobStore, folder: str, first: int, after: int, data: Iterable[Buffer], producers: bytes
) -> None:
    """Create the object of a segment whose cut is in the chain, with the producers at its end.

    Raises:
        CorruptionError: The name is taken by an object of another size.
        UnavailableError, OutcomeUnknownError: Try again with the same arguments.
        UsageError: The store refused the request.
    """
    with contextlib.suppress(AlreadyExistsError):  # of an earlier attempt or owner: the same state
        store.create(producers_name(folder, after), producers)
    failpoints.reach("bucket.snapshot")
    create_object(store, folder, first, after, data)
    failpoints.reach("bucket.sealed")


def create_object(
    store: BlobStore, folder: str, first: int, after: int, data: Iterable[Buffer]
) -> None:
    """Create an object of a partition; raises as `upload` does."""
    name, size = object_name(folder, first, after), 0
    staged = store.stage(f"segment-{first}")
    try:
        for part in data:
            size += staged.write(part)
        token = staged.finish(name, travels=False)
    except BaseException:
        staged.abort()
        raise
    try:
        store.publish(token, name)
    except AlreadyExistsError as error:
        store.discard(token)
        found = size  # a later owner may have deleted it since
        with contextlib.suppress(KeyError):
            found = size_of(store, name)
        if found != size:
            raise CorruptionError(
                "an object of this name with other content exists",
                name=name,
                expected_bytes=size,
                found_bytes=found,
            ) from error
    except BaseException:
        store.discard(token)
        raise


def size_of(store: BlobStore, name: str) -> int:
    """Return the size of an object."""
    with store.open(name) as file:
        return file.seek(0, 2)


def sealed_objects(
    store: BlobStore, folder: str, log_start: int
) -> tuple[list[SealedObject], list[str]]:
    """Return a partition's objects in order, and the names of those that can be deleted.

    Raises:
        CorruptionError: Objects are missing, or overlap.
    """
    sizes = store.sizes(folder)
    parts = {name: part for name in sizes if (part := split_name(name)) and part[2] == NATIVE}
    kept = [ArchiveObject(n, p[0], p[1]) for n, p in parts.items() if p[1] >= log_start]
    objects = tiled(kept, log_start)
    deleted = sorted(parts.keys() - {one.name for one in objects or kept})
    if objects is None:
        objects = list(chain((one.name for one in kept), extension=NATIVE, start=None).objects)
        raise CorruptionError(
            "acknowledged records are missing in the bucket",
            hint="restore the missing objects, for example from an earlier version of the bucket",
            folder=folder,
            expected=log_start,
            found=objects[0].first,
        )
    return [SealedObject(one.first, one.last + 1, sizes[one.name]) for one in objects], deleted


def delete_topic(store: BlobStore, topic: str, topic_id: uuid.UUID, partitions: int) -> None:
    """Remove all objects of a topic whose deletion is in the chain."""
    for number in range(partitions):
        folder = folder_of(topic, topic_id, number)
        for place in (folder, f"{PRODUCERS}/{folder}"):
            for name in list(store.names(place)):
                store.delete(f"{place}/{name}")
                failpoints.reach("bucket.deleted")
