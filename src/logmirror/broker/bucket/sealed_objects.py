"""The objects of sealed segments in a store, and the producer states beside them.

    <topic>@<topic ID>/<partition>/<first>-<last>.batches   a native archive object
    <topic>@<topic ID>/<partition>/<first>-<last>.<version>.batches
                                                            a compacted one, see `replacing`
    .logmirror/broker/producers/<topic>@<topic ID>/<partition>/<next>
                                                            producer state before an offset

The topic ID is in the name because an owner that wakes from a pause may still delete a topic that
was created again meanwhile: no name is ever used again.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.archive.chain import ArchiveObject, chain
from logmirror.archive.naming import NATIVE, split_name
from logmirror.broker.bucket.chain import PRODUCERS
from logmirror.broker.bucket.tiling import tiled
from logmirror.broker.log.file_names import sealed_name
from logmirror.broker.metadata import short_form
from logmirror.errors import CorruptionError
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from logmirror.broker.place_rows import Compacted, Residence
    from logmirror.stores.base import BlobStore, Buffer, StagedObject

_LOG: Final = logging.getLogger(__name__)
_DIGITS: Final = 20
_COPY_BYTES: Final = 4 * 1024 * 1024


class SealedObject(NamedTuple):
    """An object of a partition."""

    first: int
    next: int
    size_bytes: int
    version: str = ""


def folder_of(topic: str, topic_id: uuid.UUID, partition: int) -> str:
    """Return the folder of a partition's objects."""
    return f"{topic}@{short_form(topic_id)}/{partition}"


def folder_at(residence: Residence) -> str:
    """Return the folder of the objects of a residence."""
    return folder_of(residence.topic, uuid.UUID(bytes=residence.id), residence.partition)


def read_producers(store: BlobStore, folder: str, offset: int) -> bytes | None:
    """Return the producer state before an offset; None: it is missing, or cannot be read."""
    name = producers_name(folder, offset)
    try:
        return store.read(name)
    except KeyError:
        return None
    except CorruptionError as error:  # no reason to refuse the partition
        _LOG.warning("%s: producer state is rebuilt from the log: %s", name, error)
        return None


def object_name(folder: str, first: int, after: int, version: str = "") -> str:
    """Return the name of a segment's object."""
    return f"{folder}/{sealed_name(first, after, version)}"


def producers_name(folder: str, offset: int) -> str:
    """Return the name of the producer state before an offset."""
    return f"{PRODUCERS}/{folder}/{offset:0{_DIGITS}d}"


def pieces_of(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file."""
    with path.open("rb") as file:
        while data := file.read(_COPY_BYTES):
            yield data


def upload(  # noqa: PLR0913, PLR0917  # the parts of an object
    store: BlobStore, folder: str, first: int, after: int, data: Iterable[Buffer], producers: bytes
) -> None:
    """Create the object of a segment whose cut is in the chain, with the producers at its end.

    Raises:
        CorruptionError: The name is taken by an object of another size.
        UnavailableError, OutcomeUnknownError: Try again with the same arguments.
        UsageError: The store refused the request.
    """
    create_producers(store, folder, after, producers)
    failpoints.reach("bucket.snapshot")
    create_object(store, folder, first, after, data)
    failpoints.reach("bucket.sealed")


def create_producers(store: BlobStore, folder: str, offset: int, state: bytes) -> None:
    """Create the producer state before an offset; raises as `upload` does."""
    with contextlib.suppress(AlreadyExistsError):  # of an earlier attempt or owner: the same state
        store.create(producers_name(folder, offset), state)


def create_object(  # noqa: PLR0913  # the parts of an object
    store: BlobStore,
    folder: str,
    first: int,
    after: int,
    data: Iterable[Buffer],
    *,
    version: str = "",
) -> None:
    """Create an object of a partition; raises as `upload` does."""
    name, size = object_name(folder, first, after, version), 0
    staged = store.stage(f"segment-{first}")
    try:
        for part in data:
            size += staged.write(part)
    except BaseException:
        staged.abort()
        raise
    publish(store, staged, name, size)


def publish(store: BlobStore, staged: StagedObject, name: str, size: int) -> None:
    """Create an object of what is staged; raises as `upload` does."""
    try:
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
    sizes: Mapping[str, int], folder: str, log_start: int, compacted: Sequence[Compacted] = ()
) -> tuple[list[SealedObject], list[str]]:
    """Return a partition's objects in order, and the names of those that can be deleted.

    Args:
        sizes: What is in the partition's folder, as `BlobStore.sizes` returns it.
        folder: The folder, for messages.
        log_start: Objects before it can be deleted.
        compacted: The compacted objects that count, in order; others, and what they replace, can
            be deleted.

    Raises:
        CorruptionError: Objects are missing, or overlap.
    """
    parts = {name: part for name in sizes if (part := split_name(name)) and _is_ours(part[2])}
    counting = {sealed_name(*one): one for one in compacted if one.next > log_start}
    kept = [
        ArchiveObject(name, first, last)
        for name, (first, last, extension) in parts.items()
        if last >= log_start
        and (name in counting or (extension == NATIVE and not _is_replaced(first, last, compacted)))
    ]
    if lost := sorted(counting.keys() - parts.keys()):
        raise _missing(folder, expected=lost[0])
    objects = tiled(kept, log_start)
    if objects is None:
        if not counting:  # it names the gap
            chain((one.name for one in kept), extension=NATIVE, start=None)
        raise _missing(folder, expected=log_start, found=min(one.first for one in kept))
    deleted = sorted(parts.keys() - {one.name for one in objects})
    versions = {name: one.version for name, one in counting.items()}
    return [
        SealedObject(one.first, one.last + 1, sizes[one.name], versions.get(one.name, ""))
        for one in objects
    ], deleted


def _missing(folder: str, **facts: int | str) -> CorruptionError:
    return CorruptionError(
        "acknowledged records are missing in the bucket",
        hint="restore the missing objects, for example from an earlier version of the bucket",
        folder=folder,
        **facts,
    )


def _is_ours(extension: str) -> bool:
    return extension == NATIVE or extension.endswith(f".{NATIVE}")


def _is_replaced(first: int, last: int, compacted: Sequence[Compacted]) -> bool:
    before = bisect_right(compacted, last, key=lambda one: one.first)  # they do not overlap
    return before > 0 and first < compacted[before - 1].next
