"""Read objects back, and say whether they are what their name and their claim say.

1. Every object is read as a stream: memory is bounded by a batch, a row group or a line.
2. A finding is a CorruptionError that names the object; nothing is repaired.
3. Native objects show what the log held: records of aborted transactions are there, followed by
   their marker, as a consumer with read_uncommitted sees them.
4. Offsets without a record are accounted for: by markers in native objects, by the footer of
   Parquet ones, by the claim. What nothing explains is reported, for the caller to judge.
5. Objects of mirror-v3 have neither footer nor claim. What only these tell (digest, causes of
   holes) is then not known; all else is checked.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, Protocol

import numpy as np
import xxhash

from logmirror.archive.claims import read_rewrites
from logmirror.archive.compactions import read_promise
from logmirror.archive.gap_facts import (
    GapFacts,
    Witness,
    by_cause,
    check_listed,
    explained,
    unrecorded,
)
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET, parse_name
from logmirror.archive.native import native_batches, native_rows, seen_gaps, tee
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.offset_walk import OffsetWalk
from logmirror.archive.parquet import (
    checked_file,
    column_types,
    is_mirror_v3,
    open_parquet,
    read_parquet,
)
from logmirror.archive.promises import compare_with_claim
from logmirror.archive.snapshots import check_sorted
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError
from logmirror.wire.columns import ContentDigest
from logmirror.wire.decode import RecordDecoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.archive.claims import Claim
    from logmirror.model import ColumnTypes, OffsetRange
    from logmirror.stores.base import BlobStore

_READ_BYTES: Final = 4 << 20
_NO_OFFSETS: Final = np.empty(0, np.int64)


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

    gaps: GapFacts | None = None
    """Offsets that carry no record, if the object was read."""

    topic_id: str = ""
    """Of the source's topic, if footer or claim say it: 32 hexadecimal digits."""

    is_witnessed: bool = False
    """Footer or claim say what digest the content must have."""


class Copy(Protocol):
    """Takes what a check reads, as it is read; sound only if the check ends without an error."""

    def take_bytes(self, data: memoryview) -> None:
        """The object's bytes, in order, all of them; not those of Parquet. Valid in the call."""
        ...

    def take_rows(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """The object's rows, in order, of `wire.columns.SCHEMA`; not those of native objects."""
        ...


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
            yield from native_rows(file, name, covered, topic, _partition_of(folder))
        elif extension == PARQUET:
            yield from read_parquet(open_parquet(file, name), name)
        else:
            yield from read_ndjson(file, name=name, utf8=utf8)


def object_types(store: BlobStore, folder: str, name: str) -> ColumnTypes:
    """What the keys and values of a Parquet object are, as far as its columns tell.

    Raises:
        CorruptionError: It is not Parquet, or has other columns.
        UnavailableError: It could not be read.
        KeyError: There is no such object.
    """
    with _named(name), store.open(f"{folder}/{name}") as file:
        return column_types(open_parquet(file, name), name)


def check_object(  # noqa: PLR0913  # which object, how deep, what its bytes do not say
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
        topic: Whose records they must be; empty: of one topic, whichever it is.
        compacted: The topic's log may lack offsets at the end of the object without a trace in it.
        snapshots: An object of mirror-v3 is a snapshot, which it does not say itself.
        mirror_v3_before: NDJSON objects below this offset that have no claim were written by
            mirror-v3; see `claims.first_claimed`.
        copy: Gets what is read; only with `deep`.

    Raises:
        CorruptionError: The object is not what it should be. Facts: `name` and what was found.
        UsageError: A newer version of the program wrote it.
        UnavailableError: It could not be read.
        KeyError: There is no such object.
    """
    covered, _ = _parsed(name)
    claim = read_promise(store, folder, covered)
    is_peer = claim is None and covered.first < mirror_v3_before
    options = _Options(deep, utf8, topic, compacted, snapshots, is_peer, copy)
    if claim is None or not claim.rewritable:
        return _check_with(store, folder, name, claim, options)
    witness, found = _rewritten(store, folder, name, claim, options._replace(copy=None))
    return _check_with(store, folder, name, witness, options) if copy else found


def _rewritten(
    store: BlobStore, folder: str, name: str, claim: Claim, options: _Options
) -> tuple[Claim, ObjectReport]:
    """Check an object whose range was claimed; whoever finished the range may have said more."""
    try:
        return claim, _check_with(store, folder, name, claim, options)
    except CorruptionError:
        destination, first = folder.rpartition("/")[0], claim.covered.first
        for rewrite in read_rewrites(store, destination, claim.partition, first):
            with contextlib.suppress(CorruptionError):
                return rewrite, _check_with(store, folder, name, rewrite, options)
        raise


class _Options(NamedTuple):
    """Those of `check_object`."""

    deep: bool
    utf8: bool
    topic: str
    compacted: bool
    snapshots: bool
    is_peer: bool
    copy: Copy | None


def _check_with(
    store: BlobStore, folder: str, name: str, claim: Claim | None, options: _Options
) -> ObjectReport:
    covered, extension = _parsed(name)
    with _named(name), store.open(f"{folder}/{name}") as file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        check = _Check(name, covered, _partition_of(folder), size_bytes, claim, options)
        whole = tee(file, options.copy.take_bytes) if options.copy else file
        if extension == NATIVE:
            found = check.native(whole, deep=options.deep, compacted=options.compacted)
        elif extension == PARQUET:
            found = check.parquet(file, options)
        else:
            found = check.ndjson(whole, options)
        if claim is not None:
            compare_with_claim(found, claim, check.topic)
    return found


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Let errors name the object."""
    try:
        yield
    except LogmirrorError as error:
        raise error.add_facts(name=name) from None
    except OSError as error:
        raise UnavailableError(
            "could not read the object",
            hint="check the disk",
            name=name,
            reason=error.strerror,
        ) from error


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
        self._copy = options.copy
        self.topic = options.topic or None
        self._is_peer, self._has_end = False, False

    def _report(
        self,
        count: int | None,
        digest: str | None,
        metadata: ObjectMetadata | None = None,
        gaps: GapFacts | None = None,
    ) -> ObjectReport:
        told = metadata or self._claim
        return ObjectReport(
            name=self._name,
            covered=self._covered,
            size_bytes=self._size_bytes,
            record_count=count,
            digest=digest,
            metadata=metadata,
            gaps=gaps,
            topic_id=told.topic_id if told else "",
            is_witnessed=told is not None,
        )

    def _explained(self, found: GapFacts, metadata: ObjectMetadata | None) -> GapFacts:
        """The holes with the causes that footer or claim tell, if one of them is there."""
        if metadata is not None:
            witness = Witness(runs=metadata.gaps, counts=metadata.gap_counts)
        elif self._claim is not None:
            witness = Witness(runs=self._claim.gaps, counts=self._claim.all_gaps())
        elif self._is_peer and self._has_end:
            return unrecorded(found)
        else:
            return found
        return explained(found, witness, name=self._name)

    def native(self, file: BinaryIO, *, deep: bool, compacted: bool) -> ObjectReport:
        if not deep:
            return self._report(None, None)
        digest, decoder = xxhash.xxh3_128(), RecordDecoder()
        walk = OffsetWalk(self._name, self._covered)
        reached, lowest = self._covered.first - 1, None
        for view, batches in native_batches(file, self._name):
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
            known = seen_gaps(batches, self._covered.first)
            for rows in decoder.decode(view, batches, first=self._covered.first, end=reached + 1):
                walk.step(rows.offsets, known)
            walk.gaps.step(_NO_OFFSETS, known, reached=reached + 1)
        gaps = walk.gaps.finish()
        may_be_short = compacted or self._claim is not None
        if reached > self._covered.last or (reached < self._covered.last and not may_be_short):
            raise CorruptionError(
                "the object does not end where its name says",
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
                "the object's footer lacks its account of itself",
                hint="it has a claim, so we wrote it; the footer was changed",
                name=self._name,
            )
        count = parquet.metadata.num_rows
        if metadata is not None:
            self._expect("range", self._covered, metadata.covered)
            self._expect("partition", self._partition, metadata.partition)
            self._expect("record count", metadata.record_count, count)
            self._expect("topic", self.topic or metadata.topic, metadata.topic)
            self.topic = metadata.topic
        self._is_peer = metadata is None and is_mirror_v3(parquet)
        if not options.deep:
            return self._report(count, metadata.digest if metadata else None, metadata)
        is_snapshot = metadata.is_snapshot if metadata else self._is_peer and options.snapshots
        if is_snapshot:
            (found, digest), gaps = self._snapshot(parquet), GapFacts()
        else:
            found, digest, gaps = self._rows(read_parquet(parquet, self._name), metadata)
        self._expect("record count", count, found)
        if metadata is not None:
            self._expect("digest", metadata.digest, digest)
        if self._is_peer and not is_snapshot and not self._has_end:
            raise CorruptionError(
                "the object does not end where its name says",
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
        """Check that keys ascend and nothing is newer; returns how many rows, and their digest."""
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
        self._is_peer = options.is_peer
        rows = read_ndjson(file, name=self._name, utf8=options.utf8)
        count, digest, gaps = self._rows(rows, self._claim)
        if self._claim is not None:  # first, because it says most of what is wrong
            self._expect("digest", self._claim.digest, digest)
        return self._report(count, digest, gaps=self._explained(gaps, None))

    def _rows(
        self, batches: Iterator[Any], told: ObjectMetadata | Claim | None
    ) -> tuple[int, str, GapFacts]:
        """Check every row; returns how many there are, their digest, and what is missing."""
        walk, digest = OffsetWalk(self._name, self._covered), ContentDigest()
        listed = by_cause(told.gaps) if told else {}
        for batch in batches:
            walk.step(batch.column("offset").to_numpy(), listed)
            self._expect_place(batch)
            digest.update_arrow(batch)
            if self._copy:
                self._copy.take_rows(batch)
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
                f"the object's {what} is not what it should be",
                name=self._name,
                expected=expected,
                found=found,
            )


def _parsed(name: str) -> tuple[OffsetRange, str]:
    parsed = parse_name(name)
    if parsed is None or parsed[1] not in {NATIVE, PARQUET, NDJSON}:
        raise CorruptionError("not the name of an object", name=name)
    return parsed


def _partition_of(folder: str) -> int:
    return int(folder.rpartition("/")[2])
