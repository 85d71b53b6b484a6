"""Driver: additional steps for flows with `compaction: log`.

A new snapshot is a merge of the newest snapshot with the new records, or is rebuilt from all
records at the source; `FlowState.must_rebuild` decides.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, BinaryIO

from logmirror.archive.chain import chain
from logmirror.archive.claims import latest_claim
from logmirror.archive.metadata import ObjectMetadata
from logmirror.errors import CorruptionError, UnavailableError, UsageError
from logmirror.mirror.observer import flow_facts

if TYPE_CHECKING:
    from logmirror.mirror.ports import ArchiveSpec, FlowId, Start
    from logmirror.stores.base import BlobStore

_LOG = logging.getLogger("logmirror.mirror")


def newest_snapshot(flow: FlowId, start: Start, store: BlobStore) -> tuple[int, bool]:
    """Determine the age of the newest snapshot at the start of a flow.

    R7: a log start offset above the position is accepted here, at the start, and nowhere else.

    Returns:
        When it was written, in milliseconds since 1970, 0 if there is none; and whether the next
        one must be rebuilt.
    """
    claim = latest_claim(store, flow.destination, flow.partition)
    is_continued = claim is not None and claim.covered.first < start.position
    is_trimmed = start.position < start.view.log_start
    if is_continued and is_trimmed:
        seen = {"position": start.position, "log_start": start.view.log_start}
        _LOG.warning(
            "the log start offset is above the newest snapshot: the next snapshot is rebuilt",
            extra={"facts": flow_facts(flow) | seen},
        )
    return claim.created_ms if claim and is_continued else 0, not is_continued or is_trimmed


def prune(store: BlobStore, flow: FlowId, archive: ArchiveSpec, left: set[str]) -> None:
    """Delete all snapshots except the newest `keep_snapshots`.

    Newest first, and only down to the first object that is not known to be a snapshot: that one
    and the older ones may be an archive of all records.

    Args:
        store: The archive's store.
        flow: The partition.
        archive: How many are kept.
        left: Objects that are not known to be snapshots. They are logged and read once.
    """
    if archive.keep_snapshots is None:
        return
    names = store.names(flow.folder)
    objects = chain(names, extension=archive.extension, start=None, snapshots=True).objects
    for obj in reversed(objects[: -archive.keep_snapshots]):
        path = f"{flow.folder}/{obj.name}"
        if path in left:
            return
        try:
            check_is_snapshot(store, flow, obj.name)
        except (CorruptionError, UsageError) as error:
            left.add(path)
            _LOG.warning(
                "old objects are not deleted: one is not known to be a snapshot",
                extra={"facts": flow_facts(flow) | {"name": obj.name, "reason": error.message}},
            )
            return
        store.delete(path)


def check_is_snapshot(store: BlobStore, flow: FlowId, name: str) -> None:
    """Read the footer of an object. One that was just pruned is accepted.

    Raises:
        CorruptionError: It has all records, or its footer is damaged.
        UsageError: A newer version of logmirror wrote it.
        UnavailableError: It cannot be read.
    """
    try:
        with store.open(f"{flow.folder}/{name}") as file:
            if not _is_snapshot(file, name):
                raise not_a_snapshot(name)
    except KeyError:
        return


def not_a_snapshot(name: str) -> CorruptionError:
    """The error of an object that has all records."""
    return CorruptionError(
        "the object is not a snapshot",
        hint="`compaction: log` cannot continue an archive of all records; configure another "
        "destination name",
        name=name,
    )


def _is_snapshot(file: BinaryIO, name: str) -> bool:
    import pyarrow as pa  # noqa: PLC0415  # the driver of other mirrors does without it
    import pyarrow.parquet as pq  # noqa: PLC0415  # the same

    try:
        footer = pq.read_metadata(file)
        metadata = ObjectMetadata.from_key_values(footer.metadata, name=name)
        if metadata is not None:
            return metadata.is_snapshot
        # Only for an object of another program: the module loads the kernels.
        from logmirror.archive.parquet_columns import layout_of  # noqa: PLC0415  # see above

        layout = layout_of(footer.schema.to_arrow_schema())
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise UnavailableError(
                "could not read the object", hint="check the disk", name=name, reason=error.strerror
            ) from error
        raise CorruptionError(
            "not a whole Parquet file", name=name, reason=str(error)[:200]
        ) from error
    return layout is not None and layout.is_mirror_v3
