"""A group that is translated over the syncs of MirrorMaker, then of logmirror, loses no record.

Method: MirrorMaker copies in runs, each from any earlier offset, and is killed anywhere; any of its
syncs may be missing. logmirror continues behind the last run. From every translated offset on, the
replica must have each record that the group has not read, in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logmirror.groups.offset_syncs import SyncIndex
from logmirror.groups.translation import Log, translated
from logmirror.to_kafka.takeover_logs import NOTHING
from logmirror.to_kafka.takeover_walk import Continued, Tail, continued


def tail(offsets: list[int], contents: list[int]) -> Tail:
    digests = np.zeros((len(contents), 2), np.int64)
    digests[:, 0] = contents
    flags = np.zeros(len(contents), bool)
    numbers = np.array(contents, np.int64)
    return NOTHING._replace(
        offsets=np.array(offsets, np.int64),
        records=digests,
        keys=digests,
        is_tombstone=flags,
        is_aborted=flags,
        timestamps_ms=numbers,
    )


@given(st.data())
def test_no_unread_record_is_skipped(data: Any) -> None:
    count = data.draw(st.integers(1, 25))
    gaps = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    source = [int(one) for one in np.cumsum(np.array(gaps) + 1)]
    furthest = end = data.draw(st.integers(1, count))
    replica = list(range(end))
    for _ in range(data.draw(st.integers(0, 3))):
        first = data.draw(st.integers(0, furthest - 1))
        end = data.draw(st.integers(first + 1, count))
        furthest = max(furthest, end)
        replica += range(first, end)
    by_mirrormaker = len(replica)

    found = continued(
        tail(source, list(range(count))),
        tail(list(range(len(replica))), replica),
        source[0],
        compacted=False,
    )

    assert isinstance(found, Continued)
    replica += [n for n in range(count) if source[n] >= found.next_offset]
    chosen = data.draw(
        st.lists(st.booleans(), min_size=len(replica), max_size=len(replica)), label="syncs"
    )
    if len(replica) > by_mirrormaker:
        chosen[by_mirrormaker] = True  # the first pair of a task is always due
    pairs = [(source[n], at) for at, n in enumerate(replica) if chosen[at]]
    if not pairs:
        return
    index = SyncIndex(np.array(pairs, np.int64))
    for committed in range(source[-1] + 2):
        result = translated(committed, Log(0, len(replica)), index)
        assert result.offset is not None
        unread = [n for n in range(count) if source[n] >= committed]
        rest = iter(replica[result.offset :])
        assert all(one in rest for one in unread), (committed, result)
