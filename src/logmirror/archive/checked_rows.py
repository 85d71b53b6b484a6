"""One object's rows as a stream that ends with an error unless they are what was promised.

For readers that take rows as they come and believe them when the stream has ended. Everything that
`reader.check_object` finds without a claim of holes is found here too, in one reading: format,
checksums, order, range, partition, topic, and the digest that footer or claim promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from logmirror.archive.claims import promised_digests
from logmirror.archive.compactions import read_promise
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET, parse_name
from logmirror.archive.native import native_batches
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.offset_walk import check_offsets
from logmirror.archive.parquet import checked_file, open_parquet, read_parquet
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError
from logmirror.wire.columns import SCHEMA, ContentDigest
from logmirror.wire.decode import RecordDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from logmirror.model import OffsetRange
    from logmirror.stores.base import BlobStore
    from logmirror.wire.scan import Batches

    Settle = Callable[[Batches], None]

_CHUNK_BYTES: Final = 4 << 20
"""Native records are handed on in batches of about this size."""


class Promise(NamedTuple):
    """What was said of an object before it appeared, or says its footer."""

    digests: frozenset[str]
    """One of these is that of the content."""

    topic: str


class ObjectRows:
    """Reads the objects of one partition.

    Args:
        store: Where they lie.
        folder: Of their chain: `<destination>/<partition>`.
        topic: Whose records they must be; empty: of one topic, whichever it is.
        utf8: NDJSON keys and values are text.
        verify: Compare with what footer and claim promise; else only with the format.
        snapshots: The objects are snapshots.
    """

    def __init__(  # noqa: PLR0913  # where they are, and what they do not say themselves
        self,
        store: BlobStore,
        folder: str,
        *,
        topic: str,
        utf8: bool,
        verify: bool,
        snapshots: bool = False,
    ) -> None:
        self._store, self._folder, self._topic = store, folder, topic
        self._utf8, self._verify, self._snapshots = utf8, verify, snapshots
        self._partition = int(folder.rpartition("/")[2])

    def batches_of(self, name: str) -> Iterator[tuple[memoryview, Batches]]:
        """Yield the batches of a native object, as `native_batches` does.

        Raises:
            KeyError: There is no such object.
        """
        with self._store.open(f"{self._folder}/{name}") as file:
            yield from native_batches(file, name)

    def read(self, name: str, settle: Settle | None = None) -> Iterator[Any]:
        """Yield an object's rows as Arrow record batches of `wire.columns.SCHEMA`, in order.

        Args:
            name: Without folder.
            settle: Gets the batches of native objects as they are read, and may classify them:
                those that are no data are passed over.

        Raises:
            CorruptionError: The object is not what it should be. Facts: `name` and what was found.
            UsageError: A newer version of the program wrote it.
            UnavailableError: It could not be read.
            KeyError: There is no such object, or not any more.
        """
        parsed = parse_name(name)
        if parsed is None or parsed[1] not in {NATIVE, PARQUET, NDJSON}:
            raise CorruptionError("not the name of an object", name=name)
        covered, extension = parsed
        try:
            with self._store.open(f"{self._folder}/{name}") as file:
                if extension == NATIVE:
                    yield from self._native(file, name, covered, settle)
                elif extension == PARQUET:
                    yield from self._parquet(file, name, covered)
                else:
                    promise = self._promise(name, covered)
                    rows = read_ndjson(file, name=name, utf8=self._utf8)
                    yield from self._rows(rows, name, covered, promise)
        except LogmirrorError as error:
            raise error.add_facts(name=name, folder=self._folder) from None
        except OSError as error:
            raise UnavailableError(
                "could not read the object",
                hint="check the disk",
                name=name,
                reason=error.strerror,
            ) from error

    def _promise(self, name: str, covered: OffsetRange) -> Promise | None:
        if not self._verify:
            return None
        claim = read_promise(self._store, self._folder, covered)
        if claim is None:
            return None
        if claim.covered != covered:
            raise CorruptionError(
                "the object's range is not the one that was claimed for it",
                hint="the object was changed after it was written",
                name=name,
                expected=claim.covered,
                found=covered,
            )
        destination = self._folder.rpartition("/")[0]
        return Promise(promised_digests(self._store, destination, claim), claim.topic)

    def _native(
        self, file: BinaryIO, name: str, covered: OffsetRange, settle: Settle | None
    ) -> Iterator[Any]:
        promise = self._promise(name, covered)
        if promise is not None:
            self._expect(name, "topic", promise.topic, self._topic)
        digest, decoder = xxhash.xxh3_128(), RecordDecoder(_CHUNK_BYTES)
        reached, last_row, is_first = covered.first - 1, -1, True
        for view, batches in native_batches(file, name):
            if promise is not None:
                digest.update(view[: batches.consumed_bytes])
            base, last = int(batches.base_offsets[0]), int(batches.last_offsets[0])
            # The first batch may begin before the range: then the copy began in the middle of it.
            if last <= reached or (base <= reached and not is_first):
                raise CorruptionError(
                    "the object holds batches from before its range or twice",
                    name=name,
                    offset=base,
                    expected=reached + 1,
                )
            reached, is_first = int(batches.last_offsets[-1]), False
            if settle is not None:
                settle(batches)
            for columns in decoder.decode(view, batches, first=covered.first, end=reached + 1):
                last_row = check_offsets(columns.offsets, last_row, covered, name)
                rows = columns.to_arrow(self._topic, self._partition)
                # Whoever takes them may still have them when the columns are filled again.
                yield pa.ipc.read_record_batch(rows.serialize(), SCHEMA)
        is_short = self._verify and promise is None and reached < covered.last
        if reached > covered.last or is_short:
            raise CorruptionError(
                "the object does not end where its name says",
                hint="bytes are missing at its end, or it was renamed. If its topic is compacted "
                "and its claim was not kept, its last offsets may have been compacted away: read "
                "it without `verify`",
                name=name,
                expected=covered.last,
                found=reached,
            )
        if promise is not None:
            self._expect_digest(name, promise, f"xxh3:{digest.hexdigest()}")

    def _parquet(self, file: BinaryIO, name: str, covered: OffsetRange) -> Iterator[Any]:
        if self._verify:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            file = checked_file(file, size_bytes, name)
        parquet = open_parquet(file, name)
        metadata = ObjectMetadata.from_key_values(parquet.metadata.metadata, name=name)
        self._expect(name, "kind", self._snapshots, metadata is not None and metadata.is_snapshot)
        promise = None
        if metadata is None:
            if promise := self._promise(name, covered):
                raise CorruptionError(
                    "the object's footer lacks its account of itself",
                    hint="it has a claim, so we wrote it; the footer was changed",
                    name=name,
                )
        else:
            self._expect(name, "range", metadata.covered, covered)
            self._expect(name, "partition", metadata.partition, self._partition)
            self._expect(name, "record count", metadata.record_count, parquet.metadata.num_rows)
            if self._verify:
                promise = Promise(frozenset({metadata.digest}), metadata.topic)
        yield from self._rows(read_parquet(parquet, name), name, covered, promise)

    def _rows(
        self, batches: Iterable[Any], name: str, covered: OffsetRange, promise: Promise | None
    ) -> Iterator[Any]:
        digest, last = ContentDigest(), -1
        topic = promise.topic if promise else self._topic
        for batch in batches:
            offsets = batch.column("offset").to_numpy()
            if not self._snapshots:
                last = check_offsets(offsets, last, covered, name)
            elif int(offsets.max(initial=-1)) > covered.last:
                raise CorruptionError(
                    "the object holds offsets outside the range of its name",
                    name=name,
                    last=int(offsets.max()),
                )
            topic = topic or batch.column("topic")[0].as_py()
            for column, expected in (("topic", topic), ("partition", self._partition)):
                for found in batch.column(column).unique().to_pylist():
                    self._expect(name, column, expected, found)
            if promise is not None:
                digest.update_arrow(batch)
            yield batch
        if promise is not None:
            self._expect_digest(name, promise, digest.hexdigest())

    def _expect_digest(self, name: str, promise: Promise, found: str) -> None:
        if found not in promise.digests:
            self._expect(name, "digest", "".join(sorted(promise.digests)[:1]), found)

    def _expect(self, name: str, what: str, expected: object, found: object) -> None:
        if expected != found:
            raise CorruptionError(
                f"the object's {what} is not what it should be",
                name=name,
                expected=expected,
                found=found,
            )


def within(batch: Any, first: int, end: int) -> Any:  # noqa: ANN401  # pyarrow has no types
    """The rows of a batch with first <= offset < end; its offsets ascend."""
    offsets = batch.column("offset").to_numpy()
    low = int(np.searchsorted(offsets, first))
    high = int(np.searchsorted(offsets, end - 1, side="right"))
    return batch if high - low == len(batch) else batch.slice(low, high - low)
