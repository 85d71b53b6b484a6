"""Failpoints: named places in the code where a test ends the process as `kill -9` would.

    LOGMIRROR_CRASH_AT=claim.created#2      die when this process reaches the point the second time

The points are between the steps whose order makes replication exactly-once. A test that uses each
of `POINTS` ends the process once between any two of these steps. Without the variable, a point
costs one dictionary lookup. The process ends by SIGKILL: no `finally` block, no flush and no exit
handler runs.

Reaching a point is also progress of its thread, which `progress` reports.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Final

from logmirror import progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

VARIABLE: Final = "LOGMIRROR_CRASH_AT"

POINTS: Final = (
    "plan.positions",  # driver: positions read, nothing dispatched
    "plan.dispatch",  # driver: slices planned, not yet run
    "fetch.answered",  # executor: batches received, nothing staged
    "stage.opened",  # executor: staged object exists, empty
    "stage.written",  # executor: some bytes in it, not durable
    "stage.finished",  # executor: staged object durable, not claimed
    "claim.created",  # executor: claim durable, object not published
    "publish.linked",  # executor: object visible, no receipt yet
    "publish.done",  # executor: staged name removed, receipt not sent
    "head.filled",  # executor: padding written for offsets that the source no longer has
    "head.deleted",  # executor: padding deleted
    "hole.begin",  # executor: nothing in flight, no marker requested
    "hole.joined",  # executor: partition added to a transaction without records
    "hole.marked",  # executor: marker requested, perhaps not written yet
    "hole.filled",  # executor: destination's log ends at the end of the offset gap
    "produce.prepared",  # executor: batches ready, nothing sent
    "produce.sent",  # executor: batches in flight, no response
    "produce.answered",  # executor: batches acknowledged, no receipt yet
    "translate.owned",  # driver: ownership of the flow recorded, nothing copied
    "translate.taken",  # executor: earlier writers fenced, progress read
    "translate.joined",  # executor: transaction begun, nothing sent
    "translate.sent",  # executor: its records in flight
    "translate.noted",  # executor: progress record written, transaction open
    "translate.committed",  # executor: transaction committed, no receipt yet
    "compact.staged",  # compact: merged object durable, not recorded
    "compact.recorded",  # compact: its record durable, object not published
    "compact.published",  # compact: object visible beside its parts
    "compact.proven",  # compact: object read back, nothing deleted
    "compact.deleted",  # compact: one more of its parts deleted
    "commit.received",  # driver: receipts received, not checked
    "commit.done",  # driver: verified position advanced
    "transaction.added",  # broker: partitions or groups of a transaction durable, no response yet
    "transaction.appended",  # broker: transactional batch appended, not durable
    "transaction.offsets",  # broker: offsets of a transaction durable, no response yet
    "transaction.prepared",  # broker: outcome durable, no marker written
    "transaction.marked",  # broker: one more marker appended, not durable
    "transaction.decided",  # broker: all markers durable, transaction not complete
    "transaction.completed",  # broker: transaction complete, no response yet
)

GROUP_POINTS: Final = (
    "groups.taken",  # earlier writers of checkpoints fenced, nothing read
    "groups.sent",  # a batch of checkpoints or a heartbeat in flight
    "groups.written",  # all acknowledged, transaction open
    "groups.committed",  # transaction committed, offsets not yet committed at the target
)
"""The same for groups of consumers, which no flow waits for."""

SNAPSHOT_POINTS: Final = (
    "snapshot.ready",  # all offsets read, nothing written
    "snapshot.created",  # snapshot durable, older ones not pruned
    "snapshot.pruned",  # one more of the older ones deleted
)
"""The same for their snapshots beside archives."""

TAKEOVER_POINTS: Final = (
    "takeover.found",  # driver: MirrorMaker's copy compared, nothing written
    "takeover.fenced",  # driver: other instances fenced, no progress yet
    "takeover.noted",  # driver: progress record written, transaction open
    "takeover.adopted",  # driver: transaction committed, nothing copied
)
"""The same for the start of a flow that continues MirrorMaker's copy, which happens once."""

MOVE_POINTS: Final = (
    "move.prepared",  # broker: folder of the copy made, nothing copied
    "move.copied",  # broker: one more segment copied, durable under its name
    "move.durable",  # broker: whole copy durable, it follows the log
    "move.swapped",  # broker: copy has the partition's name, not yet durable
    "move.named",  # broker: that name durable, the old folder still has it, too
    "move.freed",  # broker: old folder renamed, the move's row still there
    "move.done",  # broker: row removed, files of the old folder still there
)
"""The same for moves between log directories."""

COPY_POINTS: Final = (
    "move.torn",  # broker: a copy ends within a batch
    "move.emptied",  # broker: one more file removed that an earlier start has not completed
    "move.dropped",  # broker: one more segment removed from a copy, which the log has no more
    "move.removed",  # broker: one more file removed of a folder that is no partition's any more
)
"""The same within the steps of such a move."""

PLACE_POINTS: Final = (
    "move.arrived",  # broker: all durable in the new place, row of the residence not changed
    "move.placed",  # broker: that row says that the partition is in the new place
)
"""The same for moves from or to a bucket, beside the others."""

BUCKET_POINTS: Final = (
    "bucket.fenced",  # broker: log dir taken over, nothing read
    "bucket.committed",  # broker: a commit object durable, no response yet
    "bucket.snapshot",  # broker: producer state of a segment durable, its object not created
    "bucket.sealed",  # broker: a segment's object durable, its commits not removed
    "bucket.removed",  # broker: one more commit removed
    "bucket.deleted",  # broker: one more deleted segment removed
)
"""The same for the embedded broker's log in a bucket."""

MERGE_POINTS: Final = (
    "bucket.merged",  # broker: a merged object durable, no commit about it
    "bucket.replaced",  # broker: that commit durable, nothing deleted
)
"""The same for its small segments, which become one."""

COMPACT_POINTS: Final = (
    "bucket.compacted",  # broker: a compacted object durable, its row is not
    "bucket.counted",  # broker: its row durable, the old objects are not deleted
)
"""The same for compaction in a bucket."""

_reached: dict[str, int] = {}
_listeners: list[Callable[[str], None]] = []


def reach(point: str) -> None:
    """Report progress; end the process here if the environment variable names this point."""
    progress.moved()
    for listener in _listeners:
        listener(point)
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    name, _, nth = wanted.partition("#")
    if name != point:
        return
    _reached[point] = _reached.get(point, 0) + 1
    if _reached[point] == int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def is_wanted(point: str) -> bool:
    """Whether the environment variable names this point, for what is one call without it."""
    return os.environ.get(VARIABLE, "").partition("#")[0] == point


@contextlib.contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Call a listener at every failpoint that is reached, until the block ends.

    Args:
        listener: Receives the point's name. An exception that it raises propagates from the point.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
