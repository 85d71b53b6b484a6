"""Test whether a store honours `If-None-Match: *`.

Some stores ignore the condition and replace; some check it when a body begins to arrive and not
when it has arrived. The first start at a prefix tests both, with objects of its own. It then
creates a marker, which every later start tries to create again and must fail to:

    .logmirror/probes/create-only       the marker
    .logmirror/probes/<nonce>-...       test objects of the first start
"""

from __future__ import annotations

import io
import threading
from typing import TYPE_CHECKING, Final

from logmirror.clock import SYSTEM_CLOCK, new_nonce
from logmirror.errors import LogmirrorError, UsageError
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.s3_calls import is_unknown_to_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.locations import S3Location
    from logmirror.stores.base import BlobStore

FOLDER: Final = ".logmirror/probes"
MARKER: Final = "create-only"

_SLOW_BYTES: Final = 256 << 10
_SLOW_PIECE: Final = 16 << 10
_SLOW_PAUSE_MS: Final = 20


class ReplacesError(UsageError):
    """The store replaces objects despite `If-None-Match: *`. Facts: `location`, `reason`."""


def prove_create_only(
    location: S3Location, store: BlobStore, put: Callable[[str, SlowBody], None]
) -> None:
    """Raise for a store that replaces existing objects.

    Args:
        location: The location, for the error.
        store: The store at this location.
        put: Creates an object from a slow body; must be safe to call from two threads.

    Raises:
        ReplacesError: The store replaces existing objects.
    """
    is_known = MARKER in store.names(FOLDER)
    try:
        if not is_known:
            _test_sequential(location, store)
            _test_concurrent(location, store, put)
        # Other bytes each time: after a lost response, the same ones would count as created.
        text = f"this store creates and does not replace\n{new_nonce()}\n"
        store.create(f"{FOLDER}/{MARKER}", text.encode())
    except AlreadyExistsError:
        return
    except UsageError as error:
        if is_unknown_to_store(error):
            raise _replaces(location, "it does not support `If-None-Match: *`") from error
        raise
    if is_known:
        raise _replaces(location, "an existing object was written again")


def _test_sequential(location: S3Location, store: BlobStore) -> None:
    name = f"{FOLDER}/{new_nonce()}-in-turn"
    store.create(name, b"first")
    try:
        store.create(name, b"second")
    except AlreadyExistsError:
        pass
    else:
        raise _replaces(location, "the second of two objects replaced the first")
    if store.read(name) != b"first":
        raise _replaces(location, "an object was written although the request was refused")


def _test_concurrent(
    location: S3Location, store: BlobStore, put: Callable[[str, SlowBody], None]
) -> None:
    name = f"{FOLDER}/{new_nonce()}-at-once"
    won: list[bytes] = []
    failures: list[LogmirrorError] = []

    def create(fill: bytes) -> None:
        try:
            put(name, SlowBody(fill * _SLOW_BYTES))
            won.append(fill)
        except AlreadyExistsError:
            pass
        except LogmirrorError as error:
            failures.append(error)

    threads = [threading.Thread(target=create, args=(fill,)) for fill in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    if len(won) != 1 or store.read(name) != won[0] * _SLOW_BYTES:
        raise _replaces(location, f"{len(won)} of two concurrent creates succeeded")


class SlowBody(io.BytesIO):
    """A request body that is sent slowly, in small pieces."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return at most one piece, after a pause."""
        SYSTEM_CLOCK.sleep_ms(_SLOW_PAUSE_MS)
        wanted = _SLOW_PIECE if size is None or size < 0 else min(size, _SLOW_PIECE)
        return super().read(wanted)


def _replaces(location: S3Location, reason: str) -> ReplacesError:
    return ReplacesError(
        "the store replaces existing objects despite `If-None-Match: *`",
        hint="two writers could destroy each other's records unnoticed: use a store that honours "
        "`If-None-Match: *`, or a newer version of this one. If only one mirror ever writes there, "
        "set `require-atomic-create: false`.",
        location=str(location),
        reason=reason,
    )
