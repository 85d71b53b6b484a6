"""Records of merged objects: what each was made of, written before it appears and kept for good.

    .logmirror/compactions/<destination>/<partition>/<from>-<to>

They tell an object that was replaced from one that does not belong. The content is one JSON object
in UTF-8, described in `docs/formats/archive.md`; the reasons are in decision 0007.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logmirror.archive.claims import Claim, read_claim
from logmirror.archive.cover import Cover, cover
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import Gap, GapCause, OffsetRange, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.archive.chain import Link
    from logmirror.stores.base import BlobStore

VERSION: Final = 1
"""Of the record's content. A reader refuses a higher one."""

_Listing = TypeVar("_Listing")
_Found = TypeVar("_Found")

_LOOKS: Final = 5
"""A listing that is wrong may have missed what changed meanwhile. Each further one that is wrong
and different needs a whole compaction within its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An object that went into a merged one."""

    covered: OffsetRange
    digest: str
    """Of its content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """What a merged object was made of."""

    covered: OffsetRange
    digest: str
    """Of the merged content."""

    record_count: int
    parts: tuple[Part, ...]
    """In order; each begins where the one before it ended."""

    writer: str
    topic: str
    topic_id: str
    """32 hexadecimal digits; empty where no part knows it."""

    partition: int
    created_ms: int
    """By the writer's clock."""

    gaps: tuple[Gap, ...] = ()
    """Offsets without records, ascending, as far as the parts told; of very many the first."""

    gap_counts: Mapping[GapCause, int] = field(default_factory=dict)
    """How many offsets carry no record, by cause; empty where a part did not tell."""

    def as_claim(self) -> Claim:
        """Return what the claim of such an object would say."""
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
        if self.gaps:
            content["holes"] = [[h.first, h.last, h.cause.value] for h in self.gaps]
        if counts := {cause.value: count for cause, count in self.gap_counts.items() if count}:
            content["hole_counts"] = counts
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Compaction:
        """Read a record.

        Args:
            data: Its content.
            name: Its name in the store, which the content must agree with.

        Raises:
            CorruptionError: It is not a record, or not the one that belongs under this name.
            UsageError: A newer version of the program wrote it.
        """
        try:
            content = json.loads(data)
            version = content["version"]
            if type(version) is int and version > VERSION:
                raise UsageError(
                    "a newer version of logmirror merged these objects",
                    hint="upgrade logmirror here",
                    name=name,
                    expected=VERSION,
                    found=version,
                )
            found = cls._from_content(content)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise _unreadable(name, repr(error)[:200]) from error
        covered = found.covered
        if not name.endswith(f"/{found.partition}/{covered.first:020d}-{covered.last:020d}"):
            raise _unreadable(name, "it belongs under another name")
        return found

    @classmethod
    def _from_content(cls, content: Mapping[str, Any]) -> Compaction:
        if content["version"] != VERSION:
            raise ValueError(content["version"])
        parts = tuple(
            Part(covered=OffsetRange(first=_int(first), last=_int(last)), digest=_text(digest))
            for first, last, digest in content["parts"]
        )
        covered = OffsetRange(first=_int(content["from"]), last=_int(content["to"]))
        firsts = [part.covered.first for part in parts] + [covered.next_offset]
        nexts = [covered.first] + [part.covered.next_offset for part in parts]
        if firsts != nexts or len(parts) < 2:  # noqa: PLR2004  # one object alone is not merged
            raise ValueError("the parts do not make the whole")
        return cls(
            covered=covered,
            digest=_text(content["digest"]),
            record_count=_int(content["record_count"]),
            parts=parts,
            writer=_text(content["writer"]),
            topic=_text(content["topic"]),
            topic_id=_text(content["topic_id"]),
            partition=_int(content["partition"]),
            created_ms=_int(content["created_ms"]),
            gaps=tuple(
                Gap(first=_int(first), last=_int(last), cause=GapCause(cause))
                for first, last, cause in content.get("holes", ())
            ),
            gap_counts={
                GapCause(cause): _int(count)
                for cause, count in content.get("hole_counts", {}).items()
            },
        )


def compaction_name(folder: str, covered: OffsetRange) -> str:
    """Return the name of the record for the merged object of this range.

    Args:
        folder: Of the chain: `<destination>/<partition>`.
        covered: What the object covers.
    """
    return f".logmirror/compactions/{folder}/{covered.first:020d}-{covered.last:020d}"


def read_compaction(store: BlobStore, folder: str, covered: OffsetRange) -> Compaction | None:
    """Return the record of a merged object; None if this range was never made by merging.

    Raises:
        CorruptionError: What lies there is no record.
    """
    name = compaction_name(folder, covered)
    try:
        data = store.read(name)
    except KeyError:
        return None
    return Compaction.from_bytes(data, name=name)


def read_promise(store: BlobStore, folder: str, covered: OffsetRange) -> Claim | None:
    """Return what was promised of the object of this range: by its claim, or when it was merged.

    The claim where a merged object begins is that of its first part, and of another range. It is
    returned if nothing says that this is a merged object; None: nothing is kept.

    Raises:
        CorruptionError: What lies there is no claim, or no record.
    """
    destination, _, partition = folder.rpartition("/")
    claim = read_claim(store, destination, int(partition), covered.first)
    if claim is not None and claim.covered == covered:
        return claim
    made = read_compaction(store, folder, covered)
    return made.as_claim() if made else claim


def resolve(
    store: BlobStore, folder: str, names: Iterable[str], *, extension: str, start: int | None
) -> Cover:
    """Resolve a listing as `cover` does, and look up what lies inside what; see `explain`."""
    found = cover(names, extension=extension, start=start)
    explain(store, folder, found)
    return found


def read_cover(store: BlobStore, folder: str, *, extension: str, start: int | None) -> Cover:
    """List a partition and resolve it; see `cover` for the arguments.

    Raises:
        CorruptionError: There is no valid cover, or an object lies inside another one and no record
            says why. Facts: `name`.
    """
    return settled(
        lambda: list(store.names(folder)),
        lambda names: resolve(store, folder, names, extension=extension, start=start),
    )


def settled(look: Callable[[], _Listing], judge: Callable[[_Listing], _Found]) -> _Found:
    """Judge a listing; one that is refused is believed when the next one is the same.

    A listing takes time, and may miss an object that appears meanwhile as well as those that it
    replaces. It appears first, so the next listing has it.
    """
    before: _Listing | None = None
    for _ in range(_LOOKS):
        found = look()
        if found == before:
            break
        with contextlib.suppress(CorruptionError):
            return judge(found)
        before = found
    return judge(found)


def explain(store: BlobStore, folder: str, found: Cover) -> dict[Link, str]:
    """Return the digest that each replaced object must have; asks the store only if there are any.

    Raises:
        CorruptionError: No record says that it was merged into the object around it. Facts: `name`
            and `inside`.
    """
    digests: dict[Link, str] = {}
    records = _Records(store, folder)
    for around, inside in found.replaced.items():
        for link in inside:
            digest = records.digest_of(link.covered, around.covered)
            if digest is None:
                raise CorruptionError(
                    "overlap in the chain: an object lies inside another one that was not made "
                    "of it",
                    hint="delete nothing; run `logmirror verify` and compare with the source",
                    name=link.name,
                    inside=around.name,
                )
            digests[link] = digest
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
        """The digest of what covers `inner` and went into `outer`; None if nothing tells."""
        record = self._of(outer)
        if record is None:
            return None
        for part in record.parts:
            if part.covered == inner:
                return part.digest
            if part.covered.first <= inner.first and inner.last <= part.covered.last:
                return self.digest_of(inner, part.covered)
        # It reaches over several parts: made by a smaller merge that was late.
        own = self._of(inner)
        if own is None or inner == outer:
            return None
        if any(self.digest_of(part.covered, outer) != part.digest for part in own.parts):
            return None
        return own.digest


def links_from(store: BlobStore, folder: str, gone: Link, extension: str) -> tuple[Link, ...]:
    """The chain as it is now, from the object on that replaces one of an older listing.

    Raises:
        CorruptionError: Nothing replaces it, or there is no valid cover.
    """
    links = read_cover(store, folder, extension=extension, start=None).links
    rest = tuple(link for link in links if link.last >= gone.first)
    if not rest or rest[0].first > gone.first or rest[0] == gone:
        raise CorruptionError(
            "the object is gone since it was listed, and nothing replaces it",
            hint="delete nothing; run `logmirror verify` and compare with the source",
            name=gone.name,
        )
    return rest


def _unreadable(name: str, reason: str) -> CorruptionError:
    return CorruptionError(
        "unreadable record of a compaction",
        hint="delete nothing; run `logmirror verify --deep --against-source`",
        name=name,
        reason=reason,
    )


def _int(value: object) -> int:
    if type(value) is not int:  # bool is an int too
        raise TypeError(value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
