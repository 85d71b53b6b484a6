"""Executor: compares the last record of an archive with the source.

Runs before a flow writes, where leader epochs do not prove that the source still holds what was
archived: an older broker without them, an object whose claim has none, or a topic whose leader has
never changed.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from logmirror.archive.chain import chain
from logmirror.archive.compactions import confirmed, resolve
from logmirror.archive.naming import NATIVE
from logmirror.archive.object_check import check_object
from logmirror.archive.reader import iterate, read_errors
from logmirror.errors import PositionError, PositionMovedError
from logmirror.model import OFFSET_MAX
from logmirror.source.compare import difference, rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.archive.chain import ArchiveObject
    from logmirror.mirror.ports import ArchiveSpec, Work
    from logmirror.source.partition import KafkaSource
    from logmirror.stores.base import BlobStore
    from logmirror.wire.decode import RecordDecoder

_OBJECTS_READ: Final = 3
"""How many objects are read at most to find a record: an object may hold offset gaps alone."""

_GAP_COMPARED: Final = 1_000
"""How many of the last offsets are compared if none of these objects has a record."""


def check_tail(work: Work, store: BlobStore, source: KafkaSource, decoder: RecordDecoder) -> None:
    """Compare the last archived record with the source's record of the same offset.

    If the last objects have no records, the source must have none at the last offsets either,
    because gaps only grow. Nothing is compared if the source no longer has the offset, or if a
    snapshot is empty.

    Raises:
        PositionError: The source has another record, or none.
        PositionMovedError: The chain does not end where the slice begins.
        CorruptionError: The object was changed after it was written.
    """
    flow, spec, found = work.slice.flow, work.archive, None
    is_native = spec.extension == NATIVE
    objects = _last_objects(work, store)
    for each in objects:
        with read_errors(each.name):
            found = _last_row(store, flow.folder, each.name, spec)
        if found is not None:
            break
    if found is None:
        if objects and spec.compaction is None:
            first = max(objects[-1].first, work.slice.first - _GAP_COMPARED, source.log_start())
            expected = rows(source, decoder, first, work.slice.first, with_aborted=is_native)
            if expected.num_rows:
                offset = expected["offset"][0].as_py()
                raise _other_history(work, objects[0].name, offset=offset, found=None)
        return
    offset = found["offset"][0].as_py()
    if offset < source.log_start():
        return
    try:
        expected = rows(source, decoder, offset, offset + 1, with_aborted=is_native)
    except PositionError as error:
        error.facts["expected"] = work.slice.first
        raise
    may_lack = work.slice.compacted or spec.compaction is not None
    differs = difference(found, expected, timestamps=True, compacted=may_lack)
    if differs is None:
        return
    with _still_there(each.name):
        check_object(
            store,
            flow.folder,
            each.name,
            deep=True,
            utf8=spec.encoding == "utf8",
            compacted=may_lack,
            snapshots=spec.compaction is not None,
            mirror_v3_before=OFFSET_MAX,
        )
    raise _other_history(work, each.name, **differs)


def _other_history(work: Work, name: str, **differs: object) -> PositionError:
    return PositionError(
        "the last archived record is not what the source holds at its offset",
        hint="the source's log was truncated and written again (unclean leader election, or a "
        "restored disk), or this is another topic or cluster. The copy is kept, and nothing was "
        "written behind it; compare it with the source.",
        reason="SourceWentBackwards",
        position=work.slice.first,
        name=name,
        **differs,
    )


def _last_objects(work: Work, store: BlobStore) -> list[ArchiveObject]:
    """Return the last objects of the chain, newest first."""
    folder, extension = work.slice.flow.folder, work.archive.extension
    if work.archive.compaction:
        names = store.tail(folder).names
        objects = chain(names, extension=extension, start=None, snapshots=True).objects[-1:]
    else:
        objects = confirmed(
            lambda: store.tail(folder),
            lambda tail: resolve(store, folder, tail.names, extension=extension, start=None),
        ).objects[-_OBJECTS_READ:]
    if objects and objects[-1].last + 1 != work.slice.first:
        raise PositionMovedError(
            "the archive does not end where the slice begins",
            expected=work.slice.first,
            found=objects[-1].last + 1,
        )
    return list(reversed(objects))


def _last_row(store: BlobStore, folder: str, name: str, spec: ArchiveSpec) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Return the row with the highest offset as a table; None: the object has no rows."""
    last, found = -1, None
    at_end = spec.compaction is None  # snapshots are sorted by key
    with _still_there(name):
        for batch in iterate(store, folder, name, utf8=spec.encoding == "utf8", at_end=at_end):
            newest = pc.max(batch["offset"]).as_py()
            if newest is not None and newest > last:
                at = pc.index(batch["offset"], newest).as_py()
                row = pa.Table.from_batches([batch.slice(at, 1)])
                # Copied out: the decoder reuses its buffers.
                last, found = newest, row.take(pa.array([0]))
    return found


@contextlib.contextmanager
def _still_there(name: str) -> Iterator[None]:
    try:
        yield
    except KeyError:
        raise PositionMovedError("the object was just replaced or pruned", name=name) from None
