"""Where flows start: what is read of each, and which epoch its position is compared with.

Method: archives in memory, of which one has a gap.
"""

import pytest

from kit.fakes.scripted import archive_spec
from logmirror.archive.naming import format_name
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, PositionError
from logmirror.mirror.opening import Opening
from logmirror.mirror.ports import FlowId, SourceView
from logmirror.model import EpochEnd, OffsetRange
from logmirror.testing import MemoryStore
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveDestination

WHOLE, BROKEN, EMPTY = (
    FlowId(mirror="m", destination="d", topic="t", partition=n) for n in range(3)
)
SPEC = archive_spec(format="parquet")


@pytest.fixture
def opening():
    store = MemoryStore()
    for flow, first in ((WHOLE, 0), (BROKEN, 5)):
        name = format_name(OffsetRange(first=first, last=9), "parquet")
        store.create(f"{flow.folder}/{name}", b"")

    def open_store(_location):
        return store

    committer = Committer(open_store, clock=SYSTEM_CLOCK)
    archive = ArchiveDestination(SPEC, open_store, committer, SYSTEM_CLOCK)
    return Opening(archive, [WHOLE, BROKEN, EMPTY], None)


def view(*, end=None, last_stable_offset=20):
    return SourceView(
        topic_id=None,
        log_start=0,
        last_stable_offset=last_stable_offset,
        leader_epoch=5,
        epoch_end=end,
    )


def test_an_error_is_of_its_flow_alone(opening):
    assert opening.epochs == {flow.source: -1 for flow in (WHOLE, BROKEN, EMPTY)}
    assert [opening.position(flow) for flow in (WHOLE, BROKEN, EMPTY)] == [10, None, 0]
    with pytest.raises(CorruptionError):
        opening.start(BROKEN, view(), compacted=False)
    start = opening.start(WHOLE, view(), compacted=False)
    assert (start.position, start.leader_epoch, start.tail_checked) == (10, -1, False)


def test_a_remembered_epoch_counts_for_its_position_alone(opening):
    opening.remember(WHOLE, 9, 3)
    opening.remember(BROKEN, 10, 3)
    assert opening.epochs[WHOLE.source] == -1
    opening.remember(WHOLE, 10, 3)
    opening.remember(WHOLE, 10, 4)
    assert opening.epochs == {WHOLE.source: 3, BROKEN.source: -1, EMPTY.source: -1}
    start = opening.start(WHOLE, view(end=EpochEnd(3, 12)), compacted=False)
    assert (start.position, start.leader_epoch, start.tail_checked) == (10, 3, True)


def test_the_error_says_where_the_histories_diverge(opening):
    opening.remember(WHOLE, 10, 3)
    with pytest.raises(PositionError) as caught:
        opening.start(WHOLE, view(end=EpochEnd(3, 6), last_stable_offset=8), compacted=False)
    assert caught.value.facts["diverges_at"] == 6
