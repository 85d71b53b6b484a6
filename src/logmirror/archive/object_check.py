"""Check objects against their format, their name, and their claim.

1. Every object is read as a stream: memory is bounded by a batch, a row group or a line.
2. Damage is a CorruptionError that names the object; nothing is repaired.
3. Native objects hold what the log held: records of aborted transactions are in them, followed by
   their marker, as for a consumer with read_uncommitted.
4. Offsets without a record are explained by markers in native objects, by the footer of Parquet
   objects, and by the claim. Unexplained ones are reported; the caller decides.
5. Objects of mirror-v3 have neither footer nor claim. Their digest and the causes of their offset
   gaps are unknown; everything else is checked.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np
import xxhash

from logmirror.archive.claims import read_rewrites
from logmirror.archive.compactions import expected_content
from logmirror.archive.gap_facts import (
    GapFacts,
    Witness,
    by_cause,
    check_listed,
    explained,
    unrecorded,
)
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, PARQUET, parse_object_name, partition_of
from logmirror.archive.native import native_batches, seen_gaps, tee
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.offset_walk import OffsetWalk
from logmirror.archive.parquet import (
    checked_file,
    is_mirror_v3,
    open_parquet,
    read_parquet,
)
from logmirror.archive.reader import read_errors
from logmirror.archive.snapshots import check_sorted
from logmirror.errors import CorruptionError
from logmirror.model import Limits
from logmirror.wire.columns import ContentDigest
from logmirror.wire.decode import RecordDecoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.archive.claims import Claim
    from logmirror.model import OffsetRange
    from logmirror.stores.base import BlobStore

_NO_OFFSETS: Final = np.empty(0, np.int64)
_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectReport:
    """The result of a check of an undamaged object."""

    name: str
    """Without the folder."""

    covered: OffsetRange
    size_bytes: int
    record_count: int | None
    """Number of records; from the footer if the object was not read; None if unknown.

    In native objects aborted records count too, transaction markers do not.
    """

    digest: str | None
    """Content digest; from the footer if the object was not read; None if unknown."""

    metadata: ObjectMetadata | None
    """Parquet: the metadata in the footer; None if it has none."""

    gaps: GapFacts | None = None
    """Offsets without a record; None if the object was not read."""

    topic_id: str = ""
    """Source topic ID from footer or claim, 32 hexadecimal digits; empty if unknown."""

    is_witnessed: bool = False
    """Footer or claim hold the digest that the content must have."""


class ContentSink(Protocol):
    """Receives the content that a check reads; valid only if the check ends without an error."""

    def take_bytes(self, data: memoryview) -> None:
        """Receive the object's bytes, in order; not for Parquet. Valid during the call only."""
        ...

    def take_rows(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Receive rows of `wire.columns.SCHEMA`, in order; not for native objects."""
        ...


def check_object(  # noqa: PLR0913  # the object, the depth, facts that its bytes do not hold
    store: BlobStore,
    folder: str,
    name: str,
    *,
    deep: bool,
    utf8: bool = False,
    topic: str = "",
    compacted: bool = False,
    snapshots: bool = False,
    mirror_v3_before: int = 0,
    limits: Limits = _LIMITS,
    sink: ContentSink | None = None,
) -> ObjectReport:
    """Check one object against its format, its name, and its claim or compaction record, if any.

    Args:
        store: The destination's store.
        folder: The chain's folder: `<destination>/<partition>`.
        name: The object's name, without the folder.
        deep: Read the whole object and check checksums, records, order, counts and digest. If
            False, check only that it exists and, for Parquet, that the footer matches the name.
        utf8: NDJSON keys and values are text.
        topic: The topic that all records must have; empty: any one topic.
        compacted: The topic is compacted, so offsets at the end of a native object may be missing
            without a trace in it.
        snapshots: The chain consists of snapshots; objects of mirror-v3 do not show it themselves.
        mirror_v3_before: NDJSON objects below this offset that have no claim were written by
            mirror-v3; see `claims.first_claimed`.
        limits: The largest record and batch that are unpacked.
        sink: Receives the content; only with `deep`.

    Raises:
        CorruptionError: The object is damaged. Facts: `name`, and what was expected and found.
        UsageError: A newer version of logmirror wrote the object, or a record or batch is larger
            than `limits`.
        UnavailableError: The object could not be read.
        KeyError: There is no such object.
    """
    covered, _ = parse_object_name(name)
    claim = expected_content(store, folder, covered)
    is_old = claim is None and covered.first < mirror_v3_before
    options = _Options(deep, utf8, topic, compacted, snapshots, is_old, limits, sink)
    if claim is None or not claim.rewritable:
        return _check_with(store, folder, name, claim, options)
    witness, found = _rewritten(store, folder, name, claim, options._replace(sink=None))
    return _check_with(store, folder, name, witness, options) if sink else found


def _rewritten(
    store: BlobStore, folder: str, name: str, claim: Claim, options: _Options
) -> tuple[Claim, ObjectReport]:
    """Check an object with a rewritable claim; the second claims of its range count too."""
    try:
        return claim, _check_with(store, folder, name, claim, options)
    except CorruptionError:
        destination, first = folder.rpartition("/")[0], claim.covered.first
        for rewrite in read_rewrites(store, destination, claim.partition, first):
            with contextlib.suppress(CorruptionError):
                return rewrite, _check_with(store, folder, name, rewrite, options)
        raise


class _Options(NamedTuple):
    """The options of `check_object`."""

    deep: bool
    utf8: bool
    topic: str
    compacted: bool
    snapshots: bool
    is_old: bool
    """NDJSON was written by mirror-v3."""

    limits: Limits
    sink: ContentSink | None


def _check_with(
    store: BlobStore, folder: str, name: str, claim: Claim | None, options: _Options
) -> ObjectReport:
    covered, extension = parse_object_name(name)
    with read_errors(name), store.open(f"{folder}/{name}") as file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        check = _Check(name, covered, partition_of(folder), size_bytes, claim, options)
        whole = tee(file, options.sink.take_bytes) if options.sink else file
        if extension == NATIVE:
            found = check.native(whole, deep=options.deep, compacted=options.compacted)
        elif extension == PARQUET:
            found = check.parquet(file, options)
        else:
            found = check.ndjson(whole, options)
        if claim is not None:
            _compare_with_claim(found, claim, check.topic)
    return found


def _compare_with_claim(found: ObjectReport, claim: Claim, topic: str | None) -> None:
    """Raise CorruptionError if an object, or its records' topic, differs from the claim."""
    count, topic_id = found.record_count, found.topic_id
    differences = {
        "range": (claim.covered, found.covered),
        "digest": (claim.digest, found.digest or claim.digest),
        "record count": (claim.record_count, claim.record_count if count is None else count),
        "topic": (claim.topic, topic or claim.topic),
        "topic id": (claim.topic_id or topic_id, topic_id or claim.topic_id),
    }
    for what, (expected, present) in differences.items():
        if expected != present:
            raise CorruptionError(
                f"the object's {what} differs from its claim",
                hint="the object was changed after it was written",
                name=found.name,
                expected=expected,
                found=present,
                claimed_by=claim.writer,
            )


class _Check:
    """The checks of one object, by format."""

    def __init__(  # noqa: PLR0913, PLR0917  # private, one caller
        self,
        name: str,
        covered: OffsetRange,
        partition: int,
        size_bytes: int,
        claim: Claim | None,
        options: _Options,
    ) -> None:
        self._name = name
        self._covered = covered
        self._partition = partition
        self._size_bytes = size_bytes
        self._claim = claim
        self._sink, self._limits = options.sink, options.limits
        self.topic = options.topic or None
        self._is_mirror_v3, self._has_end = False, False

    def _report(
        self,
        count: int | None,
        digest: str | None,
        metadata: ObjectMetadata | None = None,
        gaps: GapFacts | None = None,
    ) -> ObjectReport:
        witness = metadata or self._claim
        return ObjectReport(
            name=self._name,
            covered=self._covered,
            size_bytes=self._size_bytes,
            record_count=count,
            digest=digest,
            metadata=metadata,
            gaps=gaps,
            topic_id=witness.topic_id if witness else "",
            is_witnessed=witness is not None,
        )

    def _explained(self, found: GapFacts, metadata: ObjectMetadata | None) -> GapFacts:
        """Return the gaps with the causes from footer or claim, if there is one."""
        if metadata is not None:
            witness = Witness(runs=metadata.gaps, counts=metadata.gap_counts)
        elif self._claim is not None:
            witness = Witness(runs=self._claim.gaps, counts=self._claim.all_gaps())
        elif self._is_mirror_v3 and self._has_end:
            return unrecorded(found)
        else:
            return found
        return explained(found, witness, name=self._name)

    def native(self, file: BinaryIO, *, deep: bool, compacted: bool) -> ObjectReport:
        if not deep:
            return self._report(None, None)
        digest, decoder = xxhash.xxh3_128(), RecordDecoder(limits=self._limits)
        walk = OffsetWalk(self._name, self._covered)
        reached, lowest = self._covered.first - 1, None
        for view, batches in native_batches(file, self._name):
            digest.update(view[: batches.consumed_bytes])
            base, last = int(batches.base_offsets[0]), int(batches.last_offsets[0])
            # The first batch may begin before the range if the copy began in the middle of it.
            if last <= reached or (lowest is not None and base <= reached):
                raise CorruptionError(
                    "the object holds batches from before its range or duplicate batches",
                    name=self._name,
                    offset=base,
                    expected=reached + 1,
                )
            lowest, reached = base, int(batches.last_offsets[-1])
            known = seen_gaps(batches, self._covered.first)
            for rows in decoder.decode(view, batches, first=self._covered.first, end=reached + 1):
                walk.step(rows.offsets, known)
            walk.gaps.step(_NO_OFFSETS, known, reached=reached + 1)
        gaps = walk.gaps.finish()
        may_be_short = compacted or self._claim is not None
        if reached > self._covered.last or (reached < self._covered.last and not may_be_short):
            raise CorruptionError(
                "the object does not end at the last offset of its name",
                hint="bytes are missing at its end, or it was renamed",
                name=self._name,
                expected=self._covered.last,
                found=reached,
            )
        return self._report(
            walk.record_count, f"xxh3:{digest.hexdigest()}", gaps=self._explained(gaps, None)
        )

    def parquet(self, file: BinaryIO, options: _Options) -> ObjectReport:
        if options.deep:
            file = checked_file(file, self._size_bytes, self._name)
        parquet = open_parquet(file, self._name)
        metadata = ObjectMetadata.from_key_values(parquet.metadata.metadata, name=self._name)
        if metadata is None and self._claim is not None:
            raise CorruptionError(
                "the object's footer has no logmirror metadata",
                hint="it has a claim, so logmirror wrote it; the footer was changed",
                name=self._name,
            )
        count = parquet.metadata.num_rows
        if metadata is not None:
            self._expect("range", self._covered, metadata.covered)
            self._expect("partition", self._partition, metadata.partition)
            self._expect("record count", metadata.record_count, count)
            self._expect("topic", self.topic or metadata.topic, metadata.topic)
            self.topic = metadata.topic
        self._is_mirror_v3 = metadata is None and is_mirror_v3(parquet)
        if not options.deep:
            return self._report(count, metadata.digest if metadata else None, metadata)
        is_snapshot = metadata.is_snapshot if metadata else self._is_mirror_v3 and options.snapshots
        if is_snapshot:
            (found, digest), gaps = self._snapshot(parquet), GapFacts()
        else:
            found, digest, gaps = self._rows(read_parquet(parquet, self._name), metadata)
        self._expect("record count", count, found)
        if metadata is not None:
            self._expect("digest", metadata.digest, digest)
        if self._is_mirror_v3 and not is_snapshot and not self._has_end:
            raise CorruptionError(
                "the object does not end at the last offset of its name",
                hint="mirror-v3 names an object after its last record: records are missing at its "
                "end, or it was renamed",
                name=self._name,
                expected=self._covered.last,
            )
        if not is_snapshot:
            gaps = self._explained(gaps, metadata)
        elif metadata is not None:
            gaps = GapFacts(runs=metadata.gaps, counts=metadata.gap_counts)
        return self._report(found, digest, metadata, gaps)

    def _snapshot(self, parquet: Any) -> tuple[int, str]:  # noqa: ANN401  # pyarrow has no types
        """Check that keys ascend and no offset exceeds the range; returns row count and digest."""
        count, last_key, digest = 0, None, ContentDigest()
        for batch in read_parquet(parquet, self._name):
            last_key = check_sorted(batch, last_key, name=self._name)
            highest = int(batch.column("offset").to_numpy().max(initial=-1))
            if highest > self._covered.last:
                raise CorruptionError(
                    "the object holds offsets outside the range of its name",
                    name=self._name,
                    last=highest,
                )
            self._expect_place(batch)
            digest.update_arrow(batch)
            count += len(batch)
        return count, digest.hexdigest()

    def ndjson(self, file: BinaryIO, options: _Options) -> ObjectReport:
        if not options.deep:
            return self._report(None, None)
        self._is_mirror_v3 = options.is_old
        rows = read_ndjson(file, name=self._name, utf8=options.utf8)
        count, digest, gaps = self._rows(rows, self._claim)
        if self._claim is not None:  # first, because it detects most kinds of damage
            self._expect("digest", self._claim.digest, digest)
        return self._report(count, digest, gaps=self._explained(gaps, None))

    def _rows(
        self, batches: Iterator[Any], witness: ObjectMetadata | Claim | None
    ) -> tuple[int, str, GapFacts]:
        """Check every row; returns row count, digest, and the offset gaps."""
        walk, digest = OffsetWalk(self._name, self._covered), ContentDigest()
        listed = by_cause(witness.gaps) if witness else {}
        for batch in batches:
            walk.step(batch.column("offset").to_numpy(), listed)
            self._expect_place(batch)
            digest.update_arrow(batch)
            if self._sink:
                self._sink.take_rows(batch)
        gaps = walk.gaps.finish(listed)
        check_listed(listed, gaps, name=self._name)
        self._has_end = walk.last == self._covered.last
        return walk.record_count, digest.hexdigest(), gaps

    def _expect_place(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        self._expect_everywhere(batch, "partition", self._partition)
        if self.topic is None:
            self.topic = batch.column("topic")[0].as_py()
        self._expect_everywhere(batch, "topic", self.topic)

    def _expect_everywhere(self, batch: Any, column: str, expected: object) -> None:  # noqa: ANN401  # pyarrow has no types
        for found in batch.column(column).unique().to_pylist():
            self._expect(column, expected, found)

    def _expect(self, what: str, expected: object, found: object) -> None:
        if expected != found:
            raise CorruptionError(
                f"the object has the wrong {what}",
                name=self._name,
                expected=expected,
                found=found,
            )
