"""Where a copy continues that another program has written: the records of both logs, compared.

MirrorMaker copies in runs. Each run begins at some offset of the source and has no gap; after a
crash, the next one begins earlier and repeats records. So a consumer that reads the target from any
offset gets every later record of the source, as long as the last run is continued where it ended.
That is the rule here:

    source   a b c d e f g
    target   a b c d | b c            the last run ended behind `c`: continue with `d`

To continue with `e` would add fewer repeated records, and lose `d` for a group that was translated
to the second `b`.

Invariants:
1. Every record of the source before the result is in the target, in order (or newer records of its
   key are, if a log is compacted). So none is lost.
2. No record of the source behind the last run is in the target. So nothing is repeated but what
   the last run had begun to repeat.
3. A record of the target that the source does not have is an error, never skipped: another client
   has written there. Compaction explains it only if the source has another record of its key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64s = npt.NDArray[np.int64]
    Flags = npt.NDArray[np.bool_]

_RUNS_MAX: Final = 10_000
"""The most parts in which the target's records are matched; a copy has one for each restart."""

_SPAN: Final = 1 << 12
"""Records that are compared first; each further step compares twice as many."""


class Tail(NamedTuple):
    """Consecutive records of a log, as columns."""

    offsets: Int64s
    records: Int64s
    """Digests, shape (n, 2)."""

    keys: Int64s
    """Digests of the keys, shape (n, 2)."""

    is_tombstone: Flags
    is_aborted: Flags
    """Whether a record is of an aborted transaction, which a consumer may read all the same."""

    timestamps_ms: Int64s

    @property
    def size(self) -> int:
        """The number of records."""
        return len(self.offsets)

    def kept(self, is_kept: Flags) -> Tail:
        """Return some of the records."""
        return Tail(
            self.offsets[is_kept],
            self.records[is_kept],
            self.keys[is_kept],
            self.is_tombstone[is_kept],
            self.is_aborted[is_kept],
            self.timestamps_ms[is_kept],
        )


class Continued(NamedTuple):
    """A copy whose records are all explained."""

    next_offset: int
    """The source's offset of the first record to copy."""

    repeated: int
    """Records that the target has more than once."""

    behind: int
    """Records from `next_offset` on that the target has already, before the repetition of the last
    run: they are repeated too."""


class Unexplained(NamedTuple):
    """Records of the target that are not in the source, or not in its order."""

    offset: int
    """The target's offset of the first one."""

    missing_from: int
    """The source's offset of the first record that the target does not have; -1: it has all."""

    first_ms: int
    """The least timestamp of those that are not in the source."""


def continued(
    source: Tail, target: Tail, anchor: int, *, compacted: bool
) -> Continued | Unexplained:
    """Find where a copy continues.

    A consumer of uncommitted records copies aborted ones too. So the source is compared without
    them first, then with them.

    Args:
        source: Records of the source, those before `anchor` only to explain repetitions.
        target: Records of the target, up to its end; at least one.
        anchor: The source's offset of the first one, if it is no repetition.
        compacted: Whether compaction may have removed records of either log.
    """
    found = _continued(source.kept(~source.is_aborted), target, anchor, compacted=compacted)
    if isinstance(found, Unexplained) and source.is_aborted.any():
        other = _continued(source, target, anchor, compacted=compacted)
        if isinstance(other, Continued) or other.offset > found.offset:
            return other
    return found


def is_in(records: Tail, source: Tail) -> Flags:
    """Return which of the records the source has."""
    ours, theirs = _coded(source.records, records.records)
    return np.isin(theirs, ours)


def _continued(
    source: Tail, target: Tail, anchor: int, *, compacted: bool
) -> Continued | Unexplained:
    ours, theirs = _coded(source.records, target.records)
    first = int(np.searchsorted(source.offsets, anchor))
    if not compacted:
        return _plain(source, target, ours, theirs, first)
    kept_ours, kept_theirs, unexplained = _without_compacted(source, target, ours, theirs)
    if unexplained.any():
        return _unexplained(source, target, unexplained, source.size)
    left, right = source.kept(kept_ours), target.kept(kept_theirs)
    if not right.size:
        return _unexplained(source, target, np.ones(target.size, bool), first)
    return _plain(left, right, ours[kept_ours], theirs[kept_theirs], int(kept_ours[:first].sum()))


def _plain(
    source: Tail, target: Tail, ours: Int64s, theirs: Int64s, first: int
) -> Continued | Unexplained:
    """Match the target with the longest prefix of the source that is in it, in order."""
    place, matched, repeats = first, 0, np.ones(len(theirs), bool)
    for _ in range(_RUNS_MAX):
        run = _run(ours, place, theirs, matched)
        repeats[matched : matched + run] = False
        place, matched = place + run, matched + run
        if matched == len(theirs) or place == len(ours):
            break
        skip = _first_equal(theirs, matched, int(ours[place]))
        if skip < 0:
            break
        matched = skip
    else:
        return _unexplained(source, target, repeats, place)
    is_foreign = repeats & ~np.isin(theirs, ours[:place])
    if is_foreign.any():
        return _unexplained(source, target, is_foreign, place)
    until = place
    if repeats.any():
        until = min(place, _last_run_end(ours[:place], theirs))
    after = int(source.offsets[until - 1]) + 1 if until else int(source.offsets[0])
    return Continued(after, int(repeats.sum()), place - until)


def _run(ours: Int64s, place: int, theirs: Int64s, matched: int) -> int:
    """How many records are equal from here on."""
    done, span = 0, _SPAN
    while True:
        left = ours[place + done : place + done + span]
        right = theirs[matched + done : matched + done + span]
        size = min(len(left), len(right))
        differs = np.flatnonzero(left[:size] != right[:size])
        if len(differs):
            return done + int(differs[0])
        done += size
        if size < span:
            return done
        span *= 2


def _first_equal(values: Int64s, start: int, wanted: int) -> int:
    span = _SPAN
    while start < len(values):
        found = np.flatnonzero(values[start : start + span] == wanted)
        if len(found):
            return start + int(found[0])
        start, span = start + span, 2 * span
    return -1


def _last_run_end(ours: Int64s, theirs: Int64s) -> int:
    """One past the source's record that the target's last one repeats.

    Of several equal records it is the one with the most equal records before it, in both logs; of
    several with as many the first one, which repeats more and loses nothing.
    """
    ends = np.flatnonzero(ours == theirs[-1])
    back = 1
    while len(ends) > 1 and back < len(theirs):
        longer = ends[(ends >= back)]
        longer = longer[ours[longer - back] == theirs[-1 - back]]
        if not len(longer):
            break
        ends, back = longer, back + 1
        if back > _SPAN:  # equal for thousands of records: the logs repeat themselves
            break
    return int(ends[0]) + 1


def _without_compacted(
    source: Tail, target: Tail, ours: Int64s, theirs: Int64s
) -> tuple[Flags, Flags, Flags]:
    """What to compare if records may be missing on either side.

    Returns:
        Which records of the source and of the target are compared, and which records of the target
        nothing explains.
    """
    our_keys, their_keys = _coded(source.keys, target.keys)
    is_in_target, places = np.isin(ours, theirs), np.arange(len(ours))
    newest = int(places[is_in_target][-1]) if is_in_target.any() else -1
    is_removed = source.is_tombstone & ~is_in_target & (places < newest)
    # A record is superseded if a later one of its key was copied.
    last = np.full(int(max(our_keys.max(initial=-1), their_keys.max(initial=-1))) + 1, -1, np.int64)
    was_copied = np.flatnonzero(is_in_target | is_removed)
    np.maximum.at(last, our_keys[was_copied], was_copied)
    kept_ours = is_in_target | ~((places < last[our_keys]) | is_removed)
    kept_theirs = np.isin(theirs, ours)
    has_key = np.isin(their_keys, our_keys)
    return kept_ours, kept_theirs, ~(kept_theirs | has_key | target.is_tombstone)


def _unexplained(source: Tail, target: Tail, is_unexplained: Flags, place: int) -> Unexplained:
    which = np.flatnonzero(is_unexplained)
    missing = int(source.offsets[place]) if place < source.size else -1
    first_ms = int(target.timestamps_ms[which].min())
    return Unexplained(int(target.offsets[which[0]]), missing, first_ms)


def _coded(left: Int64s, right: Int64s) -> tuple[Int64s, Int64s]:
    """Return a number for each digest, equal for equal ones."""
    joined = np.ascontiguousarray(np.concatenate([left, right]))
    column = pa.Array.from_buffers(pa.binary(16), len(joined), [None, pa.py_buffer(joined)])
    codes = column.dictionary_encode().indices.to_numpy().astype(np.int64)
    return codes[: len(left)], codes[len(left) :]
