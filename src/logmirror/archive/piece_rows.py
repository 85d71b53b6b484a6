"""Read a piece of an archive: rows in order, checked, of committed transactions only if asked.

Objects of a piece may be replaced by a merged one while they are read. Then the merged one is read
from where we stand, so a piece shows the same rows whatever happens to its objects.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from logmirror.archive.checked_rows import ObjectRows, within
from logmirror.archive.compactions import links_from, read_cover
from logmirror.archive.naming import NATIVE
from logmirror.archive.transactions import Outcomes, has_transactions
from logmirror.errors import UnavailableError
from logmirror.model import OFFSET_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.archive.chain import Link
    from logmirror.archive.pieces import Piece
    from logmirror.stores.base import BlobStore
    from logmirror.wire.scan import Batches

_LOOKS: Final = 5
"""Each needs a whole compaction between a listing and the reading of what it names."""


class PieceRows:
    """Reads one piece.

    Args:
        store: Where it lies.
        piece: Which objects, which rows.
        utf8: NDJSON keys and values are text.
        verify: Compare each object with what footer and claim promise.
        committed: Of native objects, leave out the records of transactions that were aborted, or
            whose end is not in the archive. Objects of other formats hold none.
    """

    def __init__(
        self, store: BlobStore, piece: Piece, *, utf8: bool, verify: bool, committed: bool
    ) -> None:
        self._store, self._piece = store, piece
        self._settles = committed and piece.extension == NATIVE
        self._outcomes: Outcomes | None = None
        self._objects = ObjectRows(
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
            CorruptionError: An object is not what it should be, or is gone. Rows that came before
                from the same object are then not to be believed either.
            UnavailableError: It could not be read, or a snapshot was pruned since it was planned.
        """
        if self._piece.is_snapshot:
            yield from self._snapshot()
            return
        piece, reached = self._piece, self._piece.first
        waiting = deque(piece.links)
        while waiting and reached < piece.end:
            link = waiting.popleft()
            try:
                for batch in self._objects.read(link.name, self._settle if self._settles else None):
                    rows = within(batch, reached, piece.end)
                    if len(rows):
                        yield rows
                        reached = rows.column("offset")[-1].as_py() + 1
            except KeyError:
                waiting = deque(links_from(self._store, piece.folder, link, piece.extension))
                continue
            reached = max(reached, link.last + 1)

    def _snapshot(self) -> Iterator[Any]:
        (link,) = self._piece.links
        try:
            yield from self._objects.read(link.name)
        except KeyError:
            raise UnavailableError(
                "the snapshot was pruned since the query was planned",
                hint="run the query again: it takes the newest one. `snapshots: keep N` with a "
                "larger N leaves a query more time",
                name=link.name,
                folder=self._piece.folder,
            ) from None

    def _settle(self, batches: Batches) -> None:
        if self._outcomes is None and has_transactions(batches):
            self._outcomes = self._read_outcomes(int(batches.base_offsets[0]))
        if self._outcomes is not None:
            self._outcomes.mark(batches)

    def _read_outcomes(self, first: int) -> Outcomes:
        """Read ahead, from the object that holds offset `first`, as far as it takes."""
        piece = self._piece
        for _ in range(_LOOKS):
            links = read_cover(self._store, piece.folder, extension=NATIVE, start=None).links
            try:
                return outcomes(
                    self._objects,
                    (link for link in links if link.last >= first),
                    end=piece.end,
                    chain_end=piece.chain_end,
                )
            except KeyError:
                continue
        raise UnavailableError(
            "the archive changes faster than it can be read",
            hint="wait until `logmirror compact` is done",
            folder=piece.folder,
        )


def outcomes(objects: ObjectRows, links: Iterable[Link], *, end: int, chain_end: int) -> Outcomes:
    """How the transactions end that begin below `end`, as far as the chain tells.

    Args:
        objects: Reads them.
        links: Native objects, ascending; read until all is known.
        end: Transactions that begin here or behind do not matter.
        chain_end: Markers here or behind are not believed.

    Raises:
        KeyError: An object is gone.
    """
    found = Outcomes(chain_end)
    for link in links:
        if link.first >= end and all(first >= end for first in found.open.values()):
            break
        for data, batches in objects.batches_of(link.name):
            found.add(data, batches)
    return found


class StableEnd:
    """How far a native chain can be read without a record whose transaction is still open.

    Args:
        store: Where it lies.
        folder: Of the chain.
        first: Where no transaction is open: the chain's start, or an earlier answer.
    """

    def __init__(self, store: BlobStore, folder: str, first: int) -> None:
        self._objects = ObjectRows(store, folder, topic="", utf8=False, verify=False)
        self._outcomes = Outcomes(OFFSET_MAX)
        self._reached = first

    def advance(self, links: Iterable[Link]) -> int:
        """Read the objects that are new, and return the offset before which all is decided."""
        for link in links:
            if link.last < self._reached:
                continue
            try:
                for data, batches in self._objects.batches_of(link.name):
                    self._outcomes.add(data, batches)
                    self._outcomes.forget()
            except KeyError:
                break  # merged since it was listed: the next listing has it
            self._reached = link.last + 1
        return min([self._reached, *self._outcomes.open.values()])
