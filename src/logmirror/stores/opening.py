"""Open the store of a location. Only this module names the adapters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from logmirror.clock import SYSTEM_CLOCK
from logmirror.locations import S3Location
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Collection

    from logmirror.locations import StoreLocation
    from logmirror.stores.base import BlobStore
    from logmirror.stores.s3 import S3Store


class Leftovers(NamedTuple):
    """The incomplete uploads of a bucket that a start may abort, if they are old enough."""

    folders: Collection[str]
    """Folders of the caller's own destinations, relative to the store's root."""

    is_object: Callable[[str], bool]
    """Whether a path below one of them, relative to the root, is that of an object."""


_LOG = logging.getLogger("logmirror.stores")


def open_store(
    location: StoreLocation, writer_id: str, *, held_bytes: int | None = None
) -> FilesystemStore | S3Store:
    """Return the store at a location, for one process; creates nothing and does not connect.

    Args:
        location: A folder or a bucket's prefix.
        writer_id: Owner of the staged objects.
        held_bytes: Size up to which an object under construction is kept in memory, if the store
            keeps it in memory; None: the store's default.
    """
    if isinstance(location, S3Location):
        # Importing boto3 takes a third of a second and 30 MB.
        if not location.require_atomic_create:
            from logmirror.stores.s3_read_back import ReadBackStore  # noqa: PLC0415  # see above

            return ReadBackStore(location, clock=SYSTEM_CLOCK)
        from logmirror.stores.s3 import S3Store  # noqa: PLC0415  # see above

        return S3Store(location, held_bytes=held_bytes)
    return FilesystemStore(Path(location.root), writer_id=writer_id)


def begin_writing(
    location: StoreLocation,
    writer_id: str,
    stack: contextlib.ExitStack,
    *,
    leftovers: Leftovers | None = None,
) -> BlobStore:
    """Return the store of a run that writes, after checking it and sweeping leftovers.

    Args:
        location: A folder or a bucket's prefix.
        writer_id: The writer ID of the run.
        stack: Releases the writer's lock.
        leftovers: In a bucket, the incomplete uploads that may be aborted; None: none.

    Raises:
        UsageError: The store replaces existing objects, and `require_atomic_create` is set; the
            filesystem has no hard links; or another process uses the same writer ID.
    """
    store = open_store(location, writer_id)
    if isinstance(store, FilesystemStore):
        stack.enter_context(store.hold_writer_lock())
        store.prove_links()
    else:
        _check_fencing(store)
    count = store.sweep() if isinstance(store, FilesystemStore) else _abort(store, leftovers)
    if count:
        _LOG.info(
            "removed what earlier runs left unfinished",
            extra={"facts": {"location": str(location), "count": count}},
        )
    return store


def _abort(store: S3Store, leftovers: Leftovers | None) -> int:
    return store.sweep(leftovers.folders, leftovers.is_object) if leftovers else 0


def _check_fencing(store: S3Store) -> None:
    """Raise for a store that replaces existing objects, or log that the user accepts it."""
    from logmirror.stores.s3_probe import ReplacesError  # noqa: PLC0415  # loads boto3

    location = store.location
    try:
        store.prove_create_only()
    except ReplacesError as error:
        if location.require_atomic_create:
            raise
        _LOG.warning(
            "degraded fencing: %s",
            error.message,
            extra={"facts": {**error.facts, "require_atomic_create": False}},
        )
    else:
        if not location.require_atomic_create:
            _LOG.warning(
                "degraded fencing without need: the store does not replace existing objects; "
                "remove `require-atomic-create: false`",
                extra={"facts": {"location": str(location)}},
            )
