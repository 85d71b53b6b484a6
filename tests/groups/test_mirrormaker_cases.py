"""Goal: the cases of MirrorMaker 2's own tests, for its offset syncs and its checkpoints.

Method: MirrorMaker's classes get the records of the case, which shows its offset; logmirror gets
the same records, and is never behind that offset, nor beyond the group's own record. The numbers of
the tests are those of docs/mirrormaker-parity.md.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest

from kit.judges.mirror_translation import (
    CheckpointStart,
    MirrorTranslation,
    sync_records,
    table,
)
from kit.servers.apache import RELEASES
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.offset_syncs import OffsetSyncWriter, Run, SyncRule
from logmirror.cluster.properties import connection_settings
from logmirror.errors import InternalError
from logmirror.groups.checkpoint_topics import CheckpointTopics, last_of_each_key
from logmirror.groups.emission import LastCheckpoints, Position
from logmirror.groups.offset_syncs import OffsetSyncs
from logmirror.groups.target_sync import commits_due
from logmirror.groups.translation import Log, translated
from logmirror.model import TopicPartition
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import Checkpoint, encode_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

pytestmark = pytest.mark.jvm

ORDERS: Final = TopicPartition("orders", 0)
END: Final = 1 << 40
Pairs = list[tuple[int, int]]


@pytest.fixture(scope="module", params=RELEASES)
def java(request) -> Iterator[MirrorTranslation]:
    with MirrorTranslation(request.param) as program:
        yield program


class Both:
    """MirrorMaker's store and logmirror's, with the same syncs."""

    def __init__(
        self, java: MirrorTranslation, pairs: Pairs = (), *, must_read_to_end: bool = False
    ) -> None:
        self.java, self.ours = java, OffsetSyncs()
        java.read_syncs(sync_records(ORDERS, pairs), must_read_to_end=must_read_to_end)
        self._add(pairs)

    def add(self, *pairs: tuple[int, int]) -> None:
        self.java.add_syncs(sync_records(ORDERS, pairs))
        self._add(pairs)

    def _add(self, pairs: Iterable[tuple[int, int]]) -> None:
        records = sync_records(ORDERS, pairs)
        if records:
            self.ours.add(table(records))

    def theirs(self, *offsets: int) -> list[int | None]:
        return self.java.translated(ORDERS, offsets)

    def our(self, *offsets: int) -> list[int | None]:
        """None: there is no sync at or before the offset."""
        index = self.ours.indexes().get(ORDERS)
        if index is None:
            return [None] * len(offsets)
        found = [translated(offset, Log(0, END), index).offset for offset in offsets]
        return [
            place if index.at_or_before(offset) else None
            for offset, place in zip(offsets, found, strict=True)
        ]

    def assert_never_behind(self, offsets: Iterable[int]) -> None:
        """For syncs of the same offsets on both sides."""
        asked = list(offsets)
        for offset, their, our in zip(asked, self.theirs(*asked), self.our(*asked), strict=True):
            assert our is None or our <= offset, offset
            assert their is None or their < 0 or (our is not None and their <= our), offset


def same(*offsets: int) -> Pairs:
    return [(offset, offset) for offset in offsets]


def emitted(last: LastCheckpoints, offset: int, place: int | None) -> int | None:
    if place is None:
        return None
    due = last.due("g", {ORDERS: Position(offset, place, "", END)})
    last.remember(due)
    return due[0].downstream if due else None


def checkpoint(upstream: int, downstream: int, group: str = "g") -> tuple[bytes, bytes]:
    return encode_checkpoint(Checkpoint(group, "orders", 0, upstream, downstream, ""))


# -- the store of offset syncs ---------------------------------------------------------------------


def test_mm_01_offset_translation(java):
    both = Both(java, [(100, 200)])
    assert both.theirs(150) == both.our(150) == [201]
    both.add((150, 251))
    assert (both.theirs(150, 5), both.our(150, 5)) == ([251, -1], [251, None])
    both.add((200, 10))
    assert both.theirs(200) == both.our(200) == [10]
    # The replica was created again. MirrorMaker's position is beyond its end.
    assert (both.theirs(199), both.our(199)) == ([252], [None])
    both.add((20, 20))
    assert both.theirs(20) == both.our(20) == [20]


def test_mm_02_mm_03_nothing_is_translated_without_syncs(java):
    both = Both(java)
    assert both.theirs(0, 100, 200) == both.our(0, 100, 200) == [None] * 3
    found = translated(100, Log(0, END), None)
    assert (found.offset, found.reason) == (None, "there are no offset syncs of the partition")


PAST: Final = {
    "MM-04": (
        True,
        [(1000, -1)],
        [
            *[(1000, -1), (4840, 1000), (6760, 4840), (8680, 6760), (9160, 8680), (9640, 9160)],
            *[(9880, 9640), (9940, 9880), (9970, 9940), (9990, 9970), (10000, 9990)],
        ],
    ),
    "MM-05": (
        False,
        [(480, 0), (720, 480), (1000, 990)],
        [
            *[(3840, 0), (7680, 3840), (8640, 7680), (9120, 8640), (9600, 9120), (9840, 9600)],
            *[(9900, 9840), (9960, 9900), (9990, 9960), (10000, 9990)],
        ],
    ),
}


@pytest.mark.parametrize("case", PAST)
def test_past_offsets(java, case):
    """The pairs of a case: a sync that MirrorMaker has, and the one before it that it has."""
    must_read_to_end, early, late = PAST[case]
    both = Both(java, same(*range(0, 1001, 10)), must_read_to_end=must_read_to_end)
    for found in (early, late):
        for sync, before in found:
            asked = (sync - 1, sync, sync + 1, sync + 2)
            earlier = before + 1 if before >= 0 else -1
            assert both.theirs(*asked) == [earlier, sync, sync + 1, sync + 1]
            assert both.our(*asked) == [sync - 9, sync, sync + 1, sync + 1]
        both.assert_never_behind(range(0, 10_001, 7))
        if found is early:
            both.add(*same(*range(1010, 10_001, 10)))
    both.add((1500, 11_000))
    assert both.theirs(1499, 1500, 2000) == [-1, 11_000, 11_001]
    assert both.our(1499, 1500, 2000) == [1491, 11_000, 11_001]


SPACED: Final = {
    "MM-06": lambda drawn: [drawn.randrange(30)] + [drawn.choice([1, 3, 7, 15, 1023])] * 99,
    "MM-07": lambda drawn: [drawn.randrange(1 << drawn.randrange(1, 24)) + 1 for _ in range(1024)],
    "MM-08": lambda drawn: [drawn.choice([100, 200]) for _ in range(3000)],
}


@pytest.mark.parametrize("case", SPACED)
def test_no_sync_expires(java, case):
    """MirrorMaker's tests count how many syncs an insert expires."""
    drawn = random.Random(case)
    offset, syncs = 0, []
    for step in SPACED[case](drawn):
        offset += step
        syncs.append(offset)
    both = Both(java, same(*syncs))
    assert both.our(*syncs) == syncs
    both.assert_never_behind(drawn.randrange(syncs[0], syncs[-1] + 10) for _ in range(500))
    assert both.theirs(*syncs) != syncs  # it keeps 64 at most


# -- the checkpoint task ---------------------------------------------------------------------------


def test_mm_11_checkpoints(java):
    java.read_checkpoints([])
    for up, down, offset, expected in [(3, 4, 10, 5), (7, 8, 12, 9), (7, 8, 7, 8)]:
        both = Both(java, [(up, down)])
        assert java.emitted(ORDERS, offset, group=f"g{offset}") == expected
        assert emitted(LastCheckpoints(), offset, *both.our(offset)) == expected


@pytest.mark.parametrize(
    ("case", "current", "wanted"), [("MM-12", 100, 101), ("MM-12", 50, 51), ("MM-13", None, 101)]
)
def test_offsets_that_are_committed_at_the_target(case, current, wanted):
    assert commits_due({ORDERS: wanted}, {ORDERS: current}) == {ORDERS: wanted}


def test_mm_14_a_partition_without_syncs_has_no_checkpoint(java):
    both = Both(java, [(3, 4)])
    other = TopicPartition("orders", 1)
    java.read_checkpoints([])
    assert java.emitted(other, 10) is None
    assert other not in both.ours.indexes()
    assert java.emitted(ORDERS, 10) == emitted(LastCheckpoints(), 10, *both.our(10)) == 5


def test_mm_16_checkpoints_are_monotonic_if_the_store_rewinds(java):
    both, last = Both(java, [(11, 4), (12, 5)]), LastCheckpoints()
    java.read_checkpoints([])
    assert java.emitted(ORDERS, 13) == emitted(last, 13, *both.our(13)) == 6
    both.add(*((up, up - 7) for up in range(13, 18)))
    assert java.slots(ORDERS) == [17, 16, 15, 11]
    assert (both.theirs(13), both.our(13)) == ([5], [6])
    assert java.emitted(ORDERS, 13) is emitted(last, 13, *both.our(13)) is None
    assert java.emitted(ORDERS, 12) == emitted(last, 12, *both.our(12)) == 5


def test_mm_17_a_restart_uses_the_checkpoints_that_there_are(java):
    read = [checkpoint(250, 201)]
    last = LastCheckpoints()
    last.remember(one.checkpoint for one in last_of_each_key(table(read)))
    java.read_checkpoints(read)
    both = Both(java, same(175, 275, 375, 475))
    assert java.slots(ORDERS) == [475, 375, 175]
    assert both.theirs(250, 370) == [176, 176]
    assert both.our(250, 370) == [176, 276]
    assert java.emitted(ORDERS, 250) is emitted(last, 250, *both.our(250)) is None
    assert java.emitted(ORDERS, 370) is None
    assert emitted(last, 370, *both.our(370)) == 276  # forward, to a pair that MirrorMaker lost
    assert java.emitted(ORDERS, 400) == emitted(last, 400, *both.our(400)) == 376


def test_mm_18_nothing_is_written_before_the_checkpoints_are_read():
    with ClusterClient(connection_settings("127.0.0.1:1", {})) as client:
        topics = CheckpointTopics(
            client,
            source_alias="A",
            target_alias="B",
            transactional_id="t",
            topics={"orders"},
            decoder=RecordDecoder(),
            clock=SYSTEM_CLOCK,
        )
        assert not topics.is_begun
        with pytest.raises(InternalError, match="before `begin`"):
            topics.write([Checkpoint("g", "orders", 0, 1, 1, "")], {})


# -- the store of checkpoints ----------------------------------------------------------------------


def test_mm_19_the_last_checkpoint_of_each_key_counts(java):
    other = checkpoint(5, 5, group="group2")
    records = [checkpoint(0, 0), other, (b"", b""), checkpoint(1, 1)]

    start = java.read_checkpoints(records)

    assert start == CheckpointStart(is_read=True, is_initialized=True, count=1)
    found = [one.checkpoint for one in last_of_each_key(table(records))]
    assert [(one.group, one.upstream, one.downstream) for one in found] == [
        ("group2", 5, 5),
        ("g", 1, 1),
    ]


def test_mm_20_checkpoints_that_cannot_be_read_do_not_end_the_task(java):
    """`e2e/test_groups_acls.py` shows the same of logmirror, with a broker that refuses."""
    start = java.read_checkpoints([checkpoint(1, 1)], is_readable=False)
    assert start == CheckpointStart(is_read=False, is_initialized=True, count=0)


# -- which syncs are written -----------------------------------------------------------------------

STEPS: Final = [(0, 100), (2, 102), (3, 152), (4, 153), (5, 154), (6, 203), (7, 204), (2, 206)]
MORE: Final = [(3, 207), (4, 3), (5, 4), (7, 6), (8, 7), (10, 57), (11, 58)]


def due(lag_max: int, pairs: Pairs) -> list[bool]:
    rule = SyncRule(lag_max)
    return [bool(rule.due([Run(up, down, 1)])) for up, down in pairs]


@pytest.mark.parametrize(("case", "lag_max"), [("MM-22", 50), ("MM-23", 0), ("MM-28", 2)])
def test_syncs_are_due_at_the_same_records(java, case, lag_max):
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4)] if case == "MM-28" else STEPS + MORE
    found = due(lag_max, pairs)
    assert found == java.syncs_due(lag_max, pairs)
    expected = {
        "MM-22": "TTFTFFTTFTFTFTF",
        "MM-23": "T" * len(pairs),
        "MM-28": "TFFT",
    }
    assert found == [letter == "T" for letter in expected[case]]
    drawn = random.Random(case)
    for _ in range(50):
        up = down = 0
        pairs = []
        for _ in range(60):
            up += drawn.choice([1, 1, 1, 2, 9, -3])
            down = max(down + drawn.choice([1, 1, 1, 1, 2, lag_max + 1, -40]), 0)
            pairs.append((max(up, 0), down))
        assert due(lag_max, pairs) == java.syncs_due(lag_max, pairs)


@pytest.mark.parametrize("case", ["MM-27", "MM-30"])
def test_a_delayed_sync_is_written_once(case):
    rule = SyncRule(50)
    assert rule.due([Run(0, 100, 1)]) == [(0, 100)]
    if case == "MM-30":
        assert rule.due([Run(1, 101, 1)]) == []
        assert rule.flush() == [(1, 101)]
    assert rule.flush() == []


class Busy:
    """A pipeline whose responses are late."""

    def __init__(self, in_flight: int) -> None:
        self._in_flight, self.sent = in_flight, 0

    def in_flight(self) -> int:
        return self._in_flight

    def collect(self, *, block: bool) -> list[object]:
        assert not block
        return []

    def send(self, batches: object) -> None:
        self.sent += 1
        self._in_flight += 1


def test_mm_29_no_more_than_10_writes_of_syncs_are_in_flight():
    pipeline = Busy(9)
    writer = OffsetSyncWriter(pipeline, "standby", SYSTEM_CLOCK, mirror="m")
    for offset in range(3):
        writer.write(ORDERS, [(offset, offset)])
    assert pipeline.sent == 1
