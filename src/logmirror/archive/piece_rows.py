"""Read a piece of an archive: checked rows, in order, optionally of committed transactions only.

A compaction may replace objects of a piece by a merged one while they are read. The reader then
continues in the merged object at its current offset, so the rows of a piece never change.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from logmirror.archive.checked_rows import ObjectRows, within
from logmirror.archive.compactions import objects_from, read_cover
from logmirror.archive.naming import NATIVE
from logmirror.archive.transactions import Outcomes, has_transactions
from logmirror.errors import UnavailableError
from logmirror.model import OFFSET_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.archive.chain import ArchiveObject
    from logmirror.archive.pieces import Piece
    from logmirror.stores.base import BlobStore
    from logmirror.wire.scan import Batches

_LISTINGS_MAX: Final = 5
"""Listings before giving up. Each further one takes a whole compaction between a listing and the
read of its objects."""


class PieceRows:
    """Reads one piece.

    Args:
        store: The destination's store.
        piece: The objects and the range of rows.
        utf8: NDJSON keys and values are text.
        verify: Compare each object with the digest from footer and claim.
        committed: Leave out records of native objects whose transaction was aborted or has no end
            in the archive and its claims. Other formats hold committed records only.
    """

    def __init__(
        self, store: BlobStore, piece: Piece, *, utf8: bool, verify: bool, committed: bool
    ) -> None:
        self._store, self._piece = store, piece
        self._filters = committed and piece.extension == NATIVE
        self._outcomes: Outcomes | None = None
        self._reader = ObjectRows(
            store,
            piece.folder,
            topic=piece.topic,
            utf8=utf8,
            verify=verify,
            snapshots=piece.is_snapshot,
        )

    def read(self) -> Iterator[Any]:
        """Yield the rows as Arrow record batches of `wire.columns.SCHEMA`, none of them empty.

        Raises:
            CorruptionError: An object is damaged or missing. Rows of the same object that were
                yielded before are not valid either.
            UnavailableError: An object could not be read, or a snapshot was pruned after planning.
        """
        if self._piece.is_snapshot:
            yield from self._snapshot()
            return
        piece, reached = self._piece, self._piece.first
        waiting = deque(piece.objects)
        while waiting and reached < piece.end:
            obj = waiting.popleft()
            try:
                for batch in self._reader.read(obj.name, self._classify if self._filters else None):
                    rows = within(batch, reached, piece.end)
                    if len(rows):
                        yield rows
                        reached = rows.column("offset")[-1].as_py() + 1
            except KeyError:
                waiting = deque(objects_from(self._store, piece.folder, obj, piece.extension))
                continue
            reached = max(reached, obj.last + 1)

    def _snapshot(self) -> Iterator[Any]:
        (obj,) = self._piece.objects
        try:
            yield from self._reader.read(obj.name)
        except KeyError:
            raise UnavailableError(
                "the snapshot was pruned after the query was planned",
                hint="run the query again: it reads the newest snapshot. `snapshots: keep N` with "
                "a larger N gives queries more time",
                name=obj.name,
                folder=self._piece.folder,
            ) from None

    def _classify(self, batches: Batches) -> None:
        if self._outcomes is None and has_transactions(batches):
            self._outcomes = self._read_outcomes(int(batches.base_offsets[0]))
        if self._outcomes is not None:
            self._outcomes.mark(batches)

    def _read_outcomes(self, first: int) -> Outcomes:
        """Read ahead from the object that holds offset `first`, until all outcomes are known."""
        piece = self._piece
        for _ in range(_LISTINGS_MAX):
            objects = read_cover(self._store, piece.folder, extension=NATIVE, start=None).objects
            try:
                return outcomes(
                    self._reader,
                    (obj for obj in objects if obj.last >= first),
                    end=piece.end,
                    chain_end=piece.chain_end,
                )
            except KeyError:
                continue
        raise UnavailableError(
            "the archive changes faster than it can be read",
            hint="run the query again when `logmirror compact` is done",
            folder=piece.folder,
        )


def outcomes(
    reader: ObjectRows, objects: Iterable[ArchiveObject], *, end: int, chain_end: int
) -> Outcomes:
    """Return the outcomes of transactions that begin below `end`, as far as the chain holds them.

    Args:
        reader: Reads the objects.
        objects: Native objects, ascending; read until all outcomes are known.
        end: Transactions that begin at this offset or above are ignored.
        chain_end: Markers at this offset or above are ignored.

    Raises:
        KeyError: An object was deleted.
    """
    found = Outcomes(chain_end)
    for obj in objects:
        if obj.first >= end and all(first >= end for first in found.open.values()):
            break
        found.begin(reader.decided(obj.name))
        for data, batches in reader.batches_of(obj.name):
            found.add(data, batches)
        found.end()
    return found


class LastStableOffset:
    """The last stable offset of a native chain: below it, every transaction has ended.

    Args:
        store: The destination's store.
        folder: The chain's folder.
        first: An offset at which no transaction is open: the start of the chain, or an earlier
            result.
    """

    def __init__(self, store: BlobStore, folder: str, first: int) -> None:
        self._reader = ObjectRows(store, folder, topic="", utf8=False, verify=False)
        self._outcomes = Outcomes(OFFSET_MAX)
        self._reached = first

    def advance(self, objects: Iterable[ArchiveObject]) -> int:
        """Read the new objects, and return the last stable offset."""
        for obj in objects:
            if obj.last < self._reached:
                continue
            try:
                self._outcomes.begin(self._reader.decided(obj.name))
                for data, batches in self._reader.batches_of(obj.name):
                    self._outcomes.add(data, batches)
                    self._outcomes.forget()
                self._outcomes.end()
            except KeyError:
                break  # merged after it was listed; the next listing shows the merged object
            self._reached = obj.last + 1
        return min([self._reached, *self._outcomes.open.values()])
