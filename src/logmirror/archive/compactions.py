"""Compaction records: which objects each merged object was made from.

    .logmirror/compactions/<destination>/<partition>/<from>-<to>

A record is created before its merged object appears and is never deleted. It distinguishes an
object that was replaced from one that overlaps the chain. The content is one JSON object in UTF-8,
described in `docs/formats/archive.md`; decision 0007 gives the reasons.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from logmirror.archive import json_codec
from logmirror.archive.claims import Claim, accepted_claims, agreed_outcomes, read_claim
from logmirror.archive.cover import Cover, cover
from logmirror.archive.json_codec import integer, text
from logmirror.errors import CorruptionError
from logmirror.model import Decided, Gap, GapCause, OffsetRange, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.archive.chain import ArchiveObject
    from logmirror.archive.json_codec import Fields
    from logmirror.stores.base import BlobStore

VERSION: Final = 1
"""Version of the record's content. A reader rejects a higher one."""

_FILE: Final = json_codec.FileKind(
    version=VERSION,
    unreadable="unreadable compaction record",
    hint="delete nothing; run `logmirror verify --deep --against-source`",
    too_new="a newer version of logmirror merged these objects",
    too_new_hint="upgrade logmirror here",
)

_RECORD: Final = re.compile(r"([0-9]{20})-([0-9]{20})")

_Listing = TypeVar("_Listing")
_Found = TypeVar("_Found")

_LISTINGS_MAX: Final = 5
"""Listings of one folder before an invalid one is reported. An invalid listing may have missed
concurrent changes; each further one that is invalid and different takes a whole compaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An object that a merged one was made from."""

    covered: OffsetRange
    digest: str
    """Content digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """The record of one merged object."""

    covered: OffsetRange
    digest: str
    """Content digest of the merged object."""

    record_count: int
    parts: tuple[Part, ...]
    """In order; each begins where the previous one ends."""

    writer: str
    topic: str
    topic_id: str
    """32 hexadecimal digits; empty if no part contains it."""

    partition: int
    created_ms: int
    """By the writer's clock, ms since 1970."""

    gaps: tuple[Gap, ...] = ()
    """Offsets without records, ascending, as far as the parts list them; the first ones if there
    are very many."""

    gap_counts: Mapping[GapCause, int] = field(default_factory=dict)
    """How many offsets have no record, by cause; empty if a part has no counts."""

    decided: tuple[Decided, ...] = ()
    """Those of all parts' claims."""

    def as_claim(self) -> Claim:
        """Return the claim that an object with this content would have."""
        return Claim(
            covered=self.covered,
            digest=self.digest,
            writer=self.writer,
            topic=self.topic,
            topic_id=self.topic_id,
            partition=self.partition,
            created_ms=self.created_ms,
            record_count=self.record_count,
            trigger=Trigger.EXPLICIT,
            gaps=self.gaps,
            gap_counts=self.gap_counts,
            decided=self.decided,
            is_merged=True,
        )

    def to_bytes(self) -> bytes:
        """Return the record's content."""
        content: dict[str, object] = {
            "version": VERSION,
            "from": self.covered.first,
            "to": self.covered.last,
            "digest": self.digest,
            "record_count": self.record_count,
            "parts": [[p.covered.first, p.covered.last, p.digest] for p in self.parts],
            "writer": self.writer,
            "topic": self.topic,
            "topic_id": self.topic_id,
            "partition": self.partition,
            "created_ms": self.created_ms,
        }
        content |= json_codec.gap_fields(self.gaps, self.gap_counts)
        content |= json_codec.decided_field(self.decided)
        return json_codec.encode(content) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Compaction:
        """Read a record.

        Args:
            data: The file's content.
            name: The file's name in the store, which the content must match.

        Raises:
            CorruptionError: The content is not a compaction record, or is one for another name.
            UsageError: A newer version of logmirror wrote the record.
        """
        content = _FILE.load(data, name)
        _FILE.check_version(content, name)
        try:
            found = cls._from_content(content)
        except (KeyError, TypeError, ValueError) as error:
            raise _FILE.error(name, repr(error)[:200]) from error
        covered = found.covered
        if not name.endswith(f"/{found.partition}/{covered.first:020d}-{covered.last:020d}"):
            raise _FILE.error(name, "the content belongs to another name")
        return found

    @classmethod
    def _from_content(cls, content: Fields) -> Compaction:
        if content["version"] != VERSION:
            raise ValueError(content["version"])
        parts = tuple(
            Part(covered=OffsetRange(first=integer(first), last=integer(last)), digest=text(digest))
            for first, last, digest in content["parts"]
        )
        covered = json_codec.read_range(content)
        firsts = [part.covered.first for part in parts] + [covered.next_offset]
        nexts = [covered.first] + [part.covered.next_offset for part in parts]
        if firsts != nexts or len(parts) < 2:  # noqa: PLR2004  # one object alone is not merged
            raise ValueError("the parts do not cover the range")
        return cls(
            covered=covered,
            digest=text(content["digest"]),
            record_count=integer(content["record_count"]),
            parts=parts,
            writer=text(content["writer"]),
            topic=text(content["topic"]),
            topic_id=text(content["topic_id"]),
            partition=integer(content["partition"]),
            created_ms=integer(content["created_ms"]),
            gaps=json_codec.read_gaps(content),
            gap_counts=json_codec.read_counts(content),
            decided=json_codec.read_decided(content),
        )


def compaction_name(folder: str, covered: OffsetRange) -> str:
    """Return the name of the record for the merged object of this range.

    Args:
        folder: The chain's folder: `<destination>/<partition>`.
        covered: The object's range.
    """
    return f".logmirror/compactions/{folder}/{covered.first:020d}-{covered.last:020d}"


def read_compaction(store: BlobStore, folder: str, covered: OffsetRange) -> Compaction | None:
    """Return the record of a merged object; None if no merge created this range.

    Raises:
        CorruptionError: The file is not a compaction record.
    """
    name = compaction_name(folder, covered)
    try:
        data = store.read(name)
    except KeyError:
        return None
    return Compaction.from_bytes(data, name=name)


def part_starts(store: BlobStore, folder: str, covered: OffsetRange) -> tuple[int, ...]:
    """Return the first offsets of all objects that an object was made from, ascending.

    Those of parts that were merged before are included. Empty: no merge created the object.

    Raises:
        CorruptionError: A file is not a compaction record.
    """
    if read_compaction(store, folder, covered) is None:
        return ()
    starts: set[int] = set()
    names = store.names(f".logmirror/compactions/{folder}", f"{covered.first:020d}")
    for found in map(_RECORD.fullmatch, names):
        if found is None:
            continue
        first, last = int(found[1]), int(found[2])
        if first > covered.last:
            break
        inner = OffsetRange(first=first, last=last)
        if last <= covered.last and (record := read_compaction(store, folder, inner)):
            starts.update(part.covered.first for part in record.parts)
    return tuple(sorted(starts))


def expected_content(store: BlobStore, folder: str, covered: OffsetRange) -> Claim | None:
    """Return what the object of this range must contain, by its claim or its compaction record.

    The claim at the start of a merged object is that of its first part, with another range. It is
    returned if there is no compaction record for the range. None: there is neither.

    Raises:
        CorruptionError: The file is not a claim, or not a compaction record.
    """
    destination, _, partition = folder.rpartition("/")
    claim = read_claim(store, destination, int(partition), covered.first)
    if claim is not None and claim.covered == covered:
        return claim
    record = read_compaction(store, folder, covered)
    return record.as_claim() if record else claim


def decided_in(store: BlobStore, folder: str, covered: OffsetRange) -> tuple[Decided, ...]:
    """Return how open transactions of the object of this range ended, as far as claims say it.

    Raises:
        CorruptionError: The file is not a claim, or not a compaction record.
    """
    claim = expected_content(store, folder, covered)
    if claim is None or claim.covered != covered:
        return ()
    destination = folder.rpartition("/")[0]
    return agreed_outcomes(accepted_claims(store, destination, claim).values())


def resolve(
    store: BlobStore, folder: str, names: Iterable[str], *, extension: str, start: int | None
) -> Cover:
    """Resolve a listing as `cover` does, and check its nested objects; see `explain`."""
    found = cover(names, extension=extension, start=start)
    explain(store, folder, found)
    return found


def read_cover(store: BlobStore, folder: str, *, extension: str, start: int | None) -> Cover:
    """List a partition and resolve the listing; see `cover` for the arguments.

    Raises:
        CorruptionError: There is no valid cover, or no record explains an object that lies within
            another one. Facts: `name`.
    """
    return confirmed(
        lambda: list(store.names(folder)),
        lambda names: resolve(store, folder, names, extension=extension, start=start),
    )


def confirmed(read: Callable[[], _Listing], check: Callable[[_Listing], _Found]) -> _Found:
    """Check a listing; an invalid one is reported only if the next listing is the same.

    A listing is not atomic: it may miss a merged object that appears meanwhile, and the parts that
    the merged object replaces. The merged object appears first, so the next listing shows it.

    Args:
        read: Returns a listing.
        check: Returns the result for a listing, or raises CorruptionError for an invalid one.

    Raises:
        CorruptionError: The listing is invalid.
    """
    before: _Listing | None = None
    for _ in range(_LISTINGS_MAX):
        found = read()
        if found == before:
            break
        with contextlib.suppress(CorruptionError):
            return check(found)
        before = found
    return check(found)


def explain(store: BlobStore, folder: str, found: Cover) -> dict[ArchiveObject, str]:
    """Return the digest that each replaced object must have; reads the store only if there are any.

    Raises:
        CorruptionError: No record lists the object as a part of the one around it. Facts: `name`
            and `inside`.
    """
    digests: dict[ArchiveObject, str] = {}
    records = _Records(store, folder)
    for outer, inner in found.replaced.items():
        for obj in inner:
            digest = records.digest_of(obj.covered, outer.covered)
            if digest is None:
                raise CorruptionError(
                    "overlap in the chain: an object lies inside another one that was not made "
                    "from it",
                    hint="delete nothing; run `logmirror verify` and compare with the source",
                    name=obj.name,
                    inside=outer.name,
                )
            digests[obj] = digest
    return digests


class _Records:
    """The records of one partition, each read once."""

    def __init__(self, store: BlobStore, folder: str) -> None:
        self._store, self._folder = store, folder
        self._read: dict[OffsetRange, Compaction | None] = {}

    def _of(self, covered: OffsetRange) -> Compaction | None:
        if covered not in self._read:
            self._read[covered] = read_compaction(self._store, self._folder, covered)
        return self._read[covered]

    def digest_of(self, inner: OffsetRange, outer: OffsetRange) -> str | None:
        """The digest of the object `inner` that became part of `outer`; None: no record has it."""
        record = self._of(outer)
        if record is None:
            return None
        for part in record.parts:
            if part.covered == inner:
                return part.digest
            if part.covered.first <= inner.first and inner.last <= part.covered.last:
                return self.digest_of(inner, part.covered)
        # It spans several parts: a late object of a merge with a smaller cell.
        own = self._of(inner)
        if own is None or inner == outer:
            return None
        if any(self.digest_of(part.covered, outer) != part.digest for part in own.parts):
            return None
        return own.digest


def objects_from(
    store: BlobStore, folder: str, gone: ArchiveObject, extension: str
) -> tuple[ArchiveObject, ...]:
    """Return the current chain from the object on that replaces one of an older listing.

    Raises:
        CorruptionError: Nothing replaces it, or there is no valid cover.
    """
    objects = read_cover(store, folder, extension=extension, start=None).objects
    rest = tuple(obj for obj in objects if obj.last >= gone.first)
    if not rest or rest[0].first > gone.first or rest[0] == gone:
        raise CorruptionError(
            "an object was deleted after it was listed, and nothing replaces it",
            hint="delete nothing; run `logmirror verify` and compare with the source",
            name=gone.name,
        )
    return rest
