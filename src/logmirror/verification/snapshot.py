"""Verify the newest snapshot of a compacted topic against its source.

All records that the source still has up to the snapshot's last offset are read once and reduced to
the latest record of each key, as the mirror does. Then, key by key:

1. A key whose latest record has a value must be in the snapshot, with exactly that record.
2. A key whose latest record is a tombstone must not be in the snapshot.
3. A key or record of the snapshot that the source does not have was compacted away since: possible
   only on a topic that compacts, or below the log start offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.archive.reader import iterate
from logmirror.archive.snapshots import LatestByKey, align
from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.verification.source import check_place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.verification.archive import Checked, FlowReport
    from logmirror.verification.source import SourceSide

_COLUMNS: Final = ("value", "timestamp", "timestampType", "headers")


def compare_snapshot(report: FlowReport, checked: Checked, side: SourceSide) -> None:
    """Compare a snapshot with the source up to its last offset."""
    obj, end = checked.obj, checked.obj.covered.next_offset
    try:
        check_place(checked, side.view)
        with LatestByKey() as view:
            for batch in _source_rows(report, side, end):
                view.add(batch)
            theirs = view.merged(iter(()), tombstones=True)
            ours = iterate(side.store, side.folder, obj.name)
            since = sum(_compare(one, other, side) for one, other in align(theirs, ours))
    except LogmirrorError as error:
        report.add_problem(error.add_facts(name=obj.name))
    else:
        report.compacted_since += since
        report.compared += 1


def _source_rows(report: FlowReport, side: SourceSide, end: int) -> Iterator[Any]:
    flow, first = report.flow, side.view.log_start
    for fetched in side.source.read(first, end):
        for columns in side.decoder.decode(fetched.buffer, fetched.batches, first=first, end=end):
            yield columns.to_arrow(flow.topic, flow.partition)


def _compare(theirs: Any, ours: Any, side: SourceSide) -> int:  # noqa: ANN401  # pyarrow has no types
    """Compare the rows of one key range; return how many the source has compacted away since."""
    at = pc.index_in(theirs.column("key"), value_set=ours.column("key"))
    is_here = at.is_valid().to_numpy(zero_copy_only=False)
    is_deleted = theirs.column("value").is_null().to_numpy(zero_copy_only=False)
    _fail_where(~is_here & ~is_deleted, theirs, "the snapshot lacks a key of the source")
    rows = np.flatnonzero(is_here)
    one, other = theirs.take(pa.array(rows)), ours.take(at.drop_null())
    expected, found = (part.column("offset").to_numpy() for part in (one, other))
    _fail_where(
        (expected > found) & is_deleted[rows], one, "the snapshot has a key that was deleted before"
    )
    _fail_where(expected > found, one, "the snapshot has an older record of a key")
    same = np.flatnonzero(expected == found)
    _compare_rows(one.take(pa.array(same)), other.take(pa.array(same)))
    is_alone = np.ones(len(ours), np.bool_)
    is_alone[at.drop_null().to_numpy()[expected <= found]] = False
    is_alone[at.drop_null().to_numpy()[expected < found]] = True
    if not side.compacted:
        is_kept = ours.column("offset").to_numpy() >= side.view.log_start
        _fail_where(is_alone & is_kept, ours, "the snapshot has a record that the source lacks")
    return int(is_alone.sum())


def _compare_rows(theirs: Any, ours: Any) -> None:  # noqa: ANN401  # pyarrow has no types
    for column in _COLUMNS:
        one, other = theirs.column(column), ours.column(column)
        if not one.equals(other):
            is_other = np.array([a != b for a, b in zip(one, other, strict=True)])
            _fail_where(is_other, theirs, f"the {column} of a record differs from the source's")


def _fail_where(is_wrong: Any, rows: Any, problem: str) -> None:  # noqa: ANN401  # numpy, pyarrow
    if is_wrong.any():
        at = int(np.argmax(is_wrong))
        raise CorruptionError(
            problem,
            hint="compare both: `kcat -C -o <offset> -c 1` prints the source's record",
            offset=rows.column("offset")[at].as_py(),
            key=rows.column("key")[at].as_py()[:100],
            count=int(is_wrong.sum()),
        )
