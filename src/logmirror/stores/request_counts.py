"""Requests that were sent to a store, and the bytes of objects in them, by kind.

Each attempt counts, since each is paid for. HEAD is a `get`, all steps of an upload are a `put`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from logmirror.stores.base import BlobStore

KINDS: Final = ("put", "get", "list", "delete")
"""As stores price them: writes and listings cost most, reads less, deletions mostly nothing."""

_KIND_OF: Final = {"put": "put", "get": "get", "head": "get", "list": "list", "delete": "delete"}


class RequestCounts:
    """The counters of one store. Safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = dict.fromkeys(KINDS, 0)
        self._bytes = dict.fromkeys(KINDS, 0)

    def sent(self, operation: str, size_bytes: int = 0) -> None:
        """Count a request.

        Args:
            operation: The name of boto3's method.
            size_bytes: The bytes of an object that it sends.
        """
        kind = _kind(operation)
        with self._lock:
            self._requests[kind] += 1
            self._bytes[kind] += size_bytes

    def received(self, size_bytes: int) -> None:
        """Count the bytes of an object in a response."""
        with self._lock:
            self._bytes["get"] += size_bytes

    @property
    def requests(self) -> dict[str, int]:
        """Requests by kind."""
        return dict(self._requests)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of objects by kind: sent with `put`, received with `get`."""
        return dict(self._bytes)


def _kind(operation: str) -> str:
    if operation == "abort_multipart_upload":
        return "delete"
    return _KIND_OF.get(operation.partition("_")[0], "put")


def counts_of(store: BlobStore) -> RequestCounts:
    """Return the counters of a store; those of one without requests stay 0."""
    found = getattr(store, "requests", None)
    return found if isinstance(found, RequestCounts) else RequestCounts()
