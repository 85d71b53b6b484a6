"""The test kit we also ship: a store in memory, and the checker that compares source and copy.

The checker finds these anomalies, each reported once with its count and first example:

    A1   lost-write   a record is missing although a later one was copied
    A2   unseen       a record is missing at the end: stale or lost
    A3   duplicate    an offset appears again
    A12  reorder      a record appears behind a later one
    A13  mutation     key, value, headers, timestamp or timestamp type differ
    A14  phantom      a record at an offset where the source has none
    A15  chain        names do not tile the range: a gap, an overlap, or a strange name
"""

from __future__ import annotations

import io
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from logmirror.archive.naming import split_name
from logmirror.errors import InternalError, UnavailableError
from logmirror.stores.base import AlreadyExistsError, Tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from logmirror.stores.base import BlobStore, Buffer, StagedObject

    def _is_a_blob_store(store: MemoryStore) -> BlobStore:
        return store

    def _is_a_staged_object(staged: MemoryStagedObject) -> StagedObject:
        return staged


class MemoryStore:
    """A BlobStore in a dict. Passes the store contract, so it may stand in for any other.

    Args:
        before: Called before every operation with its name (`create`, `publish`, ...) and the
            object's name or token; may raise to make the operation fail, or wait to let another
            writer go first.
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
            raise UnavailableError("the staged object is gone", token=token)
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

    def names(self, folder: str) -> Iterator[str]:
        """See `BlobStore.names`."""
        self.before("names", folder)
        found = (name.rpartition("/") for name in self.objects)
        return iter(
            sorted(name for parent, _, name in found if parent == folder and name[0] != ".")
        )

    def sizes(self, folder: str) -> dict[str, int]:
        """See `BlobStore.sizes`."""
        return {name: len(self.objects[f"{folder}/{name}"]) for name in self.names(folder)}

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        self.before("folders", folder)
        start = f"{folder}/" if folder else ""
        inside = (n.removeprefix(start) for n in self.objects if n.startswith(start))
        found = {head for head, _, rest in (name.partition("/") for name in inside) if rest}
        return iter(sorted(name for name in found if name[0] != "."))

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`."""
        return Tail([name for name in self.names(folder) if name > after], is_whole=not after)

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        self.before("read", name)
        return self.objects[name]

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`."""
        self.before("open", name)
        return io.BytesIO(self.objects[name])

    def delete(self, name: str) -> None:
        """See `BlobStore.delete`."""
        self.before("delete", name)
        self.objects.pop(name, None)


class MemoryStagedObject:
    """An object under construction in a MemoryStore."""

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


class Row(NamedTuple):
    """One record as a reader saw it: its offset and all that must never change on the way."""

    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One kind of difference between a source and a copy."""

    code: str
    """`A1` and so on, as in the module's table."""

    count: int
    """How often it was found."""

    example: str
    """The first one found."""


def compare(truth: Iterable[Row], copy: Iterable[Row]) -> list[Anomaly]:
    """Compare what the source holds with what the copy holds.

    Reads both as streams; memory grows with the anomalies and with the holes of the source, not
    with the records.

    Args:
        truth: The source's records, as an independent reader saw them, by ascending offset.
        copy: The copy's records in the order in which the copy holds them.

    Returns:
        The anomalies, by code; empty means that the copy is exact.

    Raises:
        ValueError: The offsets of `truth` do not ascend: then there is nothing to compare with.
    """
    comparison = _Comparison(iter(truth))
    for row in copy:
        comparison.step(row)
    return comparison.finish()


class _Comparison:
    """A merge of two streams by offset that remembers what it has passed over."""

    def __init__(self, truth: Iterator[Row]) -> None:
        self._truth = truth
        self._missing: dict[int, Row] = {}
        self._hole_firsts: list[int] = []
        self._hole_lasts: list[int] = []
        self._previous = -1
        self._findings = _Findings()
        self._next: Row | None = None
        self._advance()

    def step(self, row: Row) -> None:
        while self._next is not None and self._next.offset < row.offset:
            self._missing[self._next.offset] = self._next
            self._advance()
        if self._next is not None and self._next.offset == row.offset:
            self._same(self._next, row)
            self._advance()
        elif row.offset in self._missing:
            self._findings.add("A12", f"{row} behind a later offset")
            self._same(self._missing.pop(row.offset), row)
        elif self._source_had(row.offset):
            self._findings.add("A3", f"{row} again")
        else:
            self._findings.add("A14", f"{row} where the source has none")

    def finish(self) -> list[Anomaly]:
        for row in self._missing.values():
            self._findings.add("A1", f"{row} is missing")
        while self._next is not None:
            self._findings.add("A2", f"{self._next} is not there yet, or lost")
            self._advance()
        return self._findings.listed()

    def _same(self, expected: Row, found: Row) -> None:
        if tuple(expected) != tuple(found):
            self._findings.add("A13", f"expected {expected}, found {found}")

    def _advance(self) -> None:
        self._next = next(self._truth, None)
        if self._next is None:
            return
        offset = self._next.offset
        if offset <= self._previous:
            raise ValueError(f"offset {offset} of the source comes after {self._previous}")
        if offset > self._previous + 1:
            self._hole_firsts.append(self._previous + 1)
            self._hole_lasts.append(offset - 1)
        self._previous = offset

    def _source_had(self, offset: int) -> bool:
        """Whether an offset that was passed carried a record."""
        index = bisect_right(self._hole_firsts, offset) - 1
        in_hole = index >= 0 and offset <= self._hole_lasts[index]
        return 0 <= offset <= self._previous and not in_hole


class _Findings:
    """Counts by code, with the first example of each."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, code: str, example: str) -> None:
        self._counts[code] = self._counts.get(code, 0) + 1
        self._examples.setdefault(code, example)

    def listed(self) -> list[Anomaly]:
        return [
            Anomaly(code=code, count=self._counts[code], example=self._examples[code])
            for code in sorted(self._counts, key=lambda code: int(code[1:]))
        ]


def check_tiles(names: Iterable[str], start: int, end: int) -> list[Anomaly]:
    """Compare the names of one partition's objects with the range that they must tile.

    Args:
        names: Without folder, in any order.
        start: The first offset that must be covered.
        end: One past the last.

    Returns:
        At most one anomaly, A15; empty means that every offset is covered exactly once.
    """
    findings = _Findings()
    expected, extensions = start, set()
    for name in sorted(names):
        parts = split_name(name)
        if parts is None:
            findings.add("A15", f"strange name {name!r}")
            continue
        first, last, extension = parts
        extensions.add(extension)
        if first != expected:
            kind = "overlap" if first < expected else "gap"
            findings.add("A15", f"{kind}: {name} where {expected} must follow")
        expected = max(expected, last + 1)
    if expected != end:
        findings.add("A15", f"the objects end before {expected}, not before {end}")
    if len(extensions) > 1:
        findings.add("A15", f"several formats: {sorted(extensions)}")
    return findings.listed()
