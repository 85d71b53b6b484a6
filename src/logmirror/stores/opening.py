"""Which store belongs to a location; alone names the adapters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from logmirror.clock import SYSTEM_CLOCK
from logmirror.locations import S3Location
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    import contextlib

    from logmirror.locations import StoreLocation
    from logmirror.stores.base import BlobStore
    from logmirror.stores.s3 import S3Store

_LOG = logging.getLogger("logmirror.stores")


def open_store(
    location: StoreLocation, writer_id: str, *, held_bytes: int | None = None
) -> FilesystemStore | S3Store:
    """The store at a location, for one process; creates and connects nothing yet.

    Args:
        location: A folder or a bucket's prefix.
        writer_id: Whose staged objects these are.
        held_bytes: Of an object under construction, where the store keeps it in memory; None: the
            store's own choice.
    """
    if isinstance(location, S3Location):
        # boto3 takes a third of a second and 30 MB, which only its users should pay.
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
        _look_at_fencing(store)
        if beside_others:
            return store
    store.sweep()
    return store


def _look_at_fencing(store: S3Store) -> None:
    """Raise for a store that replaces what is there, or say that its user has accepted it."""
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
                "degraded fencing without need: the store creates and does not replace, so "
                "`require-atomic-create: false` can go",
                extra={"facts": {"location": str(location)}},
            )
