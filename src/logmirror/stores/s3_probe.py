"""Does this store mean it when it takes `If-None-Match: *`? Found out before anything relies on it.

Some stores ignore the condition and replace; some check it when a body begins to arrive and not
when it has arrived. On the first start at a prefix both are tried, on names of our own; what proves
it is a marker that every later start tries to create again, in vain:

    .logmirror/probes/create-only       the marker
    .logmirror/probes/<nonce>-...       what the first start tried
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
    """The store replaces objects though it was told not to. Facts: `location`, `reason`."""


def prove_create_only(
    location: S3Location, store: BlobStore, put: Callable[[str, SlowBody], None]
) -> None:
    """Raise for a store that replaces what is there.

    Args:
        location: For the error.
        store: At this location.
        put: Creates an object from a body that comes slowly; may be called by two threads.

    Raises:
        ReplacesError: It replaces.
    """
    is_known = MARKER in store.names(FOLDER)
    try:
        if not is_known:
            _try_in_turn(location, store)
            _try_at_once(location, store, put)
        store.create(f"{FOLDER}/{MARKER}", b"this store creates and does not replace\n")
    except AlreadyExistsError:
        return
    except UsageError as error:
        if is_unknown_to_store(error):
            raise _replaces(location, "it does not know `If-None-Match: *`") from error
        raise
    if is_known:
        raise _replaces(location, "a name that was taken was written again")


def _try_in_turn(location: S3Location, store: BlobStore) -> None:
    name = f"{FOLDER}/{new_nonce()}-in-turn"
    store.create(name, b"first")
    try:
        store.create(name, b"second")
    except AlreadyExistsError:
        pass
    else:
        raise _replaces(location, "the second of two objects replaced the first")
    if store.read(name) != b"first":
        raise _replaces(location, "what was refused was written all the same")


def _try_at_once(
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
        raise _replaces(location, f"of two objects at once {len(won)} were said to be the first")


class SlowBody(io.BytesIO):
    """Bytes that come a few at a time."""

    def read(self, size: int | None = -1, /) -> bytes:
        """At most a piece, after a while."""
        SYSTEM_CLOCK.sleep_ms(_SLOW_PAUSE_MS)
        wanted = _SLOW_PIECE if size is None or size < 0 else min(size, _SLOW_PIECE)
        return super().read(wanted)


def _replaces(location: S3Location, reason: str) -> ReplacesError:
    return ReplacesError(
        "the store replaces objects that are there, though it was told not to",
        hint="with it, two writers could destroy each other's records unseen: use a store that "
        "honours `If-None-Match: *`, or a newer version of this one. Where only one mirror ever "
        "writes there, `require-atomic-create: false` goes on.",
        location=str(location),
        reason=reason,
    )
