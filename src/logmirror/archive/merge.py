"""Merge objects of a chain into one: stage, record, publish, prove, delete; see decision 0007.

Each step is create-only or may be done twice, so a dead or slow compact needs no undoing: whoever
comes next does the same again. Memory is bounded by what a check and an encoder hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import xxhash

from logmirror import failpoints
from logmirror.archive.claims import first_claimed, promised_digests, read_claim
from logmirror.archive.compactions import (
    Compaction,
    Part,
    compaction_name,
    read_compaction,
    read_promise,
)
from logmirror.archive.digest import object_digest
from logmirror.archive.envelope import ParquetEncoder
from logmirror.archive.gap_facts import GapFacts
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET, format_name
from logmirror.archive.parquet_columns import common_types
from logmirror.archive.reader import check_object, object_types
from logmirror.errors import CorruptionError, LogmirrorError, PositionError, UsageError
from logmirror.model import ColumnTypes, Gap, GapCause, OffsetRange
from logmirror.stores.base import AlreadyExistsError
from logmirror.wire.columns import ContentDigest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.archive.chain import Link
    from logmirror.archive.reader import ObjectReport
    from logmirror.clock import Clock
    from logmirror.stores.base import BlobStore, StagedObject

_GAP_RUNS_MAX: Final = 1000
"""As many as a mirror lists of one object; the counts are complete."""

_HINT: Final = "delete nothing; run `logmirror verify --deep --against-source`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A partition's chain, and how its objects are written."""

    store: BlobStore
    folder: str
    """`<destination>/<partition>`."""

    topic: str
    extension: str
    compression: str
    """Of Parquet: one of `envelope.COMPRESSIONS`."""

    utf8: bool
    """NDJSON keys and values are text."""

    @property
    def partition(self) -> int:
        """The source partition."""
        return int(self.folder.rpartition("/")[2])

    def check(
        self, covered: OffsetRange, copy: _Merging | None = None, *, mirror_v3_before: int = 0
    ) -> ObjectReport:
        """Read an object whole; see `check_object`.

        Raises:
            GoneError: It is not there.
        """
        name = format_name(covered, self.extension)
        try:
            return check_object(
                self.store,
                self.folder,
                name,
                deep=True,
                utf8=self.utf8,
                mirror_v3_before=mirror_v3_before,
                copy=copy,
            )
        except KeyError:
            raise GoneError("an object was replaced meanwhile", name=name) from None

    def types(self, covered: OffsetRange) -> ColumnTypes:
        """What the columns of an object tell of its keys and values; without columns, bytes.

        Raises:
            GoneError: It is not there.
        """
        if self.extension != PARQUET:
            return ColumnTypes()
        name = format_name(covered, self.extension)
        try:
            return object_types(self.store, self.folder, name)
        except KeyError:
            raise GoneError("an object was replaced meanwhile", name=name) from None

    def mirror_v3_before(self, first: int) -> int:
        """Below which offset NDJSON without a claim is mirror-v3's, for objects from `first` on."""
        destination, _, partition = self.folder.rpartition("/")
        if self.extension != NDJSON:
            return 0
        if read_claim(self.store, destination, int(partition), first):
            return 0  # whose claims lie far below; no need to list them
        return first_claimed(self.store, destination, int(partition))


class GoneError(PositionError):
    """An object is not there any more: another compact was faster. List again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged object that is proven and stands alone."""

    covered: OffsetRange
    parts: int
    part_bytes: int
    object_bytes: int
    record_count: int


def merge(archive: Archive, links: Sequence[Link], *, writer_id: str, clock: Clock) -> Merged:
    """Replace objects that follow each other by one.

    Args:
        archive: Where they are.
        links: Which; all that begin in one cell, at least two (see `cover.cells`).
        writer_id: Who we are, for people.
        clock: Dates the record.

    Raises:
        GoneError: Another compact is at it; nothing of ours is left, and nothing is lost.
        CorruptionError: An object is not what it should be; nothing is deleted.
    """
    covered = OffsetRange(first=links[0].first, last=links[-1].last)
    store, name = archive.store, f"{archive.folder}/{format_name(covered, archive.extension)}"
    types = common_types(archive.types(link.covered) for link in links)
    mirror_v3_before = archive.mirror_v3_before(covered.first)
    staged = store.stage(f"compact-{archive.topic}-{covered.first}")
    merging = _Merging(archive, staged, types, mirror_v3_before)
    try:
        for link in links:
            merging.add(link.covered)
        record = merging.record(covered, writer_id, clock.now_ms())
        token = merging.finish(record, name)
    except BaseException:
        merging.abort()
        raise
    try:
        failpoints.reach("compact.staged")
        _write_record(archive, record)
        failpoints.reach("compact.recorded")
        _publish(archive, token, name, record)
    except LogmirrorError:
        store.discard(token)
        raise
    failpoints.reach("compact.published")
    proof = _prove(archive, record)
    failpoints.reach("compact.proven")
    for link in links:
        _delete(archive, link)
    return Merged(
        covered=covered,
        parts=len(links),
        part_bytes=merging.part_bytes,
        object_bytes=proof.size_bytes,
        record_count=record.record_count,
    )


def finish(archive: Archive, around: Link, inside: Mapping[Link, str]) -> int:
    """Delete what a merged object replaces and nobody has deleted; returns how many.

    Args:
        archive: Where they are.
        around: The merged object.
        inside: What lies inside it, ascending, with the digests that records give
            (`compactions.explain`).

    Raises:
        GoneError: Another compact is at it.
        CorruptionError: The merged object or a replaced one is not what it should be; neither is
            deleted.
    """
    record = read_compaction(archive.store, archive.folder, around.covered)
    if record is None:
        raise GoneError("the record was removed meanwhile", name=around.name)
    _prove(archive, record)
    count = 0
    for link, digest in inside.items():
        try:
            found = archive.check(link.covered)
        except GoneError:
            continue
        if found.digest != digest and found.digest not in _promised(archive, link.covered):
            raise CorruptionError(
                "an object inside a merged one has other content than what was merged",
                hint=_HINT,
                name=link.name,
                inside=around.name,
                expected=digest,
                found=found.digest,
            )
        _delete(archive, link)
        count += 1
    return count


def _promised(archive: Archive, covered: OffsetRange) -> frozenset[str]:
    """What a writer may bring back that was paused for long, beside what was merged.

    It finds its range claimed and no object, and a source that was cleaned meanwhile; what it then
    writes, it says before. The merged object holds what the first one wrote.
    """
    claim = read_promise(archive.store, archive.folder, covered)
    if claim is None or claim.covered != covered:
        return frozenset()
    return promised_digests(archive.store, archive.folder.rpartition("/")[0], claim)


class _Merging:
    """One merged object under construction; a `Copy` of the parts while they are checked."""

    def __init__(
        self, archive: Archive, staged: StagedObject, types: ColumnTypes, mirror_v3_before: int
    ) -> None:
        self._archive, self._staged, self._mirror_v3_before = archive, staged, mirror_v3_before
        self._rows, self._bytes = ContentDigest(), xxhash.xxh3_128()
        self._encoder = None
        if archive.extension == PARQUET:
            self._encoder = ParquetEncoder(
                staged,
                topic=archive.topic,
                partition=archive.partition,
                compression=archive.compression,
                types=types,
            )
        self._parts: list[Part] = []
        self._topic_ids: set[str] = set()
        self._record_count = 0
        self._gaps: list[Gap] = []
        self._gap_counts = dict.fromkeys(GapCause, 0)
        self.part_bytes = 0

    def take_bytes(self, data: memoryview) -> None:
        """See `reader.Copy.take_bytes`."""
        self._staged.write(data)
        self._bytes.update(data)

    def take_rows(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """See `reader.Copy.take_rows`."""
        topic = batch.column("topic")[0].as_py()
        if topic != self._archive.topic:
            raise CorruptionError(
                "the object holds another topic", expected=self._archive.topic, found=topic
            )
        self._rows.update_arrow(batch)
        if self._encoder:
            self._encoder.append_arrow(batch)

    def add(self, covered: OffsetRange) -> None:
        """Check the next part and take it over."""
        found = self._archive.check(covered, copy=self, mirror_v3_before=self._mirror_v3_before)
        if found.topic_id:
            self._topic_ids.add(found.topic_id)
        self._parts.append(Part(covered=covered, digest=found.digest or ""))
        self._record_count += found.record_count or 0
        self.part_bytes += found.size_bytes
        gaps = found.gaps or GapFacts()
        if gaps.unexplained_count:
            raise UsageError(
                "objects that lack offsets and do not say why cannot be merged",
                hint="their claims are lost, or records were taken out; `logmirror verify "
                "--deep --against-source` asks the source",
                name=format_name(covered, self._archive.extension),
                missing=gaps.unexplained_count,
            )
        self._gaps += gaps.runs[: _GAP_RUNS_MAX - len(self._gaps)]
        for cause, count in gaps.counts.items():
            self._gap_counts[cause] += count

    def record(self, covered: OffsetRange, writer_id: str, now_ms: int) -> Compaction:
        """What is to be said of the merged object."""
        if len(self._topic_ids) > 1:
            raise CorruptionError(
                "the objects come from different topics of one name",
                hint="records of two topics must not share a chain; keep the archive as it is",
                topic=self._archive.topic,
                topic_ids=", ".join(sorted(self._topic_ids)),
            )
        if self._archive.extension == NATIVE:
            digest = f"xxh3:{self._bytes.hexdigest()}"
        else:
            digest = self._rows.hexdigest()
        return Compaction(
            covered=covered,
            digest=digest,
            record_count=self._record_count,
            parts=tuple(self._parts),
            writer=writer_id,
            topic=self._archive.topic,
            topic_id="".join(self._topic_ids),
            partition=self._archive.partition,
            created_ms=now_ms,
            gaps=tuple(self._gaps),
            gap_counts=self._gap_counts,
        )

    def finish(self, record: Compaction, name: str) -> str:
        """Make the object ready; returns the store's token."""
        if self._encoder:
            metadata = ObjectMetadata(
                topic=record.topic,
                topic_id=record.topic_id,
                partition=record.partition,
                covered=record.covered,
                record_count=record.record_count,
                digest=record.digest,
                gaps=record.gaps,
                gap_counts=self._gap_counts,
            )
            self._encoder.finish(metadata.to_key_values())
        return self._staged.finish(name, travels=False)

    def abort(self) -> None:
        """Throw the object away. Never raises."""
        self._staged.abort()


def _write_record(archive: Archive, record: Compaction) -> None:
    name = compaction_name(archive.folder, record.covered)
    try:
        archive.store.create(name, record.to_bytes())
    except AlreadyExistsError:
        found = read_compaction(archive.store, archive.folder, record.covered)
        if found is None:
            raise GoneError("the record was removed meanwhile", name=name) from None
        if found.digest != record.digest:
            raise _differs(name, record.digest, found.digest) from None


def _publish(archive: Archive, token: str, name: str, record: Compaction) -> None:
    store = archive.store
    try:
        store.publish(token, name)
    except AlreadyExistsError:
        try:
            found = object_digest(store, name, expected=record.digest)
        except KeyError:
            raise GoneError("an object was replaced meanwhile", name=name) from None
        if found != record.digest:
            raise _differs(name, record.digest, found) from None
        store.discard(token)


def _differs(name: str, expected: str, found: str | None) -> CorruptionError:
    return CorruptionError(
        "the objects are not those that were merged here before",
        hint=_HINT,
        name=name,
        expected=expected,
        found=found,
    )


def _prove(archive: Archive, record: Compaction) -> ObjectReport:
    """Read the merged object from the store, as anybody would who has nothing else."""
    found = archive.check(record.covered)
    expected = record.digest, record.record_count
    if (found.digest, found.record_count) != expected:
        raise CorruptionError(
            "the merged object is not what it was made of",
            hint="what it was made of is still there: remove the merged object",
            name=found.name,
            expected=expected,
            found=(found.digest, found.record_count),
        )
    return found


def _delete(archive: Archive, link: Link) -> None:
    archive.store.delete(f"{archive.folder}/{link.name}")
    failpoints.reach("compact.deleted")
