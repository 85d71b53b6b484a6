"""The port to object storage, and the contract of its adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from logmirror.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Buffer = bytes | bytearray | memoryview


class AlreadyExistsError(PositionError):
    """The name is taken; nothing was written. Facts: `name`.

    The existing object may be from an earlier attempt of the caller or from another writer. The
    caller decides by comparing the content with its own.
    """


class Tail(NamedTuple):
    """The end of a listing."""

    names: list[str]
    """Sorted, without the folder: all names, or the last ones."""

    is_whole: bool
    """Whether `names` are all names of the folder."""


class StagedObject(Protocol):
    """An object under construction, invisible in `BlobStore.names` until it is published."""

    def write(self, data: Buffer) -> int:
        """Append bytes; returns how many, always all of them.

        Raises:
            UnavailableError: There is no space, or the store cannot be reached; call `abort`.
        """
        ...

    def finish(self, name: str, *, travels: bool) -> str:
        """Finish the object; returns the token for `BlobStore.publish`.

        Args:
            name: The name under which it will be published.
            travels: Another process will publish the object: its bytes are durable when this
                returns, and the token is valid in that process. If False, the caller must publish
                with the same store instance.
        """
        ...

    def abort(self) -> None:
        """Discard the bytes. Never raises; has no effect after `finish` or a second time."""
        ...


class BlobStore(Protocol):
    """Named, immutable objects under one root. Names are relative paths with `/` between parts.

    The contract, tested for every adapter by `tests/stores/test_contract.py`:

    - Whole or absent: a listed name can be read back byte for byte, also after a crash at any
      moment.
    - Write once: `create` and `publish` never replace an object, so a second writer is detected.
    - Durable on return: when `create` or `publish` returns, the object survives a power loss.

    Every method may raise `UnavailableError` (unreachable or no space; nothing was written),
    `OutcomeUnknownError` (the response was lost) and `UsageError` (permission denied).
    """

    def create(self, name: str, data: bytes) -> None:
        """Write a small object under `name`, atomically.

        Raises:
            AlreadyExistsError: The name is taken, by the same or other content.
        """
        ...

    def stage(self, label: str) -> StagedObject:
        """Begin a large object. `label` describes it in case it is left over; it is not a name."""
        ...

    def publish(self, token: str, name: str) -> None:
        """Make a finished staged object visible under `name`, and forget the token.

        Raises:
            AlreadyExistsError: The name is taken, by the same or other content; the staged object
                is kept.
            UnavailableError: The staged object was swept, or `name` differs from the name passed to
                `finish` and the store cannot rename; nothing was published.
        """
        ...

    def discard(self, token: str) -> None:
        """Discard a finished staged object; has no effect if it does not exist."""
        ...

    def names(self, folder: str, after: str = "") -> Iterator[str]:
        """Yield the names (without the folder) of all objects directly in `folder`, sorted.

        A folder that does not exist is empty. A store may send a request for each 1,000 names, when
        they are wanted.

        Args:
            folder: The folder.
            after: Yield the names that sort after this one.
        """
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names of `names` with their sizes in bytes.

        Objects that are deleted meanwhile may be missing.
        """
        ...

    def below(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield all objects below `folder`, however deep: names without it, and sizes in bytes.

        Sorted by the bytes of the names, with dot-names. Objects that are deleted meanwhile may be
        missing. A store may send a request for each 1,000 names, when they are wanted.
        """
        ...

    def folders(self, folder: str) -> Iterator[str]:
        """Yield the names of all folders directly in `folder`, sorted, without dot-names.

        Args:
            folder: The folder; empty: the root.
        """
        ...

    def tail(self, folder: str, after: str = "") -> Tail:
        """Return the last names, for folders whose names begin with 20 digits.

        A store with many names may return only the last ones, for example the last page of a
        listing: the names before are then not checked by the caller. The names returned survive a
        power loss, so a caller may continue after them and report it.

        Args:
            folder: The folder.
            after: Return the names that sort after this one, with one cheap request; if there are
                very many, the first of them.
        """
        ...

    def read(self, name: str) -> bytes:
        """Return a small object. Raises `KeyError` if it does not exist."""
        ...

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """Return some bytes of an object, by one request. Raises `KeyError` if it does not exist.

        Args:
            name: The object.
            start: The position of the first byte.
            size_bytes: At least 1; fewer are returned if the object ends before.
        """
        ...

    def open(self, name: str) -> BinaryIO:
        """Open an object for seekable reading. Raises `KeyError` if it does not exist."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; has no effect if it does not exist.

        Used only for old claims and snapshots, and for objects that a merged one replaces.
        """
        ...
