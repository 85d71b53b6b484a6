"""The port to where bytes rest, and what every adapter behind it must promise."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol

from logmirror.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Iterator

    Buffer = bytes | bytearray | memoryview


class AlreadyExistsError(PositionError):
    """The name is taken; ours was not written. Facts: `name`.

    Not yet a verdict: it may be our own earlier attempt or a second writer. Only the caller, who
    knows what it meant to write, can compare and tell.
    """


class Tail(NamedTuple):
    """The end of a listing."""

    names: list[str]
    """Sorted, without folder: all of them, or those that sort last."""

    is_whole: bool
    """Whether they are all."""


class StagedObject(Protocol):
    """An object under construction, invisible in `BlobStore.names` until it is published."""

    def write(self, data: Buffer) -> int:
        """Append bytes; returns how many, always all of them.

        Raises:
            UnavailableError: No space, or the store cannot be reached; call `abort`.
        """
        ...

    def finish(self, name: str, *, travels: bool) -> str:
        """Make the object ready to be published; returns the token that `BlobStore.publish` takes.

        Args:
            name: Under which it will be published.
            travels: Another process will publish it: its bytes are durable when this returns, and
                the token means the same there. Else this store object will.
        """
        ...

    def abort(self) -> None:
        """Throw the bytes away. Never raises; harmless after `finish` or twice."""
        ...


class BlobStore(Protocol):
    """Named, immutable objects under one root. Names are relative paths with `/` between parts.

    The contract, tested for every adapter by `tests/stores/test_contract.py`:

    - Whole or absent: a name that is listed can be read back byte for byte, also after a crash at
      any moment.
    - Write once: `create` and `publish` never replace. This is what makes a second writer visible.
    - Durable on return: when `create` or `publish` returns, the object survives loss of power.

    Every method may raise `UnavailableError` (not reached or no space; nothing was written),
    `OutcomeUnknownError` (the answer was lost) and `UsageError` (permission denied).
    """

    def create(self, name: str, data: bytes) -> None:
        """Write a small object under `name`, atomically.

        Raises:
            AlreadyExistsError: The name is taken, whatever its content.
        """
        ...

    def stage(self, label: str) -> StagedObject:
        """Begin a large object. `label` helps a person who finds a leftover; it names nothing."""
        ...

    def publish(self, token: str, name: str) -> None:
        """Make a finished staged object visible under `name`, and forget the token.

        Raises:
            AlreadyExistsError: The name is taken, whatever its content; the staged object stays.
            UnavailableError: The staged object is gone (swept), or `name` is another one than
                `finish` was told and the store cannot rename; nothing was published.
        """
        ...

    def discard(self, token: str) -> None:
        """Throw a finished staged object away; harmless if it is gone."""
        ...

    def names(self, folder: str) -> Iterator[str]:
        """Yield the names (without the folder) of all whole objects directly in `folder`, sorted.

        A folder that does not exist is empty.
        """
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """As `names`, each with its bytes; what is deleted meanwhile may be missing."""
        ...

    def folders(self, folder: str) -> Iterator[str]:
        """Yield the names of all folders directly in `folder`, sorted, without those of dots.

        An empty name is the root.
        """
        ...

    def tail(self, folder: str, after: str = "") -> Tail:
        """Return the names that sort last, for folders whose names begin with 20 digits.

        As `names`, but a store with many names may look at the last of them only. With `after`,
        those that sort behind it, of very many only the first: one cheap question. What it names
        survives loss of power, so a caller may go on behind it and say so.
        """
        ...

    def read(self, name: str) -> bytes:
        """Return a small object. Raises `KeyError` if there is none."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open an object for seekable reading. Raises `KeyError` if there is none."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; harmless if there is none.

        Only for claims and snapshots that have served, and for objects that a merged one replaces.
        """
        ...
