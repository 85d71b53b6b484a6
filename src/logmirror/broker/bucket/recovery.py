"""Reads the chain of a log dir after taking it over.

The order matters, because the former owner may still seal and remove: first the fence, then the
commits, then the sealed objects. A commit that is removed meanwhile is covered by objects that are
listed afterwards (K5 in `chain`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.broker.bucket import bundles
from logmirror.broker.bucket.chain import Coverage, commit_name
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.commit_format import Kind, decode
from logmirror.broker.bucket.tails import Piece, Tail
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence
    from pathlib import Path

    from logmirror.broker.bucket.bundles import Bundle
    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.commit_format import Commit
    from logmirror.stores.base import BlobStore

READERS: Final = 16
"""Requests at a time at a start."""

_AHEAD: Final = 24
"""Commits or bundles in memory at a time."""


@dataclass(slots=True)
class DatabaseEntries:
    """What the chain holds of a database."""

    snapshot: bytes | None = None
    changes: list[bytes] = field(default_factory=list)
    """Those behind the snapshot, in order."""


@dataclass(slots=True)
class Recovered:
    """What the chain holds."""

    coverage: Coverage = field(default_factory=Coverage)
    tails: dict[Key, Tail] = field(default_factory=lambda: defaultdict(Tail))
    databases: dict[str, DatabaseEntries] = field(
        default_factory=lambda: defaultdict(DatabaseEntries)
    )
    bundles: list[Bundle] = field(default_factory=list)


def take_over(
    store: BlobStore,
    writer: bytes,
    spool: Path,
    *,
    behind: int | None = None,
    when_fenced: Callable[[ChainWriter], object] = lambda _: None,
) -> tuple[ChainWriter, Recovered]:
    """Become the owner of a log dir, and read its chain.

    Args:
        store: The log dir.
        writer: 8 random bytes.
        spool: An existing folder for copies of the commits; `Piece` points into it.
        behind: As in `ChainWriter.take_over`.
        when_fenced: Called before the chain is read, which may take long.

    Raises:
        FencedError: As in `ChainWriter.take_over`.
        CorruptionError: A commit is damaged or missing.
        UnavailableError: The store cannot be reached.
    """
    owner = ChainWriter(store, writer)
    owner.take_over(behind)
    when_fenced(owner)
    failpoints.reach("bucket.fenced")
    with owner.opening():
        return owner, _found(store, owner.commits(), spool)


def _found(store: BlobStore, sequences: Sequence[int], spool: Path) -> Recovered:
    found = Recovered(bundles=bundles.listed(store))
    wanted = set(sequences)
    parts = bundles.chosen(found.bundles, sequences)
    with ThreadPoolExecutor(READERS, "logmirror-open") as readers:
        running: deque[Future[list[Commit]]] = deque()
        for part in parts:
            running.append(readers.submit(_read_part, store, part, wanted))
            if len(running) > _AHEAD:
                _add_all(found, running.popleft().result(), spool)
        for one in running:
            _add_all(found, one.result(), spool)
    return found


def _add_all(found: Recovered, commits: Iterable[Commit], spool: Path) -> None:
    for commit in commits:
        _add(found, commit, spool)


def _read_part(store: BlobStore, part: Bundle | int, wanted: Container[int]) -> list[Commit]:
    """Return the commits of a bundle, or one commit, as far as they are wanted, in order.

    A commit that its owner removed since the listing (K5) is left out.
    """
    if isinstance(part, int):
        found = [_read(store, part)]
    else:
        numbers = [one for one in range(part.first, part.last + 1) if one in wanted]
        found = [_read(store, number, held) for number, held in _held(store, part, numbers)]
    return [commit for commit in found if commit is not None]


def _held(
    store: BlobStore, bundle: Bundle, numbers: Iterable[int]
) -> Iterable[tuple[int, bytes | None]]:
    """Return commits as a bundle has them; None for those that it has not."""
    try:
        data = bundles.decode(store.read(bundle.name))
    except (KeyError, CorruptionError):  # deleted since the listing, or damaged: only a copy
        data = {}
    return [(number, data.get(number)) for number in numbers]


def _read(store: BlobStore, sequence: int, held: bytes | None = None) -> Commit | None:
    """Return a commit, from a bundle or by itself; None: it was removed meanwhile."""
    if held is not None:
        with contextlib.suppress(CorruptionError):
            commit = decode(held)
            if commit.sequence == sequence:
                return commit
    try:
        commit = decode(store.read(commit_name(sequence)))
    except KeyError:
        return None
    except CorruptionError as error:
        raise error.add_facts(name=commit_name(sequence)) from error
    if commit.sequence != sequence:
        raise CorruptionError("commit object has another number", name=commit_name(sequence))
    return commit


def _add(found: Recovered, commit: Commit, spool: Path) -> None:
    entries = [e for e in commit.entries if e.kind not in {Kind.FENCE, Kind.MERGED}]
    now_ms = SYSTEM_CLOCK.monotonic_ms()
    found.coverage.add(commit.sequence, entries, now_ms, is_fence=commit.is_fence)
    bodies = [entry.body for entry in entries if entry.kind == Kind.DATA]
    file, position = spool / str(commit.sequence), 0
    if bodies:
        file.write_bytes(b"".join(bodies))
    for entry in entries:
        if entry.kind == Kind.DATA:
            size = len(entry.body)
            piece = Piece(entry.first, entry.next, file, position, size)
            found.tails[entry.id, entry.partition].pieces.append(piece)
            position += size
        elif entry.kind == Kind.CUT:
            found.tails[entry.id, entry.partition].cuts[entry.first] = entry.next
        elif entry.kind == Kind.SNAPSHOT:
            found.databases[entry.name] = DatabaseEntries(entry.body)
        else:
            found.databases[entry.name].changes.append(entry.body)
