"""Read objects back, and say whether they are what their name and their claim say.

1. Every object is read as a stream: memory is bounded by a batch, a row group or a line.
2. A finding is a CorruptionError that names the object; nothing is repaired.
3. Native objects show what the log held: records of aborted transactions are there, followed by
   their marker, as a consumer with read_uncommitted sees them.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

import numpy as np
import xxhash

from logmirror.archive.compactions import read_promise
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET, parse_name
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.parquet import open_parquet, read_parquet
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError, UsageError
from logmirror.wire.columns import ContentDigest
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import WriteableBuffer

    from logmirror.archive.claims import Claim
    from logmirror.model import OffsetRange
    from logmirror.stores.base import BlobStore
    from logmirror.wire.scan import Batches

_READ_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectReport:
    """What was found of a sound object."""

    name: str
    """Without folder."""

    covered: OffsetRange
    size_bytes: int
    record_count: int | None
    """Records read; what the footer says if the object was not read; None if nothing says.

    In native objects all but transaction markers count, aborted records too.
    """

    digest: str | None
    """Content digest; from the footer if the object was not read; None if nothing says."""

    metadata: ObjectMetadata | None
    """Parquet: the object's own account of itself."""


class Copy(Protocol):
    """Takes what a check reads, as it is read; sound only if the check ends without an error."""

    def take_bytes(self, data: memoryview) -> None:
        """The object's bytes, in order, all of them; not those of Parquet. Valid in the call."""
        ...

    def take_rows(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """The object's rows, in order, of `wire.columns.SCHEMA`; not those of native objects."""
        ...


class _Walk:
    """Follows the offsets of an object from row to row, or batch to batch."""

    def __init__(self, name: str, covered: OffsetRange) -> None:
        self._name = name
        self._covered = covered
        self._previous = -1
        self.record_count = 0

    def step(self, offsets: Any) -> None:  # noqa: ANN401  # an int64 array
        """Check the offsets of the next records."""
        if not len(offsets):
            return
        first, last = int(offsets[0]), int(offsets[-1])
        jumps = np.flatnonzero(np.diff(offsets) <= 0)
        if first <= self._previous or len(jumps):
            at = 0 if first <= self._previous else int(jumps[0]) + 1
            raise CorruptionError(
                "offsets in the object do not ascend",
                name=self._name,
                offset=int(offsets[at]),
                after=self._previous if at == 0 else int(offsets[at - 1]),
            )
        if first < self._covered.first or last > self._covered.last:
            raise CorruptionError(
                "the object holds offsets outside the range of its name",
                name=self._name,
                first=first,
                last=last,
            )
        self._previous = last
        self.record_count += len(offsets)


def iterate(
    store: BlobStore, folder: str, name: str, *, topic: str = "", utf8: bool = False
) -> Iterator[Any]:
    """Yield an object's rows as Arrow record batches of `wire.columns.SCHEMA`, in order.

    Args:
        store: Where it lies.
        folder: Of its chain: `<destination>/<partition>`.
        name: Without folder.
        topic: Stands in the rows of native objects, which do not name theirs.
        utf8: NDJSON keys and values are text.

    Raises:
        CorruptionError: The object is not of its format.
        KeyError: There is no such object.
    """
    covered, extension = _parsed(name)
    with store.open(f"{folder}/{name}") as file:
        if extension == NATIVE:
            yield from _native_rows(file, name, covered, topic, _partition_of(folder))
        elif extension == PARQUET:
            yield from read_parquet(open_parquet(file, name), name)
        else:
            yield from read_ndjson(file, name=name, utf8=utf8)


def check_object(  # noqa: PLR0913  # which object, how deep, what its bytes do not say
    store: BlobStore,
    folder: str,
    name: str,
    *,
    deep: bool,
    utf8: bool = False,
    compacted: bool = False,
    copy: Copy | None = None,
) -> ObjectReport:
    """Check one object against its format, its name, and what was promised for it, if that is kept.

    That is its claim, or the record of the compaction that made it.

    Args:
        store: Where it lies.
        folder: Of its chain: `<destination>/<partition>`.
        name: Without folder.
        deep: Read all of it: checksums, records, order, counts, digest. Else only that it is there
            and, for Parquet, that its footer agrees with its name.
        utf8: NDJSON keys and values are text.
        compacted: The topic's log may lack offsets at the end of the object without a trace in it.
        copy: Gets what is read; only with `deep`.

    Raises:
        CorruptionError: The object is not what it should be. Facts: `name` and what was found.
        UsageError: A newer version of the program wrote it.
        UnavailableError: It could not be read.
        KeyError: There is no such object.
    """
    covered, extension = _parsed(name)
    claim = read_promise(store, folder, covered)
    try:
        with store.open(f"{folder}/{name}") as file:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            report = _Check(name, covered, _partition_of(folder), size_bytes, copy)
            if extension == PARQUET:
                found = report.parquet(file, deep=deep)
            else:
                whole = _tee(file, copy.take_bytes) if copy else file
                if extension == NATIVE:
                    may_be_short = compacted or claim is not None
                    found = report.native(whole, deep=deep, compacted=may_be_short)
                else:
                    found = report.ndjson(whole, deep=deep, utf8=utf8)
    except LogmirrorError as error:
        raise error.add_facts(name=name) from None
    except OSError as error:
        raise UnavailableError(
            "could not read the object",
            hint="check the disk",
            name=name,
            reason=error.strerror,
        ) from error
    if claim is not None:
        _compare_with_claim(found, claim)
    return found


class _Check:
    """The checks of one object, by format."""

    def __init__(
        self,
        name: str,
        covered: OffsetRange,
        partition: int,
        size_bytes: int,
        copy: Copy | None,
    ) -> None:
        self._name = name
        self._covered = covered
        self._partition = partition
        self._size_bytes = size_bytes
        self._copy = copy
        self._topic: str | None = None

    def _report(
        self, count: int | None, digest: str | None, metadata: ObjectMetadata | None = None
    ) -> ObjectReport:
        return ObjectReport(
            name=self._name,
            covered=self._covered,
            size_bytes=self._size_bytes,
            record_count=count,
            digest=digest,
            metadata=metadata,
        )

    def native(self, file: BinaryIO, *, deep: bool, compacted: bool) -> ObjectReport:
        if not deep:
            return self._report(None, None)
        digest, decoder = xxhash.xxh3_128(), RecordDecoder()
        count, reached, lowest = 0, self._covered.first - 1, None
        for view, batches in _native_batches(file, self._name):
            digest.update(view[: batches.consumed_bytes])
            base, last = int(batches.base_offsets[0]), int(batches.last_offsets[0])
            # The first batch may begin before the range: then the copy began in the middle of it.
            if last <= reached or (lowest is not None and base <= reached):
                raise CorruptionError(
                    "the object holds batches from before its range or twice",
                    name=self._name,
                    offset=base,
                    expected=reached + 1,
                )
            lowest, reached = base, int(batches.last_offsets[-1])
            rows = decoder.decode(view, batches, first=self._covered.first, end=reached + 1)
            count += sum(columns.rows for columns in rows)
        if reached > self._covered.last or (reached < self._covered.last and not compacted):
            raise CorruptionError(
                "the object does not end where its name says",
                hint="bytes are missing at its end, or it was renamed",
                name=self._name,
                expected=self._covered.last,
                found=reached,
            )
        return self._report(count, f"xxh3:{digest.hexdigest()}")

    def parquet(self, file: BinaryIO, *, deep: bool) -> ObjectReport:
        parquet = open_parquet(file, self._name)
        metadata = ObjectMetadata.from_key_values(parquet.metadata.metadata, name=self._name)
        count = parquet.metadata.num_rows
        if metadata is not None:
            self._expect("range", self._covered, metadata.covered)
            self._expect("partition", self._partition, metadata.partition)
            self._expect("record count", metadata.record_count, count)
            self._topic = metadata.topic
        if not deep:
            return self._report(count, metadata.digest if metadata else None, metadata)
        found, digest = self._rows(read_parquet(parquet, self._name))
        self._expect("record count", count, found)
        if metadata is not None:
            self._expect("digest", metadata.digest, digest)
        return self._report(found, digest, metadata)

    def ndjson(self, file: BinaryIO, *, deep: bool, utf8: bool) -> ObjectReport:
        if not deep:
            return self._report(None, None)
        return self._report(*self._rows(read_ndjson(file, name=self._name, utf8=utf8)))

    def _rows(self, batches: Iterator[Any]) -> tuple[int, str]:
        """Check every row; returns how many there are, and their digest."""
        walk, digest = _Walk(self._name, self._covered), ContentDigest()
        for batch in batches:
            walk.step(batch.column("offset").to_numpy())
            self._expect_everywhere(batch, "partition", self._partition)
            if self._topic is None and len(batch):
                self._topic = batch.column("topic")[0].as_py()
            self._expect_everywhere(batch, "topic", self._topic)
            digest.update_arrow(batch)
            if self._copy:
                self._copy.take_rows(batch)
        return walk.record_count, digest.hexdigest()

    def _expect_everywhere(self, batch: Any, column: str, expected: object) -> None:  # noqa: ANN401  # pyarrow has no types
        for found in batch.column(column).unique().to_pylist():
            self._expect(column, expected, found)

    def _expect(self, what: str, expected: object, found: object) -> None:
        if expected != found:
            raise CorruptionError(
                f"the object's {what} is not what it should be",
                name=self._name,
                expected=expected,
                found=found,
            )


def _compare_with_claim(report: ObjectReport, claim: Claim) -> None:
    differences = {
        "range": (claim.covered, report.covered),
        "digest": (claim.digest, report.digest or claim.digest),
    }
    for what, (expected, found) in differences.items():
        if expected != found:
            raise CorruptionError(
                f"the object's {what} is not the one that was claimed for it",
                hint="the object was changed after it was written",
                name=report.name,
                expected=expected,
                found=found,
                claimed_by=claim.writer,
            )


class _Tee(io.RawIOBase):
    """A file whose bytes also go elsewhere as they are read."""

    def __init__(self, file: BinaryIO, take: Callable[[memoryview], None]) -> None:
        self._file, self._take = file, take

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with memoryview(buffer).cast("B") as view:
            got: int = self._file.readinto(view)  # type: ignore[attr-defined]  # typeshed lacks it
            self._take(view[:got])
        return got


def _tee(file: BinaryIO, take: Callable[[memoryview], None]) -> BinaryIO:
    return io.BufferedReader(_Tee(file, take), _READ_BYTES)


def _parsed(name: str) -> tuple[OffsetRange, str]:
    parsed = parse_name(name)
    if parsed is None or parsed[1] not in {NATIVE, PARQUET, NDJSON}:
        raise CorruptionError("not the name of an object", name=name)
    return parsed


def _partition_of(folder: str) -> int:
    return int(folder.rpartition("/")[2])


def _native_batches(file: BinaryIO, name: str) -> Iterator[tuple[memoryview, Batches]]:
    """Yield runs of whole batches, each with the bytes it was scanned from."""
    scanner, buffer = BatchScanner(), np.empty(_READ_BYTES, np.uint8).data
    filled = position = 0
    while True:
        got = _fill(file, buffer, filled)
        if got == 0 and filled == 0:
            return
        try:
            batches = scanner.scan(buffer, filled + got)
        except UsageError as error:  # what is advice for a source is damage in an object
            raise CorruptionError(
                "not record batches of format 2", name=name, found=error.facts.get("magic")
            ) from error
        if batches.count:
            yield buffer, batches
        elif got == 0:
            raise CorruptionError(
                "the object ends inside a batch",
                name=name,
                position=position,
                expected=batches.needed_bytes,
                found=filled,
            )
        position += batches.consumed_bytes
        rest = filled + got - batches.consumed_bytes
        needed = batches.needed_bytes
        old, filled = buffer[batches.consumed_bytes :][:rest], rest
        if needed > len(buffer):
            buffer = np.empty(needed, np.uint8).data
        buffer[:rest] = bytes(old)


def _fill(file: BinaryIO, buffer: memoryview, filled: int) -> int:
    """Read until the buffer is full or the file ends; returns how many bytes came."""
    began = filled
    while filled < len(buffer):
        got = file.readinto(buffer[filled:])  # type: ignore[attr-defined]  # typeshed lacks it
        if not got:
            break
        filled += got
    return filled - began


def _native_rows(
    file: BinaryIO, name: str, covered: OffsetRange, topic: str, partition: int
) -> Iterator[Any]:
    decoder = RecordDecoder()
    for view, batches in _native_batches(file, name):
        for columns in decoder.decode(view, batches, first=covered.first, end=covered.next_offset):
            yield columns.to_arrow(topic, partition)
