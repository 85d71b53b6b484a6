"""One object's rows as a stream that ends with an error if the object is damaged.

For readers that process rows as they arrive and trust them once the stream has ended. One pass
checks everything that `object_check.check_object` checks, except the causes of offset gaps: format,
checksums, order, range, partition, topic, and the digest from footer or claim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from logmirror.archive.claims import accepted_digests
from logmirror.archive.compactions import decided_in, expected_content
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, PARQUET, parse_object_name, partition_of
from logmirror.archive.native import native_batches
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.offset_walk import check_offsets
from logmirror.archive.parquet import checked_file, open_parquet, read_parquet
from logmirror.archive.reader import read_errors
from logmirror.errors import CorruptionError
from logmirror.wire.columns import SCHEMA, ContentDigest
from logmirror.wire.decode import RecordDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from logmirror.model import Decided, OffsetRange
    from logmirror.stores.base import BlobStore
    from logmirror.wire.scan import Batches

    Classify = Callable[[Batches], None]

_CHUNK_BYTES: Final = 4 << 20
"""Native records are returned in batches of about this size."""


class Expected(NamedTuple):
    """The expected content of an object, from its claim or its footer."""

    digests: frozenset[str]
    """The content must have one of these digests."""

    topic: str


class ObjectRows:
    """Reads the objects of one partition.

    Args:
        store: The destination's store.
        folder: The chain's folder: `<destination>/<partition>`.
        topic: The topic that all records must have; empty: any one topic.
        utf8: NDJSON keys and values are text.
        verify: Compare with the digest from footer and claim; if False, check the format only.
        snapshots: The objects are snapshots.
    """

    def __init__(  # noqa: PLR0913  # the place, and facts that the objects do not hold
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
        self._partition = partition_of(folder)

    def batches_of(self, name: str) -> Iterator[tuple[memoryview, Batches]]:
        """Yield the batches of a native object, as `native_batches` does.

        Raises:
            KeyError: There is no such object.
        """
        with self._store.open(f"{self._folder}/{name}") as file:
            yield from native_batches(file, name)

    def decided(self, name: str) -> tuple[Decided, ...]:
        """Return how open transactions of a native object ended, as far as claims say it.

        A damaged claim counts as none; `read` reports it, with `verify`.
        """
        covered, _ = parse_object_name(name)
        try:
            return decided_in(self._store, self._folder, covered)
        except CorruptionError:
            return ()

    def read(self, name: str, classify: Classify | None = None) -> Iterator[Any]:
        """Yield an object's rows as Arrow record batches of `wire.columns.SCHEMA`, in order.

        Args:
            name: The object's name, without the folder.
            classify: Called with the batches of native objects as they are read. It may change
                their kinds; batches whose kind is not data are skipped.

        Raises:
            CorruptionError: The object is damaged. Facts: `name`, and what was expected and found.
            UsageError: A newer version of logmirror wrote the object.
            UnavailableError: The object could not be read.
            KeyError: There is no such object, or it was deleted meanwhile.
        """
        covered, extension = parse_object_name(name)
        path = f"{self._folder}/{name}"
        with read_errors(name, folder=self._folder), self._store.open(path) as file:
            if extension == NATIVE:
                yield from self._native(file, name, covered, classify)
            elif extension == PARQUET:
                yield from self._parquet(file, name, covered)
            else:
                expected = self._expected(name, covered)
                rows = read_ndjson(file, name=name, utf8=self._utf8)
                yield from self._rows(rows, name, covered, expected)

    def _expected(self, name: str, covered: OffsetRange) -> Expected | None:
        if not self._verify:
            return None
        claim = expected_content(self._store, self._folder, covered)
        if claim is None:
            return None
        if claim.covered != covered:
            raise CorruptionError(
                "the object's range differs from its claim",
                hint="the object was changed after it was written",
                name=name,
                expected=claim.covered,
                found=covered,
            )
        destination = self._folder.rpartition("/")[0]
        return Expected(accepted_digests(self._store, destination, claim), claim.topic)

    def _native(
        self, file: BinaryIO, name: str, covered: OffsetRange, classify: Classify | None
    ) -> Iterator[Any]:
        expected = self._expected(name, covered)
        if expected is not None:
            self._expect(name, "topic", expected.topic, self._topic)
        digest, decoder = xxhash.xxh3_128(), RecordDecoder(_CHUNK_BYTES)
        reached, last_row, is_first = covered.first - 1, -1, True
        for view, batches in native_batches(file, name):
            if expected is not None:
                digest.update(view[: batches.consumed_bytes])
            base, last = int(batches.base_offsets[0]), int(batches.last_offsets[0])
            # The first batch may begin before the range if the copy began in the middle of it.
            if last <= reached or (base <= reached and not is_first):
                raise CorruptionError(
                    "the object holds batches from before its range or duplicate batches",
                    name=name,
                    offset=base,
                    expected=reached + 1,
                )
            reached, is_first = int(batches.last_offsets[-1]), False
            if classify is not None:
                classify(batches)
            for columns in decoder.decode(view, batches, first=covered.first, end=reached + 1):
                last_row = check_offsets(columns.offsets, last_row, covered, name)
                rows = columns.to_arrow(self._topic, self._partition)
                # A copy: the caller may keep the batch after the columns are filled again.
                yield pa.ipc.read_record_batch(rows.serialize(), SCHEMA)
        is_short = self._verify and expected is None and reached < covered.last
        if reached > covered.last or is_short:
            raise CorruptionError(
                "the object does not end at the last offset of its name",
                hint="bytes are missing at its end, or it was renamed. If the topic is compacted "
                "and the claim was not kept, the last offsets may have been compacted away: read "
                "the object without `verify`",
                name=name,
                expected=covered.last,
                found=reached,
            )
        if expected is not None:
            self._expect_digest(name, expected, f"xxh3:{digest.hexdigest()}")

    def _parquet(self, file: BinaryIO, name: str, covered: OffsetRange) -> Iterator[Any]:
        if self._verify:
            size_bytes = file.seek(0, 2)
            file.seek(0)
            file = checked_file(file, size_bytes, name)
        parquet = open_parquet(file, name)
        metadata = ObjectMetadata.from_key_values(parquet.metadata.metadata, name=name)
        self._expect(name, "kind", self._snapshots, metadata is not None and metadata.is_snapshot)
        expected = None
        if metadata is None:
            if expected := self._expected(name, covered):
                raise CorruptionError(
                    "the object's footer has no logmirror metadata",
                    hint="it has a claim, so logmirror wrote it; the footer was changed",
                    name=name,
                )
        else:
            self._expect(name, "range", metadata.covered, covered)
            self._expect(name, "partition", metadata.partition, self._partition)
            self._expect(name, "record count", metadata.record_count, parquet.metadata.num_rows)
            if self._verify:
                expected = Expected(frozenset({metadata.digest}), metadata.topic)
        yield from self._rows(read_parquet(parquet, name), name, covered, expected)

    def _rows(
        self, batches: Iterable[Any], name: str, covered: OffsetRange, expected: Expected | None
    ) -> Iterator[Any]:
        digest, last = ContentDigest(), -1
        topic = expected.topic if expected else self._topic
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
            for column, wanted in (("topic", topic), ("partition", self._partition)):
                for found in batch.column(column).unique().to_pylist():
                    self._expect(name, column, wanted, found)
            if expected is not None:
                digest.update_arrow(batch)
            yield batch
        if expected is not None:
            self._expect_digest(name, expected, digest.hexdigest())

    def _expect_digest(self, name: str, expected: Expected, found: str) -> None:
        if found not in expected.digests:
            self._expect(name, "digest", "".join(sorted(expected.digests)[:1]), found)

    def _expect(self, name: str, what: str, expected: object, found: object) -> None:
        if expected != found:
            raise CorruptionError(
                f"the object has the wrong {what}",
                name=name,
                expected=expected,
                found=found,
            )


def within(batch: Any, first: int, end: int) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Return the rows of a batch with first <= offset < end; its offsets ascend."""
    offsets = batch.column("offset").to_numpy()
    low = int(np.searchsorted(offsets, first))
    high = int(np.searchsorted(offsets, end - 1, side="right"))
    return batch if high - low == len(batch) else batch.slice(low, high - low)
