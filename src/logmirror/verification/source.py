"""Verify an archive against its source, object by object, as far as the source has the records.

1. The source's records in an object's range are read once, for their content digest and the cause
of
   each offset gap (marker, aborted, missing). If the digests agree, the records do.
2. Otherwise the records are compared one by one. On a topic that compacts, the source may have
   dropped records since: those it still has must be in the object, unchanged. On other topics
   nothing may differ.
3. The source must have no record at an offset that the object lacks, for the recorded cause, or
   because it was compacted since.

Both sides are read as streams and compared as columns, up to the offset that both have reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import xxhash

from logmirror.archive.gap_facts import GapFacts, GapWalk, by_cause, merged
from logmirror.archive.native import seen_gaps
from logmirror.archive.reader import iterate
from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.model import Gap, GapCause, OffsetRange
from logmirror.source.compare import first_difference, shown
from logmirror.verification.archive import shown_runs
from logmirror.wire.columns import ContentDigest
from logmirror.wire.scan import KIND_ABORTED, KIND_DATA

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from logmirror.archive.gap_facts import Causes
    from logmirror.mirror.ports import ArchiveSpec, SourceView
    from logmirror.source.partition import Fetched, KafkaSource
    from logmirror.stores.base import BlobStore
    from logmirror.verification.archive import Checked, FlowReport
    from logmirror.wire.columns import Columns
    from logmirror.wire.decode import RecordDecoder

_COLUMNS: Final = ("key", "value", "timestamp", "timestampType", "headers")
_NO_OFFSETS: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSide:
    """One flow's source, and the format of its archive."""

    archive: ArchiveSpec
    store: BlobStore
    folder: str
    """The folder of the flow's chain."""

    source: KafkaSource
    decoder: RecordDecoder
    """The decoder of the source's batches."""

    view: SourceView
    compacted: bool
    """Whether the topic's cleanup.policy compacts."""

    @property
    def is_native(self) -> bool:
        """Native objects hold aborted records, which are therefore not gaps."""
        return self.archive.format == "native"


def compare_with_source(report: FlowReport, checked: Checked, side: SourceSide) -> None:
    """Compare one object with the source in the same range."""
    obj, view = checked.obj, side.view
    try:
        check_place(checked, view)
        if obj.first < view.log_start:
            report.gone += 1
            if checked.gaps.unexplained_count:
                raise CorruptionError(
                    "offsets are missing without a recorded cause",
                    hint="the source has deleted them as well",
                    name=obj.name,
                    missing=checked.gaps.unexplained_count,
                    offsets=shown_runs(checked.gaps.unexplained),
                )
            return
        _compare(report, checked, side)
    except LogmirrorError as error:
        report.add_problem(error.add_facts(name=obj.name))
    else:
        report.compared += 1


def check_place(checked: Checked, view: SourceView) -> None:
    """Raise CorruptionError if an object cannot be from this source."""
    obj = checked.obj
    if obj.last >= view.last_stable_offset:
        raise CorruptionError(
            "the object ends beyond the source",
            hint="the source was truncated or recreated, or this is another cluster",
            name=obj.name,
            last_stable_offset=view.last_stable_offset,
        )
    if view.topic_id and checked.found.topic_id not in {"", view.topic_id.hex()}:
        raise CorruptionError(
            "the object has another topic ID than the source",
            hint="the topic was deleted and recreated since",
            name=obj.name,
            expected_topic_id=view.topic_id.hex(),
            found_topic_id=checked.found.topic_id,
        )


def _compare(report: FlowReport, checked: Checked, side: SourceSide) -> None:
    covered = checked.obj.covered
    digest, gaps = _read_source(side, covered, checked.gaps)
    if gaps.unexplained_count and not side.compacted:
        raise CorruptionError(
            "the source has neither a record nor a cause for offsets of the object",
            hint="the topic's cleanup.policy has no `compact`: records may have been lost at the "
            "source (unclean leader election, or a restored disk)",
            missing=gaps.unexplained_count,
            offsets=shown_runs(gaps.unexplained),
        )
    since = 0
    if digest != checked.found.digest:
        since = _compare_rows(checked, side)
        if not side.compacted:
            raise CorruptionError(
                "the records are those of the source, but the bytes of their batches differ",
                hint="the source's log was rewritten since, for instance by a restore",
                expected=digest,
                found=checked.found.digest,
            )
    _compare_causes(checked.gaps, gaps, compacted=side.compacted)
    report.compacted_since += since
    if _unknown(checked.gaps):
        _explain(report, checked.gaps, gaps)


def _compare_causes(ours: GapFacts, theirs: GapFacts, *, compacted: bool) -> None:
    """Compare the causes that do not change: markers and aborted records."""
    for cause in (GapCause.CONTROL, GapCause.ABORTED):
        found, expected = ours.count(cause), theirs.count(cause)
        is_more = found > expected and not compacted  # the cleaner removes markers as well
        is_less = found + _unknown(ours) < expected
        if is_more or is_less:
            raise CorruptionError(
                "the archive has other causes for missing offsets than the source",
                cause=cause.value,
                expected=expected,
                found=found,
            )


def _unknown(gaps: GapFacts) -> int:
    """The number of missing offsets without a recorded cause."""
    return gaps.unexplained_count + gaps.count(GapCause.UNRECORDED)


def _explain(report: FlowReport, ours: GapFacts, theirs: GapFacts) -> None:
    """Count the gaps that the source explains. Records that it lacks too were compacted."""
    rest = _unknown(ours)
    for cause in (GapCause.CONTROL, GapCause.ABORTED):
        extra = min(max(theirs.count(cause) - ours.count(cause), 0), rest)
        report.gap_counts[cause] = report.gap_counts.get(cause, 0) + extra
        rest -= extra
    compacted = report.gap_counts.get(GapCause.COMPACTED, 0)
    report.gap_counts[GapCause.COMPACTED] = compacted + rest
    unrecorded = ours.count(GapCause.UNRECORDED)
    if unrecorded:
        report.gap_counts[GapCause.UNRECORDED] -= unrecorded
        _name_runs(report, ours, theirs)


def _name_runs(report: FlowReport, ours: GapFacts, theirs: GapFacts) -> None:
    """Set the causes of the last object's gaps to those of the source.

    If the source lacks more offsets than the archive, the gaps are left out: only counts are exact.
    """
    unnamed = set(ours.runs)
    while report.gap_runs and report.gap_runs[-1] in unnamed:
        report.gap_runs.pop()
    if ours.offset_count == theirs.offset_count:
        gone = [
            Gap(first=run.first, last=run.last, cause=GapCause.COMPACTED)
            for run in theirs.unexplained
        ]
        report.gap_runs += merged([*theirs.runs, *gone])


# -- the source's side -----------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A part of the source's records, valid until the next one."""

    fetched: Fetched
    rows: Columns | None
    known: Causes
    reached: int
    """The offset up to which the source was read."""


def _pieces(side: SourceSide, covered: OffsetRange) -> Iterator[_Piece]:
    end = covered.next_offset
    for fetched in side.source.read(covered.first, end):
        batches = fetched.batches
        if side.is_native:
            batches.kinds[batches.kinds == KIND_ABORTED] = KIND_DATA
        known = seen_gaps(batches, covered.first, aborted=True)
        for rows in side.decoder.decode(fetched.buffer, batches, first=covered.first, end=end):
            yield _Piece(fetched, rows, known, int(rows.offsets[-1]) + 1)
        yield _Piece(fetched, None, known, min(int(batches.last_offsets[-1]) + 1, end))


def _read_source(side: SourceSide, covered: OffsetRange, copy: GapFacts) -> tuple[str, GapFacts]:
    """The expected digest and gaps of an object with this range, from the source alone.

    Raises:
        CorruptionError: The source has another cause for a gap than the archive.
    """
    raw, rows_digest, walk = xxhash.xxh3_128(), ContentDigest(), GapWalk(covered)
    recorded = by_cause(copy.runs)
    for piece in _pieces(side, covered):
        offsets = _NO_OFFSETS if piece.rows is None else piece.rows.offsets
        walk.step(offsets, piece.known, reached=piece.reached)
        if piece.rows is not None and not side.is_native:
            rows_digest.update(piece.rows, 0, piece.rows.rows)
        elif piece.rows is None:
            _check_causes(piece.known, recorded)
            if side.is_native:
                raw.update(_bytes_of(piece.fetched, covered.next_offset))
    digest = f"xxh3:{raw.hexdigest()}" if side.is_native else rows_digest.hexdigest()
    return digest, walk.finish()


def _bytes_of(fetched: Fetched, end: int) -> memoryview:
    """The batches of a response that belong to a native object with the end `end`."""
    batches = fetched.batches
    stop = int(batches.base_offsets.searchsorted(end))
    if stop <= fetched.start:
        return fetched.buffer[:0]
    begin = int(batches.positions[fetched.start])
    return fetched.buffer[begin : int(batches.positions[stop - 1] + batches.sizes[stop - 1])]


def _check_causes(known: Causes, recorded: Causes) -> None:
    for cause, runs in known.items():
        for other, listed in recorded.items():
            if other in {cause, GapCause.UNRECORDED}:
                continue
            common = listed.overlaps(runs.firsts, runs.lasts)
            if common.any():
                at = int(np.argmax(common > 0))
                raise CorruptionError(
                    "the archive has another cause for missing offsets than the source",
                    offsets=f"{runs.firsts[at]}-{runs.lasts[at]}",
                    expected=cause.value,
                    found=other.value,
                )


# -- record by record ------------------------------------------------------------------------------


class _Copy:
    """The rows of an object, read in order."""

    def __init__(self, checked: Checked, side: SourceSide) -> None:
        utf8 = side.archive.encoding == "utf8"
        self._batches = iterate(side.store, side.folder, checked.obj.name, utf8=utf8)
        self._left: Any = None

    def below(self, end: int) -> Iterator[Any]:
        """Read the rows below an offset, in Arrow batches that are valid until the next."""
        while True:
            if self._left is None or not len(self._left):
                self._left = next(self._batches, None)
                if self._left is None:
                    return
            count = int(_offsets(self._left).searchsorted(end))
            taken, self._left = self._left.slice(0, count), self._left.slice(count)
            if count:
                yield taken
            if len(self._left):
                return


def _compare_rows(checked: Checked, side: SourceSide) -> int:
    """Compare the records; return how many the source no longer has.

    Raises:
        CorruptionError: A record differs. Facts: `offsets`, or `offset` and both sides.
    """
    covered, since = checked.obj.covered, 0
    copy = _Copy(checked, side)
    for piece in _pieces(side, covered):
        theirs = None if piece.rows is None else piece.rows.to_arrow("", 0)
        for ours in copy.below(piece.reached):
            last = int(_offsets(ours)[-1])
            count = 0 if theirs is None else int(_offsets(theirs).searchsorted(last, "right"))
            since += _compare_part(ours, theirs, count, piece.known, side)
            theirs = None if theirs is None else theirs.slice(count)
        if theirs is not None and len(theirs):
            raise _lacking(_offsets(theirs))
    for ours in copy.below(covered.next_offset):
        since += _compare_part(ours, None, 0, {}, side)
    return since


def _compare_part(
    ours: Any,  # noqa: ANN401  # pyarrow has no types
    theirs: Any,  # noqa: ANN401  # pyarrow has no types
    count: int,
    known: Causes,
    side: SourceSide,
) -> int:
    """Compare rows of the object with the first `count` of the source, in the same range."""
    offsets = _offsets(ours)
    expected = _NO_OFFSETS if theirs is None else _offsets(theirs)[:count]
    is_shared = np.isin(offsets, expected, assume_unique=True)
    if np.count_nonzero(is_shared) != len(expected):
        raise _lacking(expected[~np.isin(expected, offsets, assume_unique=True)])
    extra = offsets[~is_shared]
    if len(extra):
        _check_extra(extra, known, side)
        ours = ours.filter(is_shared)
    if len(expected):
        one, other = ours.select(_COLUMNS), theirs.slice(0, count).select(_COLUMNS)
        if not one.equals(other):
            at = first_difference(one, other)
            raise CorruptionError(
                "the archive differs from the source at the same offset",
                hint="read both and compare: `kcat -C -p <partition> -o <offset> -c 1`",
                offset=int(expected[at]),
                expected=shown(other, at),
                found=shown(one, at),
            )
    return len(extra)


def _check_extra(extra: npt.NDArray[np.int64], known: Causes, side: SourceSide) -> None:
    for cause, runs in known.items():
        common = runs.overlaps(extra, extra)
        if common.any():
            raise CorruptionError(
                "the archive has records at offsets where the source never had any",
                offsets=_spans(extra[common > 0]),
                cause=cause.value,
            )
    if not side.compacted:
        raise CorruptionError(
            "the archive has records that the source does not have",
            hint="the topic's cleanup.policy has no `compact`, which would explain it",
            offsets=_spans(extra),
        )


def _lacking(offsets: npt.NDArray[np.int64]) -> CorruptionError:
    return CorruptionError(
        "the archive lacks records that the source has",
        hint="keep the archive unchanged; copy the partition again with another destination name",
        missing=len(offsets),
        offsets=_spans(offsets),
    )


def _spans(offsets: npt.NDArray[np.int64]) -> str:
    ends = np.flatnonzero(np.diff(offsets) > 1)
    firsts, lasts = np.append(0, ends + 1), np.append(ends, len(offsets) - 1)
    pairs = zip(offsets[firsts[:6]], offsets[lasts[:6]], strict=True)
    return shown_runs(tuple(OffsetRange(first=int(a), last=int(b)) for a, b in pairs))


def _offsets(batch: Any) -> npt.NDArray[np.int64]:  # noqa: ANN401  # pyarrow has no types
    found: npt.NDArray[np.int64] = batch.column("offset").to_numpy()
    return found
