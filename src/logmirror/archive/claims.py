"""Claims: who wrote which range next, decided once for every position.

    .logmirror/claims/<destination>/<partition>/<first, 20 digits>

1. A claim is created before its object is published, and creating never replaces, so for every
   position there is at most one range that can follow (I2): by whatever attempt, process or
   machine, also one that wakes up after a pause.
2. A claim whose object is missing is a promise that the next writer keeps: it writes exactly that
   range. A claim never outranks an object: the listing of objects alone is the position.
3. Claims are kept longer than a process can sleep, and the newest one of a partition always.
   Native and NDJSON objects cannot say of themselves what digest they must have and why offsets
   are missing, so their claims are kept as long as they are.

The content is one JSON object in UTF-8, described in `docs/formats/claim.md`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import xxhash

from logmirror import failpoints
from logmirror.archive.naming import format_name
from logmirror.errors import CorruptionError, PositionError, UnavailableError, UsageError
from logmirror.model import OFFSET_MAX, Gap, GapCause, OffsetRange, Trigger
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.stores.base import BlobStore

VERSION: Final = 1
"""Of the claim's content. A reader refuses a higher one."""

KEEP_MS: Final = 7 * 24 * 3600 * 1000
"""How long claims are kept: longer than any process that could still publish can sleep."""

_NAME_DIGITS: Final = 20
_CHECK: Final = b',"check":"'
_HINT_STUCK: Final = (
    "if no other logmirror writes to this destination, compare the claim with the source, "
    "then remove the claim file and start again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the writer of a claim promises to publish."""

    covered: OffsetRange
    """The object's range; its first offset is also the claim's name."""

    digest: str
    """Of the content, not of the file: `xxh3:` and 32 hexadecimal digits."""

    writer: str
    """The writer id of the run that made the claim."""

    topic: str
    topic_id: str
    """32 hexadecimal digits; empty where the source has no topic ids."""

    partition: int
    created_ms: int
    """By the writer's clock."""

    record_count: int
    trigger: Trigger
    leader_epoch: int | None = None
    """Of the range's last batch at the source, where it is known."""

    gaps: tuple[Gap, ...] = ()
    """Offsets without records; the first of them, where there are very many."""

    rewritable: bool = False
    """The source compacts its log: who reads the range later may find fewer records in it. The
    range binds, the digest does not."""

    gap_counts: Mapping[GapCause, int] = field(default_factory=dict)
    """How many offsets carry no record, by cause; complete, also where `gaps` is not."""

    def all_gaps(self) -> Mapping[GapCause, int]:
        """Return `gap_counts`, or what follows from a claim that has none.

        It lists all holes but what was compacted away inside batches.
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
        if self.gaps:
            content["holes"] = [[h.first, h.last, h.cause.value] for h in self.gaps]
        if counts := {cause.value: count for cause, count in self.gap_counts.items() if count}:
            content["hole_counts"] = counts
        if self.rewritable:
            content["rewritable"] = True
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
        return text[:-1] + _CHECK + _checksum(text[:-1]) + b'"}\n'

    @classmethod
    def from_bytes(cls, data: bytes, *, name: str) -> Claim:
        """Read a claim file.

        Args:
            data: Its content.
            name: Its name in the store, which the content must agree with.

        Raises:
            CorruptionError: It is not a claim, or not the one that belongs under this name.
            UsageError: A newer version of the program wrote it.
        """
        content = _load(data, name)
        body, _, _ = data.rpartition(_CHECK)
        if "check" in content and str(content["check"]).encode() != _checksum(body):
            raise _unreadable(name, "it does not match its own checksum")
        version = content.get("version")
        if type(version) is int and version > VERSION:
            raise UsageError(
                "a newer version of logmirror wrote this claim",
                hint="upgrade logmirror here; two versions may share a destination only upwards",
                name=name,
                expected=VERSION,
                found=version,
            )
        try:
            claim = cls._from_content(content)
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(name, repr(error)) from error
        if not name.endswith(f"/{claim.partition}/{claim.covered.first:0{_NAME_DIGITS}d}"):
            raise _unreadable(name, "it belongs under another name")
        return claim

    @classmethod
    def _from_content(cls, content: Mapping[str, Any]) -> Claim:
        if content["version"] != VERSION:
            raise ValueError(content["version"])
        epoch = content.get("leader_epoch")
        return cls(
            covered=OffsetRange(first=_int(content["from"]), last=_int(content["to"])),
            digest=_text(content["digest"]),
            writer=_text(content["writer"]),
            topic=_text(content["topic"]),
            topic_id=_text(content["topic_id"]),
            partition=_int(content["partition"]),
            created_ms=_int(content["created_ms"]),
            record_count=_int(content["record_count"]),
            trigger=Trigger(content["trigger"]),
            leader_epoch=None if epoch is None else _int(epoch),
            gaps=tuple(
                Gap(first=_int(first), last=_int(last), cause=GapCause(cause))
                for first, last, cause in content.get("holes", ())
            ),
            rewritable=content.get("rewritable", False) is True,
            gap_counts={
                GapCause(cause): _int(count)
                for cause, count in content.get("hole_counts", {}).items()
            },
        )


class ClaimTakenError(PositionError):
    """Another writer claimed another range for this position: cut that range instead.

    Facts: `name` of the claim, `last` that was wanted, `claimed_last`, `claimed_by`, and `claim`,
    the winning claim's content as text.
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

    peer: bool
    """The claim or the object was there before us, with the same content."""

    claimed_by: str = ""
    """The writer id in a claim that was there before us."""


def claims_folder(destination: str, partition: int) -> str:
    """Return the folder of a partition's claims."""
    return f".logmirror/claims/{destination}/{partition}"


def claim_name(destination: str, partition: int, first: int) -> str:
    """Return the name of the claim for the object that begins at `first`."""
    return f"{claims_folder(destination, partition)}/{first:0{_NAME_DIGITS}d}"


def publish_object(
    store: BlobStore, *, token: str, folder: str, extension: str, claim: Claim
) -> Published:
    """Claim the range, then make the staged object visible; each step create-only.

    Whatever the outcome, calling it again with the same range and content is harmless. The staged
    object is gone after a success; after an error it is the caller's to discard.

    Args:
        store: The destination's store.
        token: Of a staged object that `finish` has made durable.
        folder: Of the chain: `<destination>/<partition>`.
        extension: Of the chain's format.
        claim: What the object holds.

    Raises:
        ClaimTakenError: The position is claimed with another end; stage that range instead.
        PositionError: The range is claimed or published with other content. Facts: `name`,
            `expected` and `found` digests.
        CorruptionError: What lies under the claim's or the object's name cannot be read.
        UnavailableError: The store cannot be reached, or the staged object was swept away.
        OutcomeUnknownError: The object may be published; list, then decide.
    """
    winner = _claim(store, f".logmirror/claims/{folder}", claim)
    claimed_by = winner.writer if winner else ""
    failpoints.reach("claim.created")
    name = f"{folder}/{format_name(claim.covered, extension)}"
    try:
        store.publish(token, name)
    except AlreadyExistsError:
        # Only here, because it loads the readers of every format.
        from logmirror.archive.digest import object_digest  # noqa: PLC0415  # see above

        try:
            found = object_digest(store, name, expected=claim.digest)
        except KeyError:
            raise UnavailableError(
                "the object was replaced by a merged one just now; plan again", name=name
            ) from None
        if found != claim.digest and not claim.rewritable:
            raise PositionError(
                "the name is taken by an object with other content",
                hint="run `logmirror verify --deep --against-source`; delete nothing before",
                name=name,
                expected=claim.digest,
                found=found,
            ) from None
        store.discard(token)
        return Published(name=name, peer=True, claimed_by=claimed_by)
    return Published(name=name, peer=winner is not None, claimed_by=claimed_by)


def _claim(store: BlobStore, folder: str, claim: Claim) -> Claim | None:
    """Create the claim or find it made; returns the one that was there already."""
    name = f"{folder}/{claim.covered.first:0{_NAME_DIGITS}d}"
    try:
        store.create(name, claim.to_bytes())
    except AlreadyExistsError:
        try:
            data = store.read(name)
        except KeyError:
            raise UnavailableError(
                "the claim was removed just now; plan again", name=name
            ) from None
    else:
        return None
    winner = Claim.from_bytes(data, name=name)
    if winner.covered != claim.covered:
        raise ClaimTakenError(
            "another writer claimed another range for this position",
            hint="write exactly the claimed range",
            name=name,
            last=claim.covered.last,
            claimed_last=winner.covered.last,
            claimed_by=winner.writer,
            claim=data.decode(),
        )
    if winner.digest != claim.digest and winner.rewritable:
        # Said before the object appears, so that it has a witness of its own.
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
        CorruptionError: What lies there is no claim.
    """
    name = claim_name(destination, partition, first)
    try:
        data = store.read(name)
    except KeyError:
        return None
    return Claim.from_bytes(data, name=name)


def read_rewrites(store: BlobStore, destination: str, partition: int, first: int) -> list[Claim]:
    """Return what writers said who finished the rewritable claim at `first` with other content."""
    name = claim_name(destination, partition, first)
    folder = _rewrites(claims_folder(destination, partition))
    digits = name.rpartition("/")[2]
    found = []
    for rewrite in store.names(folder):
        if rewrite.startswith(f"{digits}-"):
            with contextlib.suppress(KeyError):
                found.append(Claim.from_bytes(store.read(f"{folder}/{rewrite}"), name=name))
    return found


def promised_digests(store: BlobStore, destination: str, claim: Claim) -> frozenset[str]:
    """What an object of a claimed range may hold: what was claimed, or what its finishers said."""
    if not claim.rewritable:
        return frozenset({claim.digest})
    said = read_rewrites(store, destination, claim.partition, claim.covered.first)
    return frozenset({claim.digest, *(rewrite.digest for rewrite in said)})


def _rewrites(folder: str) -> str:
    return folder.replace(".logmirror/claims/", ".logmirror/rewrites/", 1)


def _rewrite_name(claim: Claim) -> str:
    return f"{claim.covered.first:0{_NAME_DIGITS}d}-{claim.digest.rpartition(':')[2]}"


def latest_claim(store: BlobStore, destination: str, partition: int) -> Claim | None:
    """Return the claim with the highest first offset, or None if there is none.

    Raises:
        CorruptionError: What lies in the folder is no claim.
    """
    folder = claims_folder(destination, partition)
    firsts = _offsets(folder, store.tail(folder).names)
    return read_claim(store, destination, partition, firsts[-1]) if firsts else None


def first_claimed(store: BlobStore, destination: str, partition: int) -> int:
    """Return where the first claim begins; beyond every offset if there is none.

    What lies below it and has no claim was there before us: claims of NDJSON are never removed.
    """
    folder = claims_folder(destination, partition)
    name = next(iter(store.names(folder)), None)
    return OFFSET_MAX + 1 if name is None else _offsets(folder, [name])[0]


def sweep_claims(  # noqa: PLR0913  # three say where, three say what may go
    store: BlobStore,
    destination: str,
    partition: int,
    *,
    position: int,
    now_ms: int,
    older_than_ms: int = KEEP_MS,
) -> int:
    """Delete claims that have served and that nobody can meet any more; returns how many.

    A claim has served when its range ends before `position`, the verified one. The newest claim
    stays whatever its age: it ties the chain to its topic. Claims are looked at in order and the
    first young one ends the search, so a call costs little more than what it deletes.
    """
    count = 0
    folder = claims_folder(destination, partition)
    for first in _offsets(folder, store.names(folder))[:-1]:
        claim = read_claim(store, destination, partition, first)
        if claim is None:
            continue  # another sweeper was faster
        if claim.covered.last >= position or now_ms - claim.created_ms <= older_than_ms:
            break
        store.delete(claim_name(destination, partition, first))
        count += 1
    return count


def _offsets(folder: str, names: Iterable[str]) -> list[int]:
    firsts = []
    for name in names:
        if len(name) != _NAME_DIGITS or not (name.isascii() and name.isdigit()):
            raise _unreadable(f"{folder}/{name}", "not the name of a claim")
        firsts.append(int(name))
    return firsts


def _checksum(text: bytes) -> bytes:
    return f"xxh3:{xxhash.xxh3_128(text).hexdigest()}".encode()


def _load(data: bytes, name: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, str(error)) from error
    if not isinstance(content, dict):
        raise _unreadable(name, "not a JSON object")
    return content


def _unreadable(name: str, reason: str) -> CorruptionError:
    return CorruptionError("unreadable claim", hint=_HINT_STUCK, name=name, reason=reason)


def _int(value: object) -> int:
    if type(value) is not int:  # bool is an int too
        raise TypeError(value)
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value
