"""The store as one of several owners reaches it: what kind each call is, and which ones fail.

    kind                          is
    `fence create`                a commit object with a fence
    `commit create`               one with records
    `cut create`                  one with the cut of a segment
    `row create`                  one with a change of the broker's database
    `snapshot create`             one with the whole database
    `merge create`                one that says that a merged object exists
    `segment upload`              an object whose cut is in the chain
    `merged upload`               one of several segments
    `compacted upload`            one with a version in its name
    `index upload`                the index of an object
    `bundle create`, `producers create`
    `segment delete`              an object before the log start
    `merged source delete`        one of which a merged or compacted object was made
    `commit delete`, `bundle delete`, `producers delete`, `index delete`
    `... listing`, `... read`     of commits, bundles, producers, indexes, objects

Names and contents decide, read with the product's own readers of both.
"""

from __future__ import annotations

import io
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.archive.naming import split_name
from logmirror.broker.bucket.bundles import BUNDLES
from logmirror.broker.bucket.chain import COMMITS, PRODUCERS
from logmirror.broker.bucket.commit_format import Kind, decode
from logmirror.broker.bucket.parts import INDEXES
from logmirror.errors import OutcomeUnknownError, UnavailableError
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.broker.bucket.commit_format import Commit
    from logmirror.testing.memory_store import MemoryStore

REFUSED: Final = "refused"
"""The request fails, and nothing is stored or deleted."""

LOST: Final = "lost"
"""It is done, and its response is lost."""

SHORT: Final = "short"
"""A read returns half of the bytes."""

EXISTS: Final = "exists"
"""Not drawn, but observed: another owner has created the object before."""

WRITES: Final = frozenset({"create", "publish", "delete"})
_READS: Final = frozenset({"read", "open", "read_range"})
_UNSENT: Final = frozenset({"stage", "discard"})
_PLACES: Final = ((COMMITS, "commit"), (BUNDLES, "bundle"), (PRODUCERS, "producers"))
_KINDS: Final = (
    (Kind.FENCE, "fence create"),
    (Kind.MERGED, "merge create"),
    (Kind.SNAPSHOT, "snapshot create"),
    (Kind.CHANGE, "row create"),
    (Kind.CUT, "cut create"),
    (Kind.DATA, "commit create"),
)


class Crashed(BaseException):
    """The process of an owner ended."""


class Happened(NamedTuple):
    """A call that an owner made, and what happened to it."""

    owner: int
    number: int
    kind: str
    what: str
    """Empty, `crashed before`, `crashed after`, or a kind of fault."""


class Stored:
    """What a bucket holds, as all requests to it have shown.

    Attributes:
        ends: By partition, the end of the records in commit objects.
        cuts: Partitions and bounds of segments.
        fences: The owners that have created fences, in the order of the chain.
    """

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.cuts: set[tuple[int, int, int]] = set()
        self.fences: list[int] = []

    def copy(self) -> Stored:
        """Return a copy, without the owners."""
        found = Stored()
        found.ends, found.cuts = dict(self.ends), set(self.cuts)
        return found

    def add(self, commit: Commit, owner: int) -> None:
        """Note a commit object that was created."""
        for entry in commit.entries:
            if entry.kind == Kind.FENCE:
                self.fences.append(owner)
            elif entry.kind == Kind.DATA:
                self.ends[entry.partition] = max(self.ends.get(entry.partition, 0), entry.next)
            elif entry.kind == Kind.CUT:
                self.cuts.add((entry.partition, entry.first, entry.next))


def kind_of(operation: str, name: str, data: bytes, store: MemoryStore, stored: Stored) -> str:
    """Return the kind of a call."""
    if operation == "create" and name.startswith(f"{COMMITS}/"):
        kinds = {entry.kind for entry in decode(data).entries}
        return next(text for kind, text in _KINDS if kind in kinds)
    if name.startswith(INDEXES):
        return "index upload" if operation == "create" else f"index {_verb(operation)}"
    for place, text in _PLACES:
        if name.startswith(place):
            return f"{text} {_verb(operation)}"
    if operation == "publish":
        return _kind_of_upload(name, stored)
    if operation == "delete":
        return "merged source delete" if _is_covered(name, store) else "segment delete"
    return f"object {_verb(operation)}"


def _verb(operation: str) -> str:
    if operation in WRITES:
        return operation
    return "read" if operation in _READS else "listing"


def _kind_of_upload(name: str, stored: Stored) -> str:
    folder, _, file = name.rpartition("/")
    first, last, extension = split_name(file) or (0, 0, "")
    if "." in extension:
        return "compacted upload"
    is_cut = (int(folder.rpartition("/")[2]), first, last + 1) in stored.cuts
    return "segment upload" if is_cut else "merged upload"


def _is_covered(name: str, store: MemoryStore) -> bool:
    """Whether another object has all offsets of an object."""
    folder, _, file = name.rpartition("/")
    first, last, _ = split_name(file) or (0, 0, "")
    for other in list(store.objects):
        parts = split_name(other.removeprefix(f"{folder}/")) if other != name else None
        if parts is not None and parts[0] <= first and last <= parts[1]:
            return True
    return False


class Calls:
    """The store, as one owner reaches it.

    Args:
        store: The bucket.
        stored: Notes each commit object.
        owner: The owner's number.
        before: Called before each request with its kind; lets others run, and may raise `Crashed`.
            Returns a kind of fault or nothing.
        after: Called when the request is done, before its response arrives.
        is_own: Whether the thread is the owner's; calls of others, which are readers, do not fail.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # what a request passes
        self,
        store: MemoryStore,
        stored: Stored,
        owner: int,
        before: Callable[[str], str],
        after: Callable[[str, str], None],
        is_own: Callable[[], bool],
    ) -> None:
        self._store, self._stored, self._owner = store, stored, owner
        self._before, self._after, self._is_own = before, after, is_own

    def __getattr__(self, operation: str) -> Any:
        real = getattr(self._store, operation)
        if operation in _UNSENT:
            return real
        return lambda *args, **more: self._call(operation, partial(real, *args, **more), args)

    def _call(self, operation: str, real: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if not self._is_own():
            return real()
        name = args[1] if operation == "publish" else args[0]
        data = args[1] if operation == "create" else b""
        kind = kind_of(operation, name, data, self._store, self._stored)
        fault = self._before(kind)
        if fault == REFUSED:
            raise UnavailableError("not sent", kind=kind)
        try:
            found = real()
        except AlreadyExistsError:
            self._after(kind, EXISTS)
            raise
        if operation == "create" and name.startswith(f"{COMMITS}/"):
            self._stored.add(decode(data), self._owner)
        if operation in {"names", "below"}:
            found = iter(list(found))
        self._after(kind, "")
        if fault == LOST:
            raise (OutcomeUnknownError if operation in WRITES else UnavailableError)("lost")
        return _shortened(found) if fault == SHORT else found


def _shortened(found: Any) -> Any:
    data = found.read() if isinstance(found, io.BytesIO) else found
    half = data[: len(data) // 2]
    return io.BytesIO(half) if isinstance(found, io.BytesIO) else half
