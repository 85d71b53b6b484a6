"""A store in memory that passes the contract tests of all stores."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO

from logmirror.errors import InternalError, UnavailableError
from logmirror.stores.base import AlreadyExistsError, Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.stores.base import BlobStore, Buffer, StagedObject

    def _is_a_blob_store(store: MemoryStore) -> BlobStore:
        return store

    def _is_a_staged_object(staged: MemoryStagedObject) -> StagedObject:
        return staged


class MemoryStore:
    """A `BlobStore` in a dict. It passes the contract tests, so it can replace any other store.

    Args:
        before: Called before every operation with its name (`create`, `publish`, ...) and the name
            or token of the object. It can raise to make the operation fail, or block to let
            another writer run first.
    """

    def __init__(self, *, before: Callable[[str, str], None] | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.staged: dict[str, bytes] = {}
        self.before: Callable[[str, str], None] = before or (lambda _operation, _name: None)
        self._stage_count = 0

    def create(self, name: str, data: bytes) -> None:
        """See `BlobStore.create`."""
        self.before("create", name)
        self._add(name, bytes(data))

    def stage(self, label: str) -> MemoryStagedObject:
        """See `BlobStore.stage`."""
        self.before("stage", label)
        self._stage_count += 1
        return MemoryStagedObject(self, f"{label}.{self._stage_count}")

    def publish(self, token: str, name: str) -> None:
        """See `BlobStore.publish`."""
        self.before("publish", name)
        if token not in self.staged:
            raise UnavailableError("the staged object does not exist", token=token)
        self._add(name, self.staged[token])
        del self.staged[token]

    def _add(self, name: str, data: bytes) -> None:
        if name in self.objects:
            raise AlreadyExistsError("object exists", name=name)
        self.objects[name] = data

    def discard(self, token: str) -> None:
        """See `BlobStore.discard`."""
        self.before("discard", token)
        self.staged.pop(token, None)

    def names(self, folder: str, after: str = "") -> Iterator[str]:
        """See `BlobStore.names`."""
        self.before("names", folder)
        found = (name.rpartition("/") for name in list(self.objects))  # others create meanwhile
        names = (name for parent, _, name in found if parent == folder and name[0] != ".")
        return iter(sorted(name for name in names if name > after))

    def sizes(self, folder: str) -> dict[str, int]:
        """See `BlobStore.sizes`."""
        return {name: len(self.objects[f"{folder}/{name}"]) for name in self.names(folder)}

    def below(self, folder: str) -> Iterator[tuple[str, int]]:
        """See `BlobStore.below`."""
        self.before("below", folder)
        found = sorted((name, len(data)) for name, data in list(self.objects.items()))
        start = f"{folder}/"
        return iter([(n.removeprefix(start), size) for n, size in found if n.startswith(start)])

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        self.before("folders", folder)
        start = f"{folder}/" if folder else ""
        inside = (n.removeprefix(start) for n in list(self.objects) if n.startswith(start))
        found = {head for head, _, rest in (name.partition("/") for name in inside) if rest}
        return iter(sorted(name for name in found if name[0] != "."))

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`."""
        return Tail(list(self.names(folder, after)), is_whole=not after)

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        self.before("read", name)
        return self.objects[name]

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See `BlobStore.read_range`."""
        self.before("read_range", name)
        return self.objects[name][start : start + size_bytes]

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`."""
        self.before("open", name)
        return io.BytesIO(self.objects[name])

    def delete(self, name: str) -> None:
        """See `BlobStore.delete`."""
        self.before("delete", name)
        self.objects.pop(name, None)


class MemoryStagedObject:
    """An object that is being written to a `MemoryStore`."""

    def __init__(self, store: MemoryStore, token: str) -> None:
        self._store = store
        self._token = token
        self._data: bytearray | None = bytearray()

    def write(self, data: Buffer) -> int:
        """See `StagedObject.write`."""
        self._store.before("write", self._token)
        with memoryview(data) as view:
            self._open_data().extend(view)
            return view.nbytes

    def finish(self, name: str, *, travels: bool) -> str:
        """See `StagedObject.finish`."""
        del name, travels
        self._store.before("finish", self._token)
        self._store.staged[self._token] = bytes(self._open_data())
        self._data = None
        return self._token

    def abort(self) -> None:
        """See `StagedObject.abort`."""
        self._data = None

    def _open_data(self) -> bytearray:
        if self._data is None:
            raise InternalError("the staged object is finished or aborted", token=self._token)
        return self._data
