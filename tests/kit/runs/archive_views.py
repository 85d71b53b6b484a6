"""A store as one reader of an archive sees it, while writers change it between requests.

The changes are those of a `History`. Before each request of the reader, `ask` may apply some of
them. A listing takes several requests, so it may see a part of what happens meanwhile: a bucket
lists pages in the order of names, a directory its entries in an order of its own, and a file that
is created while it is listed may be missing.
"""

from __future__ import annotations

import io
import os
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self

from logmirror.stores.base import Tail
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from _typeshed import WriteableBuffer

    from kit.runs.archive_history import Change

_PAGE: Final = 3
"""Names in a page of a listing."""

_PARTS: Final = 2
"""Requests that read an object."""


class Bucket:
    """A bucket; the part of a `BlobStore` that readers use.

    Args:
        changes: All changes.
        ask: Called before each request, with its kind and what it is for.

    Attributes:
        at: How many changes were applied.
        objects: The objects by name.
    """

    def __init__(self, changes: list[Change], ask: Callable[[str, str], None]) -> None:
        self.at = 0
        self.objects: dict[str, bytes] = {}
        self._changes, self._ask = changes, ask

    def advance(self, count: int) -> None:
        """Apply the next changes, as far as there are any."""
        for change in self._changes[self.at : self.at + count]:
            self.at += 1
            if change.data is None:
                self.objects.pop(change.name, None)
            else:
                self.objects[change.name] = change.data

    def names(self, folder: str, after: str = "") -> Iterator[str]:
        """See `BlobStore.names`."""
        for name in self._below(f"{folder}/", f"{folder}/{after}"):
            if "/" not in (rest := name.removeprefix(f"{folder}/")):
                yield rest

    def _below(self, start: str, after: str) -> Iterator[str]:
        while True:
            self._ask("list", start)
            left = sorted(one for one in self.objects if one.startswith(start) and one > after)
            yield from left[:_PAGE]
            if len(left) <= _PAGE:
                return
            after = left[_PAGE - 1]

    def below(self, folder: str) -> Iterator[tuple[str, int]]:
        """See `BlobStore.below`."""
        for name in self._below(f"{folder}/", f"{folder}/"):
            yield name.removeprefix(f"{folder}/"), len(self.objects.get(name, b""))

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        self._ask("folders", folder)
        start = f"{folder}/" if folder else ""
        inner = [one.removeprefix(start) for one in self.objects if one.startswith(start)]
        found = {one.partition("/")[0] for one in inner if "/" in one}
        return iter(sorted(one for one in found if one[0] != "."))

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`."""
        return Tail(list(self.names(folder, after)), is_whole=not after)

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        self._ask("read", name)
        return self.objects[name]

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`."""
        self._ask("open", name)
        size_bytes = len(self.objects[name])
        part_bytes = -(-size_bytes // _PARTS)
        return io.BufferedReader(_Reader(self, name, size_bytes), max(1, part_bytes))

    def get(self, name: str, start: int, size_bytes: int) -> bytes:
        """Return some bytes of an object. Raises KeyError if it is gone."""
        self._ask("get", name)
        return self.objects[name][start : start + size_bytes]


class _Reader(io.RawIOBase):
    """Reads an object of a bucket part by part, each with a request."""

    def __init__(self, bucket: Bucket, name: str, size_bytes: int) -> None:
        self._bucket, self._name, self._size_bytes = bucket, name, size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = (0, self._position, self._size_bytes)[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with memoryview(buffer).cast("B") as view:
            if self._position >= self._size_bytes or not len(view):
                return 0
            found = self._bucket.get(self._name, self._position, len(view))
            view[: len(found)] = found
            self._position += len(found)
            return len(found)


class Directory(Bucket):
    """A directory, behind the product's store; the arguments are those of `Bucket`.

    Args:
        root: The directory; it is created.
        changes: See `Bucket`.
        ask: The same.
        salt: Decides the order of its entries.
    """

    def __init__(
        self, root: Path, changes: list[Change], ask: Callable[[str, str], None], salt: int
    ) -> None:
        super().__init__(changes, ask)
        root.mkdir()
        self.root, self._salt = root, salt
        self._store = FilesystemStore(root, writer_id="reader")
        self.system = _System(self)

    def advance(self, count: int) -> None:
        """See `Bucket.advance`."""
        before = self.at
        super().advance(count)
        for change in self._changes[before : self.at]:
            path = self.root / change.name
            if change.data is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(change.data)

    def names(self, folder: str, after: str = "") -> Iterator[str]:
        """See `BlobStore.names`."""
        return self._store.names(folder, after)

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        self._ask("folders", folder)
        return self._store.folders(folder)

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`."""
        return Tail(list(self.names(folder, after)), is_whole=not after)

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        self._ask("read", name)
        return self._store.read(name)

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`."""
        self._ask("open", name)
        return self._store.open(name)

    def path(self, name: str) -> Path:
        """Return the path of a name, of which a file is opened next."""
        self._ask("path", name)
        return self.root / name

    def entries(self, path: Path) -> Iterator[_Entry]:
        """List a folder, entry by entry, in an order that has nothing to do with time or names."""
        at = (-1, "")
        folder = str(path.relative_to(self.root))
        while True:
            self._ask("entry", folder)
            left = [key for one in path.iterdir() if (key := self._key(one.name)) > at]
            if not left:
                return
            at = min(left)
            yield _Entry(at[1])

    def _key(self, name: str) -> tuple[int, str]:
        return zlib.crc32(name.encode(), self._salt), name


class _Entry:
    """What `os.scandir` yields."""

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def is_file(*, follow_symlinks: bool) -> bool:
        return not follow_symlinks


class _Scan:
    """What `os.scandir` returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __enter__(self) -> Self:
        return self

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __exit__(self, *_: object) -> None:
        return


class _System:
    """The module `os`, for the store of a directory."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def scandir(self, path: Path) -> _Scan:
        if not path.is_dir():
            raise FileNotFoundError(path)
        return _Scan(self._directory.entries(path))
