"""Merge objects of a chain into one: stage, record, publish, verify, delete; see decision 0007.

Each step is create-only or repeatable, so an interrupted compaction needs no rollback: the next one
repeats its steps. Memory is bounded by the buffers of a check and an encoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import xxhash

from logmirror import failpoints
from logmirror.archive.claims import accepted_claims, first_claimed, read_claim
from logmirror.archive.compactions import (
    Compaction,
    Part,
    compaction_name,
    expected_content,
    read_compaction,
)
from logmirror.archive.digest import object_digest
from logmirror.archive.envelope import ParquetEncoder
from logmirror.archive.gap_facts import GapFacts
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET, format_name
from logmirror.archive.object_check import check_object
from logmirror.archive.parquet_columns import common_types
from logmirror.archive.reader import object_types
from logmirror.errors import CorruptionError, LogmirrorError, PositionError, UsageError
from logmirror.model import ColumnTypes, Decided, Gap, GapCause, Limits, OffsetRange
from logmirror.stores.base import AlreadyExistsError
from logmirror.wire.columns import ContentDigest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.archive.chain import ArchiveObject
    from logmirror.archive.claims import Claim
    from logmirror.archive.object_check import ObjectReport
    from logmirror.clock import Clock
    from logmirror.stores.base import BlobStore, StagedObject

_GAP_RUNS_MAX: Final = 1000
"""Gap runs listed for one object, as many as a mirror lists; the counts are complete."""

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
    """Compression of Parquet: one of `envelope.COMPRESSIONS`."""

    utf8: bool
    """NDJSON keys and values are text."""

    limits: Limits = field(default_factory=Limits)
    """The largest record and batch that are unpacked."""

    @property
    def partition(self) -> int:
        """The source partition."""
        return int(self.folder.rpartition("/")[2])

    def check(
        self, covered: OffsetRange, sink: _Merging | None = None, *, mirror_v3_before: int = 0
    ) -> ObjectReport:
        """Read and check a whole object; see `check_object`.

        Raises:
            GoneError: The object does not exist.
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
                limits=self.limits,
                sink=sink,
            )
        except KeyError:
            raise GoneError("an object was replaced by another compaction", name=name) from None

    def types(self, covered: OffsetRange) -> ColumnTypes:
        """Return the column types of an object's keys and values; `bytes` if it has no columns.

        Raises:
            GoneError: The object does not exist.
        """
        if self.extension != PARQUET:
            return ColumnTypes()
        name = format_name(covered, self.extension)
        try:
            return object_types(self.store, self.folder, name)
        except KeyError:
            raise GoneError("an object was replaced by another compaction", name=name) from None

    def mirror_v3_before(self, first: int) -> int:
        """Return the offset below which NDJSON without a claim was written by mirror-v3.

        Args:
            first: First offset of the objects in question.
        """
        destination, _, partition = self.folder.rpartition("/")
        if self.extension != NDJSON:
            return 0
        if read_claim(self.store, destination, int(partition), first):
            return 0  # a claim exists, so logmirror wrote it; no need to list all claims
        return first_claimed(self.store, destination, int(partition))


class GoneError(PositionError):
    """An object no longer exists: another compaction was faster. List again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A merged object that was verified and whose parts were deleted."""

    covered: OffsetRange
    parts: int
    part_bytes: int
    object_bytes: int
    record_count: int


def merge(
    archive: Archive, objects: Sequence[ArchiveObject], *, writer_id: str, clock: Clock
) -> Merged:
    """Replace consecutive objects by one.

    Args:
        archive: The partition.
        objects: All objects that begin in one cell, at least two (see `cover.cells`).
        writer_id: Name of this process in the compaction record.
        clock: Source of the record's creation time.

    Raises:
        GoneError: Another compaction merges the same objects; nothing was left behind or lost.
        CorruptionError: An object is damaged; nothing is deleted.
    """
    covered = OffsetRange(first=objects[0].first, last=objects[-1].last)
    store, name = archive.store, f"{archive.folder}/{format_name(covered, archive.extension)}"
    types = common_types(archive.types(obj.covered) for obj in objects)
    mirror_v3_before = archive.mirror_v3_before(covered.first)
    staged = store.stage(f"compact-{archive.topic}-{covered.first}")
    merging = _Merging(archive, staged, types, mirror_v3_before)
    try:
        for obj in objects:
            merging.add(obj.covered)
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
    for obj in objects:
        _delete(archive, obj)
    return Merged(
        covered=covered,
        parts=len(objects),
        part_bytes=merging.part_bytes,
        object_bytes=proof.size_bytes,
        record_count=record.record_count,
    )


def finish(archive: Archive, outer: ArchiveObject, inner: Mapping[ArchiveObject, str]) -> int:
    """Delete the objects that a merged object replaces; returns how many.

    Args:
        archive: The partition.
        outer: The merged object.
        inner: The objects inside it, ascending, with the digests from the compaction records
            (`compactions.explain`).

    Raises:
        GoneError: Another compaction handles the same objects.
        CorruptionError: The merged object or a replaced one is damaged; neither is deleted.
    """
    record = read_compaction(archive.store, archive.folder, outer.covered)
    if record is None:
        raise GoneError("the compaction record was removed meanwhile", name=outer.name)
    _prove(archive, record)
    count = 0
    for obj, digest in inner.items():
        try:
            found = archive.check(obj.covered)
        except GoneError:
            continue
        if found.digest != digest and found.digest not in _accepted_claims(archive, obj.covered):
            raise CorruptionError(
                "an object inside a merged one has other content than the part that was merged",
                hint=_HINT,
                name=obj.name,
                inside=outer.name,
                expected=digest,
                found=found.digest,
            )
        _delete(archive, obj)
        count += 1
    return count


def _accepted_claims(archive: Archive, covered: OffsetRange) -> dict[str, Claim]:
    """Return the claims of an object's range by digest, of an object of a zombie writer too.

    That writer found its range claimed and no object, and a source that was cleaned meanwhile. It
    records the digest of its content before it publishes. The merged object holds the content that
    was published first.
    """
    claim = expected_content(archive.store, archive.folder, covered)
    if claim is None or claim.covered != covered:
        return {}
    return accepted_claims(archive.store, archive.folder.rpartition("/")[0], claim)


class _Merging:
    """One merged object under construction; the `ContentSink` of its parts' checks."""

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
        self._decided: list[Decided] = []
        self.part_bytes = 0

    def take_bytes(self, data: memoryview) -> None:
        """See `ContentSink.take_bytes`."""
        self._staged.write(data)
        self._bytes.update(data)

    def take_rows(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """See `ContentSink.take_rows`."""
        topic = batch.column("topic")[0].as_py()
        if topic != self._archive.topic:
            raise CorruptionError(
                "the object holds another topic", expected=self._archive.topic, found=topic
            )
        self._rows.update_arrow(batch)
        if self._encoder:
            self._encoder.append_arrow(batch)

    def add(self, covered: OffsetRange) -> None:
        """Check the next part and append its content."""
        found = self._archive.check(covered, sink=self, mirror_v3_before=self._mirror_v3_before)
        if found.topic_id:
            self._topic_ids.add(found.topic_id)
        self._parts.append(Part(covered=covered, digest=found.digest or ""))
        self._record_count += found.record_count or 0
        self.part_bytes += found.size_bytes
        gaps = found.gaps or GapFacts()
        if gaps.unexplained_count:
            raise UsageError(
                "objects with unexplained offset gaps cannot be merged",
                hint="their claims are lost, or records were removed; `logmirror verify --deep "
                "--against-source` compares them with the source",
                name=format_name(covered, self._archive.extension),
                missing=gaps.unexplained_count,
            )
        self._gaps += gaps.runs[: _GAP_RUNS_MAX - len(self._gaps)]
        for cause, count in gaps.counts.items():
            self._gap_counts[cause] += count
        if self._archive.extension == NATIVE:
            claim = _accepted_claims(self._archive, covered).get(found.digest or "")
            self._decided += claim.decided if claim is not None else ()

    def record(self, covered: OffsetRange, writer_id: str, now_ms: int) -> Compaction:
        """Return the compaction record."""
        if len(self._topic_ids) > 1:
            raise CorruptionError(
                "the objects come from different topics with the same name",
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
            decided=tuple(self._decided),
        )

    def finish(self, record: Compaction, name: str) -> str:
        """Finish the staged object; returns the store's token."""
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
        """Discard the object. Never raises."""
        self._staged.abort()


def _write_record(archive: Archive, record: Compaction) -> None:
    name = compaction_name(archive.folder, record.covered)
    try:
        archive.store.create(name, record.to_bytes())
    except AlreadyExistsError:
        found = read_compaction(archive.store, archive.folder, record.covered)
        if found is None:
            raise GoneError("the compaction record was removed meanwhile", name=name) from None
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
            raise GoneError("an object was replaced by another compaction", name=name) from None
        if found != record.digest:
            raise _differs(name, record.digest, found) from None
        store.discard(token)


def _differs(name: str, expected: str, found: str | None) -> CorruptionError:
    return CorruptionError(
        "this range was merged before with other content",
        hint=_HINT,
        name=name,
        expected=expected,
        found=found,
    )


def _prove(archive: Archive, record: Compaction) -> ObjectReport:
    """Read the merged object back from the store and compare it with its record."""
    found = archive.check(record.covered)
    expected = record.digest, record.record_count
    if (found.digest, found.record_count) != expected:
        raise CorruptionError(
            "the merged object differs from its parts",
            hint="the parts still exist: remove the merged object",
            name=found.name,
            expected=expected,
            found=(found.digest, found.record_count),
        )
    return found


def _delete(archive: Archive, obj: ArchiveObject) -> None:
    archive.store.delete(f"{archive.folder}/{obj.name}")
    failpoints.reach("compact.deleted")
