"""The snapshots of consumer groups of one mirror at one archive, in its store.

Readers order snapshots by number. Times are of the writers' clocks, and may go back.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror import failpoints
from logmirror.archive.group_offsets import (
    FIRST,
    decode,
    encode,
    sequence_of,
    snapshot_name,
    snapshots_folder,
    to_delete,
)
from logmirror.errors import CorruptionError, LogmirrorError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logmirror.archive.group_offsets import Header, Snapshot
    from logmirror.stores.base import BlobStore

DELETED_MAX: Final = 1_000
"""The most snapshots that are deleted after one was written."""

LOOKED_BACK: Final = 100
"""How many earlier snapshots are read to name an intact one."""


class Findings(NamedTuple):
    """What `check` found."""

    intact: int
    """Snapshots that are whole."""
    problems: list[LogmirrorError]
    newest: Snapshot | None
    """The intact one with the highest number."""


def timestamp(time_ms: int) -> str:
    """Return a time as RFC 3339 has it, in UTC, with milliseconds."""
    found = datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=time_ms)
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Snapshots:
    """The snapshots of a mirror at an archive.

    Args:
        store: The archive's store.
        destination: The archive's name.
        mirror: The mirror's name.
    """

    def __init__(self, store: BlobStore, destination: str, mirror: str) -> None:
        self._store, self._destination, self._mirror = store, destination, mirror
        self.folder: Final = snapshots_folder(destination, mirror)

    def newest(self) -> int | None:
        """Return the number of the newest snapshot; None if there is none."""
        found = _sequences(self._store.tail(self.folder).names)
        return found[-1] if found else None

    def read(self, sequence: int) -> Snapshot:
        """Read a snapshot.

        Raises:
            KeyError: There is none with this number.
            CorruptionError: It is damaged.
        """
        name = snapshot_name(self.folder, sequence)
        return decode(self._store.read(name), name=name)

    def create(self, header: Header, groups: Iterable[bytes]) -> None:
        """Write a snapshot, with the number in its header.

        Raises:
            AlreadyExistsError: Another process has written one with this number.
            UsageError: It would be too large.
            OutcomeUnknownError: It may be written; read the newest number, then decide.
        """
        data = encode(header, groups)
        failpoints.reach("snapshot.ready")
        self._store.create(snapshot_name(self.folder, header.sequence), data)
        failpoints.reach("snapshot.created")

    def prune(self, keep: int) -> int:
        """Delete what `group_offsets.to_delete` says, the oldest first; returns how many.

        A process that dies in between leaves more than are kept, never less.
        """
        numbers = to_delete(_sequences(self._store.names(self.folder)), keep)[:DELETED_MAX]
        for sequence in numbers:
            self._store.delete(snapshot_name(self.folder, sequence))
            failpoints.reach("snapshot.pruned")
        return len(numbers)

    def find(self, at_ms: int | None = None) -> Snapshot:
        """Return the newest snapshot, or the newest one at or before a time.

        Args:
            at_ms: The time, ms since 1970. None: the newest.

        Raises:
            UsageError: There is none, or none that early.
            CorruptionError: It is damaged, or a damaged one may be it. Facts: `name`, and the
                newest `intact` one before it.
        """
        damaged: CorruptionError | None = None
        oldest: Snapshot | None = None
        for sequence in reversed(_sequences(self._store.names(self.folder))):
            try:
                found = self.read(sequence)
            except KeyError:
                continue  # pruned meanwhile
            except CorruptionError as error:
                damaged = damaged or error
                if at_ms is None:
                    break
                continue
            oldest = found
            if at_ms is not None and found.header.time_ms > at_ms:
                damaged = None
            elif damaged is None or found.header.time_ms == at_ms:
                return found
            else:
                break
        if damaged is not None:
            raise self._with_intact(damaged)
        raise self._missing(at_ms, oldest)

    def check(self, *, deep: bool) -> Findings:
        """Read the snapshots, all or the newest page of a listing.

        Args:
            deep: All.
        """
        folder, store = self.folder, self._store
        names = list(store.names(folder)) if deep else store.tail(folder).names
        problems: list[LogmirrorError] = [
            CorruptionError("not the name of a snapshot of group offsets", name=f"{folder}/{name}")
            for name in names
            if sequence_of(name) is None
        ]
        intact, newest = 0, None
        for sequence in _sequences(names):
            try:
                newest = self.read(sequence)
            except KeyError:
                continue  # pruned meanwhile
            except LogmirrorError as error:
                problems.append(error)
            else:
                intact += 1
        return Findings(intact, problems, newest)

    def _with_intact(self, damaged: CorruptionError) -> CorruptionError:
        """Name the newest intact snapshot before a damaged one."""
        below = sequence_of(str(damaged.facts["name"]).rpartition("/")[2])
        found = self._intact_below(below or 0)
        if found is None:
            return damaged.copy(intact="none")
        time = timestamp(found.header.time_ms)
        return CorruptionError(
            damaged.message,
            hint=f"the intact one before it is used with `--at {time}`",
            **damaged.facts,
            intact=snapshot_name(self.folder, found.header.sequence),
            intact_time=time,
        )

    def _intact_below(self, sequence: int) -> Snapshot | None:
        numbers = [one for one in _sequences(self._store.names(self.folder)) if one < sequence]
        return next(self._intact(reversed(numbers[-LOOKED_BACK:])), None)

    def _intact(self, sequences: Iterable[int]) -> Iterator[Snapshot]:
        for sequence in sequences:
            try:
                yield self.read(sequence)
            except (KeyError, CorruptionError):
                continue

    def _missing(self, at_ms: int | None, oldest: Snapshot | None) -> UsageError:
        facts = {"mirror": self._mirror, "destination": self._destination}
        if at_ms is None or oldest is None:
            return UsageError(
                "the archive has no snapshot of group offsets",
                hint="`groups` in the mirror writes them; see `logmirror run --only groups`",
                **facts,
            )
        return UsageError(
            "the archive has no snapshot of group offsets at or before this time",
            **facts,
            at=timestamp(at_ms),
            oldest=timestamp(oldest.header.time_ms),
        )


def next_sequence(newest: int | None) -> int:
    """Return the number of the next snapshot."""
    return FIRST if newest is None else newest + 1


def _sequences(names: Iterable[str]) -> list[int]:
    """Return the numbers of the names that are those of snapshots, ascending."""
    return [number for number in map(sequence_of, names) if number is not None]
