"""Which store belongs to a location; alone names the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.locations import S3Location

if TYPE_CHECKING:
    import contextlib

    from logmirror.stores.base import BlobStore
    from logmirror.stores.locations import StoreLocation
    from logmirror.stores.s3 import S3Store


def open_store(location: StoreLocation, writer_id: str) -> FilesystemStore | S3Store:
    """The store at a location, for one process; creates and connects nothing yet.

    Args:
        location: A folder or a bucket's prefix.
        writer_id: Whose staged objects these are.
    """
    if isinstance(location, S3Location):
        # boto3 takes a third of a second and 30 MB, which only its users should pay.
        from logmirror.stores.s3 import S3Store  # noqa: PLC0415  # see above

        return S3Store(location)
    return FilesystemStore(Path(location.root), writer_id=writer_id)


def begin_writing(
    location: StoreLocation,
    writer_id: str,
    stack: contextlib.ExitStack,
    *,
    beside_others: bool = False,
) -> BlobStore:
    """The store of a run that writes: it can be relied on, and earlier runs' leftovers are gone.

    Args:
        location: A folder or a bucket's prefix.
        writer_id: Of the run.
        stack: Ends what marks the writer as alive.
        beside_others: Leave uncompleted uploads alone: they may be those of a mirror that runs.
    """
    store = open_store(location, writer_id)
    if isinstance(store, FilesystemStore):
        stack.enter_context(store.hold_writer_lock())
    else:
        store.prove_create_only()
        if beside_others:
            return store
    store.sweep()
    return store
