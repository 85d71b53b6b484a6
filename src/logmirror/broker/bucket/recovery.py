"""Reads the chain of a log dir after taking it over.

The order matters, because the former owner may still seal and remove: first the fence, then the
commits, then the sealed objects. A commit that is removed meanwhile is covered by objects that are
listed afterwards (K5 in `chain`).
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.broker.bucket.chain import Coverage, commit_name
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.commit_format import Kind, decode
from logmirror.broker.bucket.tails import Piece, Tail
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.commit_format import Commit
    from logmirror.stores.base import BlobStore

READERS: Final = 16
"""Requests at a time at a start."""

_AHEAD: Final = 64
"""Commits in memory at a time."""


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
    sequences = owner.commits()
    found = Recovered()
    with ThreadPoolExecutor(READERS, "logmirror-open") as readers:
        for start in range(0, len(sequences), _AHEAD):
            some = sequences[start : start + _AHEAD]
            for commit in readers.map(lambda n: _read(store, n), some):
                if commit is not None:  # else its owner removed it since the listing (K5)
                    _add(found, commit, spool)
    return owner, found


def _read(store: BlobStore, sequence: int) -> Commit | None:
    """Return a commit; None: it was removed meanwhile."""
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
    entries = [entry for entry in commit.entries if entry.kind != Kind.FENCE]
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
