"""Claims: create-only files that decide, once for every position, which range comes next.

    .logmirror/claims/<destination>/<partition>/<first, 20 digits>

1. A claim is created before its object is published, and creating never replaces. So at most one
   range can follow a position (I2), for every attempt, process and machine, including zombies.
2. A claim without its object is completed by the next writer, which writes exactly that range.
   Objects take precedence over claims: the listing of objects alone is the position.
3. Claims are kept longer than a process can be paused, and the newest one of a partition always.
   Native and NDJSON objects contain neither their digest nor the causes of missing offsets, so
   their claims are kept as long as the objects.

The content is one JSON object in UTF-8, described in `docs/formats/claim.md`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import xxhash

from logmirror import failpoints
from logmirror.archive import json_codec
from logmirror.archive.json_codec import integer, text
from logmirror.archive.naming import format_name
from logmirror.errors import PositionError, PositionMovedError, UnavailableError
from logmirror.model import OFFSET_MAX, Decided, Gap, GapCause, OffsetRange, Trigger
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.archive.json_codec import Fields
    from logmirror.stores.base import BlobStore

VERSION: Final = 1
"""Version of the claim's content. A reader rejects a higher one."""

KEEP_MS: Final = 7 * 24 * 3600 * 1000
"""How long claims are kept: longer than a process can be paused and still publish."""

_NAME_DIGITS: Final = 20
_CHECK: Final = b',"check":"'
_HINT_STUCK: Final = (
    "if no other logmirror writes to this destination, compare the claim with the source, "
    "then remove the claim file and restart"
)
_FILE: Final = json_codec.FileKind(
    version=VERSION,
    unreadable="unreadable claim",
    hint=_HINT_STUCK,
    too_new="a newer version of logmirror wrote this claim",
    too_new_hint="upgrade logmirror here: an older version cannot share a destination with a "
    "newer one",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The content of a claim: the range, and what the writer was about to publish."""

    covered: OffsetRange
    """The object's range; its first offset is also the claim's name."""

    digest: str
    """Content digest, not the digest of the file: `xxh3:` and 32 hexadecimal digits."""

    writer: str
    """The writer ID of the run that made the claim."""

    topic: str
    topic_id: str
    """32 hexadecimal digits; empty if the source has no topic IDs."""

    partition: int
    created_ms: int
    """By the writer's clock, ms since 1970."""

    record_count: int
    trigger: Trigger
    leader_epoch: int | None = None
    """Leader epoch of the range's last batch at the source, if known."""

    gaps: tuple[Gap, ...] = ()
    """Offsets without records; the first ones if there are very many."""

    rewritable: bool = False
    """The source compacts its log, so a later reader of the range may find fewer records. The
    claim then fixes the range and not the digest."""

    gap_counts: Mapping[GapCause, int] = field(default_factory=dict)
    """How many offsets have no record, by cause; complete even if `gaps` is not."""

    decided: tuple[Decided, ...] = ()
    """Of a native object with open transactions at its end: how they ended. Of a merged one: the
    same of its parts, as far as it is known."""

    is_merged: bool = False
    """Not stored. True: made from a compaction record by `Compaction.as_claim`."""

    def all_gaps(self) -> Mapping[GapCause, int]:
        """Return `gap_counts`; for a claim without it, the counts that follow from `gaps`.

        Such a claim lists all offset gaps except offsets that were compacted away inside batches.
        """
        if self.gap_counts:
            return self.gap_counts
        counts = dict.fromkeys(GapCause, 0)
        for gap in self.gaps:
            counts[gap.cause] += gap.last - gap.first + 1
        counts[GapCause.COMPACTED] += (
            self.covered.offset_count - self.record_count - sum(counts.values())
        )
        return counts

    def to_bytes(self) -> bytes:
        """Return the claim file's content."""
        content: dict[str, object] = {
            "version": VERSION,
            "from": self.covered.first,
            "to": self.covered.last,
            "digest": self.digest,
            "writer": self.writer,
            "topic": self.topic,
            "topic_id": self.topic_id,
            "partition": self.partition,
            "created_ms": self.created_ms,
            "record_count": self.record_count,
            "trigger": self.trigger.value,
        }
        if self.leader_epoch is not None:
            content["leader_epoch"] = self.leader_epoch
        content |= json_codec.gap_fields(self.gaps, self.gap_counts)
        if self.rewritable:
            content["rewritable"] = True
        content |= json_codec.decided_field(self.decided)
        body = json_codec.encode(content)[:-1]
        return body + _CHECK + _checksum(body) + b'"}\n'

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Claim:
        """Read a claim file.

        Args:
            data: The file's content.
            name: The file's name in the store, which the content must match.

        Raises:
            CorruptionError: The content is not a claim, or is a claim for another name.
            UsageError: A newer version of logmirror wrote the claim.
        """
        content = _FILE.load(data, name)
        body, _, _ = data.rpartition(_CHECK)
        if "check" in content and str(content["check"]).encode() != _checksum(body):
            raise _FILE.error(name, "checksum mismatch")
        _FILE.check_version(content, name)
        try:
            claim = cls._from_content(content)
        except (KeyError, TypeError, ValueError) as error:
            raise _FILE.error(name, repr(error)) from error
        if not name.endswith(f"/{claim.partition}/{claim.covered.first:0{_NAME_DIGITS}d}"):
            raise _FILE.error(name, "the content belongs to another name")
        return claim

    @classmethod
    def _from_content(cls, content: Fields) -> Claim:
        if content["version"] != VERSION:
            raise ValueError(content["version"])
        epoch = content.get("leader_epoch")
        return cls(
            covered=json_codec.read_range(content),
            digest=text(content["digest"]),
            writer=text(content["writer"]),
            topic=text(content["topic"]),
            topic_id=text(content["topic_id"]),
            partition=integer(content["partition"]),
            created_ms=integer(content["created_ms"]),
            record_count=integer(content["record_count"]),
            trigger=Trigger(content["trigger"]),
            leader_epoch=None if epoch is None else integer(epoch),
            gaps=json_codec.read_gaps(content),
            rewritable=content.get("rewritable", False) is True,
            gap_counts=json_codec.read_counts(content),
            decided=json_codec.read_decided(content),
        )


class ClaimTakenError(PositionMovedError):
    """Another writer claimed a different range at this position: write that range instead.

    Facts: `name` of the claim, the requested `last`, `claimed_last`, `claimed_by`, and `claim`, the
    winning claim's content as text.
    """

    @property
    def claim(self) -> Claim:
        """The claim that won."""
        data = str(self.facts["claim"]).encode()
        return Claim.from_bytes(data, name=str(self.facts["name"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published object."""

    name: str
    """With its folder."""

    existed: bool
    """The claim or the object already existed, with the same content."""

    claimed_by: str = ""
    """The writer ID in the claim that already existed; empty if none did."""


def claims_folder(destination: str, partition: int) -> str:
    """Return the folder of a partition's claims."""
    return f".logmirror/claims/{destination}/{partition}"


def claim_name(destination: str, partition: int, first: int) -> str:
    """Return the name of the claim for the object that begins at `first`."""
    return f"{claims_folder(destination, partition)}/{first:0{_NAME_DIGITS}d}"


def publish_object(
    store: BlobStore, *, token: str, folder: str, extension: str, claim: Claim
) -> Published:
    """Claim the range, then publish the staged object; both steps are create-only.

    The call may be repeated with the same range and content after every outcome. After a success
    the staged object is gone; after an error the caller discards it.

    Args:
        store: The destination's store.
        token: Token of a staged object that `finish` has made durable.
        folder: The chain's folder: `<destination>/<partition>`.
        extension: Extension of the chain's format.
        claim: Range and content of the object.

    Raises:
        ClaimTakenError: The position is claimed with another end; stage that range instead.
        PositionError: The range is claimed or published with other content. Facts: `name`,
            `expected` and `found` digests.
        CorruptionError: The existing claim or object cannot be read.
        UnavailableError: The store cannot be reached, or the staged object was swept.
        OutcomeUnknownError: The object may be published; list, then decide.
    """
    winner = _claim(store, f".logmirror/claims/{folder}", claim)
    claimed_by = winner.writer if winner else ""
    failpoints.reach("claim.created")
    name = f"{folder}/{format_name(claim.covered, extension)}"
    try:
        store.publish(token, name)
    except AlreadyExistsError:
        # Imported here because it loads the readers of every format.
        from logmirror.archive.digest import object_digest  # noqa: PLC0415  # see above

        try:
            found = object_digest(store, name, expected=claim.digest)
        except KeyError:
            raise UnavailableError(
                "the object was just replaced by a merged one; plan again", name=name
            ) from None
        if found != claim.digest and not claim.rewritable:
            raise PositionError(
                "the name is taken by an object with other content",
                hint="run `logmirror verify --deep --against-source` before you delete anything",
                name=name,
                expected=claim.digest,
                found=found,
            ) from None
        store.discard(token)
        return Published(name=name, existed=True, claimed_by=claimed_by)
    return Published(name=name, existed=winner is not None, claimed_by=claimed_by)


def _claim(store: BlobStore, folder: str, claim: Claim) -> Claim | None:
    """Create the claim; returns the existing claim of the same range, or None."""
    name = f"{folder}/{claim.covered.first:0{_NAME_DIGITS}d}"
    try:
        store.create(name, claim.to_bytes())
    except AlreadyExistsError:
        try:
            data = store.read(name)
        except KeyError:
            raise UnavailableError("the claim was just removed; plan again", name=name) from None
    else:
        return None
    winner = Claim.from_bytes(data, name=name)
    if winner.covered != claim.covered:
        raise ClaimTakenError(
            "another writer claimed a different range at this position",
            hint="write exactly the claimed range",
            name=name,
            last=claim.covered.last,
            claimed_last=winner.covered.last,
            claimed_by=winner.writer,
            claim=data.decode(),
        )
    if winner.digest != claim.digest and winner.rewritable:
        # Recorded before the object appears, so the digest of every object is recorded.
        with contextlib.suppress(AlreadyExistsError):
            store.create(f"{_rewrites(folder)}/{_rewrite_name(claim)}", claim.to_bytes())
    elif winner.digest != claim.digest:
        raise PositionError(
            "the range is claimed with other content",
            hint=_HINT_STUCK,
            name=name,
            expected=claim.digest,
            found=winner.digest,
            claimed_by=winner.writer,
        )
    return winner


def read_claim(store: BlobStore, destination: str, partition: int, first: int) -> Claim | None:
    """Return the claim for the object that begins at `first`, or None.

    Raises:
        CorruptionError: The file is not a claim.
    """
    name = claim_name(destination, partition, first)
    try:
        data = store.read(name)
    except KeyError:
        return None
    return Claim.from_bytes(data, name=name)


def read_rewrites(store: BlobStore, destination: str, partition: int, first: int) -> list[Claim]:
    """Return the second claims of writers that finished the rewritable claim at `first`.

    Each holds the digest of content that differs from the claimed one.
    """
    name = claim_name(destination, partition, first)
    folder = _rewrites(claims_folder(destination, partition))
    digits = name.rpartition("/")[2]
    found = []
    for rewrite in store.names(folder):
        if rewrite.startswith(f"{digits}-"):
            with contextlib.suppress(KeyError):
                found.append(Claim.from_bytes(store.read(f"{folder}/{rewrite}"), name=name))
    return found


def accepted_claims(store: BlobStore, destination: str, claim: Claim) -> dict[str, Claim]:
    """Return the claims of the contents that an object of a claimed range may have, by digest.

    These are the claim and, if it is rewritable, those of `read_rewrites`.
    """
    found = {claim.digest: claim}
    if claim.rewritable:
        rewrites = read_rewrites(store, destination, claim.partition, claim.covered.first)
        found = {rewrite.digest: rewrite for rewrite in rewrites} | found
    return found


def agreed_outcomes(claims: Iterable[Claim]) -> tuple[Decided, ...]:
    """Return `decided` of claims for one object; nothing if they differ in it."""
    found = {claim.decided for claim in claims}
    return found.pop() if len(found) == 1 else ()


def accepted_digests(store: BlobStore, destination: str, claim: Claim) -> frozenset[str]:
    """Return the digests that an object of a claimed range may have; see `accepted_claims`."""
    return frozenset(accepted_claims(store, destination, claim))


def _rewrites(folder: str) -> str:
    return folder.replace(".logmirror/claims/", ".logmirror/rewrites/", 1)


def _rewrite_name(claim: Claim) -> str:
    return f"{claim.covered.first:0{_NAME_DIGITS}d}-{claim.digest.rpartition(':')[2]}"


def latest_claim(store: BlobStore, destination: str, partition: int) -> Claim | None:
    """Return the claim with the highest first offset, or None if there is none.

    Raises:
        CorruptionError: A file in the folder is not a claim.
    """
    folder = claims_folder(destination, partition)
    firsts = _offsets(folder, store.tail(folder).names)
    return read_claim(store, destination, partition, firsts[-1]) if firsts else None


def last_claims(
    store: BlobStore, destination: str, partition: int, position: int
) -> tuple[Claim | None, Claim | None]:
    """Return the newest claim of a chain, and the claim of the object that ends at `position`.

    They differ while an object is unfinished. The second is None also where a merge or the sweep of
    old claims left none for that range.

    Raises:
        CorruptionError: A file in the folder is not a claim.
    """
    folder = claims_folder(destination, partition)
    firsts = _offsets(folder, store.tail(folder).names)
    newest = read_claim(store, destination, partition, firsts[-1]) if firsts else None
    last = newest
    if newest is not None and newest.covered.first >= position:
        before = [first for first in firsts if first < position]
        last = read_claim(store, destination, partition, before[-1]) if before else None
    return newest, last if last and last.covered.next_offset == position else None


def first_claimed(store: BlobStore, destination: str, partition: int) -> int:
    """Return the first offset of the first claim; a number above every offset if there is none.

    logmirror did not write NDJSON objects below it: claims of NDJSON objects are never removed.
    """
    folder = claims_folder(destination, partition)
    name = next(iter(store.names(folder)), None)
    return OFFSET_MAX + 1 if name is None else _offsets(folder, [name])[0]


def sweep_claims(  # noqa: PLR0913  # three for the place, three for the selection
    store: BlobStore,
    destination: str,
    partition: int,
    *,
    position: int,
    now_ms: int,
    older_than_ms: int = KEEP_MS,
) -> int:
    """Delete claims that are no longer needed; returns how many.

    A claim is deleted if its range ends before the verified `position` and it is older than
    `older_than_ms`. The newest claim is always kept: it ties the chain to its topic. Claims are
    read in order up to the first one that is kept, so the cost is proportional to the deletions.
    """
    count = 0
    folder = claims_folder(destination, partition)
    for first in _offsets(folder, store.names(folder))[:-1]:
        claim = read_claim(store, destination, partition, first)
        if claim is None:
            continue  # another process deleted it
        if claim.covered.last >= position or now_ms - claim.created_ms <= older_than_ms:
            break
        store.delete(claim_name(destination, partition, first))
        count += 1
    return count


def _offsets(folder: str, names: Iterable[str]) -> list[int]:
    firsts = []
    for name in names:
        if len(name) != _NAME_DIGITS or not (name.isascii() and name.isdigit()):
            raise _FILE.error(f"{folder}/{name}", "not the name of a claim")
        firsts.append(int(name))
    return firsts


def _checksum(body: bytes) -> bytes:
    return f"xxh3:{xxhash.xxh3_128(body).hexdigest()}".encode()
