"""Goal: a checkpoint goes back only if its group does, whatever was restarted (KAFKA-15905).

Method: the numbers of MirrorMaker's own tests and of KAFKA-15905; made-up lives of groups with
restarts, failed writes and a second process, against invariants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from logmirror.groups.emission import LastCheckpoints, Position
from logmirror.groups.offset_syncs import SyncIndex
from logmirror.groups.target_sync import AHEAD, UNCHANGED, commits_due, compared
from logmirror.groups.translation import Log, translated
from logmirror.model import TopicPartition
from logmirror.wire.mirrormaker import Checkpoint

ORDERS = TopicPartition("A.orders", 0)
END = 10_000
LIFE_1 = [*range(0, 1000, 101), 999]
"""Syncs of 1,000 records with `offset.lag.max` of 100, and the one at the end."""
LIFE_2 = [*LIFE_1, *range(1010, 2000, 101), 1999]


def index(*pairs: tuple[int, int]) -> SyncIndex:
    return SyncIndex(np.array(pairs, dtype=np.int64).reshape(-1, 2))


def same(offsets: list[int]) -> SyncIndex:
    return index(*[(offset, offset) for offset in offsets])


def at(upstream: int, downstream: int, end: int = END) -> dict[TopicPartition, Position]:
    return {ORDERS: Position(upstream, downstream, "", end)}


def checkpoint(upstream: int, downstream: int, group: str = "g") -> Checkpoint:
    return Checkpoint(group, "A.orders", 0, upstream, downstream, "")


def of(syncs: SyncIndex, offset: int) -> int:
    found = translated(offset, Log(0, END), syncs).offset
    assert found is not None
    return found


def emitted(last: LastCheckpoints, syncs: SyncIndex, offset: int) -> int | None:
    """One round with an acknowledged write; None if nothing was due."""
    due = last.due("g", at(offset, of(syncs, offset)))
    last.remember(due)
    return due[0].downstream if due else None


def restored(*checkpoints: Checkpoint) -> LastCheckpoints:
    last = LastCheckpoints()
    last.remember(checkpoints)
    return last


# -- KAFKA-15905 -----------------------------------------------------------------------------------


def test_a1_a_restart_translates_as_before():
    syncs = same(LIFE_1)

    found = {offset: of(syncs, offset) for offset in (0, 50, 400, 499, 500, 909, 999, 1000)}

    # MirrorMaker: 400 -> 1, 499 and 500 -> 405, for it keeps fewer pairs.
    assert found == {0: 0, 50: 1, 400: 304, 499: 405, 500: 405, 909: 909, 999: 999, 1000: 1000}


def test_a2_later_syncs_do_not_make_earlier_offsets_coarser():
    syncs = same(LIFE_2)

    # MirrorMaker: 500 -> 1, 909 to 1500 -> 809.
    assert [of(syncs, offset) for offset in (500, 909, 1500)] == [405, 909, 1415]
    assert [of(syncs, offset) for offset in (1999, 2000)] == [1999, 2000]


def test_a3_a_group_that_stands_still_does_not_go_back_after_a_restart():
    coarser = same([0, 808, 1616, 1999])

    assert emitted(restored(checkpoint(500, 405)), coarser, 500) is None


def test_a4_a_group_that_moves_is_emitted_after_a_restart():
    assert emitted(restored(checkpoint(500, 405)), same(LIFE_2), 1250) == 1213


def test_a5_a_rewind_at_the_source_is_emitted_also_backwards():
    last = restored(checkpoint(500, 405))

    assert emitted(last, same(LIFE_2), 300) == 203
    assert emitted(last, same(LIFE_2), 300) is None


def test_a6_without_the_topic_committed_offsets_are_the_lower_bound():
    last = LastCheckpoints()
    last.restore("g", {ORDERS: 405})

    assert emitted(last, same([0, 808]), 500) is None
    assert emitted(last, same(LIFE_2), 400) == 304  # a rewind since then is seen as one
    assert emitted(last, same(LIFE_2), 909) == 909


def test_a6_what_the_topic_has_counts_before_a_committed_offset():
    last = restored(checkpoint(500, 405))
    last.restore("g", {ORDERS: 1})

    assert emitted(last, same([0, 808]), 500) is None


def test_a7_checkpoints_of_other_groups_and_partitions_are_without_influence():
    others = [checkpoint(9, 9, group="other"), Checkpoint("g", "A.orders", 1, 9, 9, "")]

    assert emitted(restored(*others), same(LIFE_1), 5) == 1


def test_a8_after_compaction_of_the_syncs_nothing_goes_back():
    last = restored(checkpoint(500, 405))
    left = same([999])

    assert emitted(last, left, 500) is None
    assert emitted(last, left, 998) is None
    assert emitted(last, left, 1000) == 1000


def test_mm_16_suppressed_repetition_and_rewind_of_the_store():
    """MirrorMaker's testCheckpointRecordsMonotonicIfStoreRewinds."""
    last = LastCheckpoints()
    assert emitted(last, index((11, 4), (12, 5)), 13) == 6
    thinned = index((11, 4), (15, 8), (16, 9), (17, 10))

    assert emitted(last, thinned, 13) is None
    assert emitted(last, thinned, 12) == 5


def test_mm_17_a_restart_with_a_coarser_store_emits_only_what_is_higher():
    """MirrorMaker's testCheckpointsTaskRestartUsesExistingCheckpoints."""
    last = restored(checkpoint(250, 201))
    syncs = index((175, 175), (375, 375), (475, 475))

    assert [emitted(last, syncs, offset) for offset in (250, 370, 400)] == [None, None, 376]


# -- failures --------------------------------------------------------------------------------------


def test_a_checkpoint_whose_write_failed_is_still_due():
    last = LastCheckpoints()
    first = last.due("g", at(5, 5))

    assert last.due("g", at(5, 5)) == first == [checkpoint(5, 5)]


def test_a_checkpoint_beyond_the_replica_is_replaced():
    """The replica was created again: an offset that it does not have is of no use."""
    last = restored(checkpoint(500, 500))

    assert last.due("g", at(500, 40, end=40)) == [checkpoint(500, 40)]


def test_a_recreated_topic_of_the_target_begins_without_checkpoints():
    last = restored(checkpoint(500, 500), Checkpoint("g", "other", 0, 7, 7, ""))
    last.forget("A.orders")

    assert len(last) == 1
    assert last.due("g", at(500, 40)) == [checkpoint(500, 40)]


# -- aborted, deleted, shortened -------------------------------------------------------------------


def test_an_aborted_checkpoint_is_written_once_more_and_not_further_back():
    """The log cleaner removes it, and the one before it would count again."""
    last = LastCheckpoints()
    last.remember([checkpoint(500, 405)], are_aborted=True)

    assert emitted(last, same([0, 808]), 500) == 405  # its syncs are gone
    assert emitted(last, same([0, 808]), 500) is None


def test_an_aborted_rewind_is_written_once_more():
    last = restored(checkpoint(500, 405))
    last.remember([checkpoint(300, 203)], are_aborted=True)

    assert emitted(last, same(LIFE_2), 300) == 203
    assert emitted(last, same(LIFE_2), 300) is None


def test_a_checkpoint_of_a_deleted_topic_does_not_count():
    last = LastCheckpoints()
    last.remember([checkpoint(500, 405)], {"A.orders": b"old"})
    lower = Position(500, 304, "", END, b"new")

    assert last.best("g", ORDERS, lower) == 304
    assert [one.downstream for one in last.due("g", {ORDERS: lower})] == [304]
    for topic_id in (b"old", None):  # None: the brokers do not report IDs
        assert last.due("g", {ORDERS: lower._replace(topic_id=topic_id)}) == []


def test_what_a_replica_no_longer_reaches_is_not_committed_as_its_end():
    last = restored(checkpoint(500, 405))

    assert last.best("g", ORDERS, Position(500, 304, "", 404)) == 304
    assert last.best("g", ORDERS, Position(500, 304, "", 405)) == 405


def test_a_lower_bound_from_the_target_is_no_translation():
    """An offset that was reset at the target is not committed there again."""
    last = LastCheckpoints()
    last.restore("g", {ORDERS: 405})
    position = Position(300, 203, "", END)

    assert last.due("g", {ORDERS: position}) == []
    assert last.best("g", ORDERS, position) == 203


# -- commits at the target -------------------------------------------------------------------------


def test_offsets_at_the_target_only_move_forward():
    wanted = {TopicPartition("t", number): 10 for number in range(5)}
    current = dict(zip(wanted, [None, 9, 10, 11], strict=False))

    due = commits_due(wanted, current)

    assert [one.partition for one in due] == [0, 1]  # the last one was not read
    assert [compared(10, number) for number in (None, 9, 10, 11)] == ["", "", UNCHANGED, AHEAD]


# -- lives -----------------------------------------------------------------------------------------

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 200)),
        st.tuples(st.just("replicate"), st.integers(1, 40)),
        st.tuples(st.just("thin"), st.integers(0, 5)),
        st.tuples(st.sampled_from(["restart", "lost write", "other process"]), st.just(0)),
    ),
    min_size=3,
    max_size=60,
)


@given(_STEPS)
def test_no_record_is_skipped_and_nothing_goes_back_unasked(steps: Any):
    """Invariant 1 over restarts, lost writes, two processes, and a store that loses pairs."""
    end, group, pairs = 0, 0, [(0, 0)]
    topic: list[Checkpoint] = []
    first, second = LastCheckpoints(), LastCheckpoints()
    read = {id(first): 0, id(second): 0}
    for step, number in steps:
        if step == "replicate":
            end += number
            pairs.append((end - 1, end - 1))
        elif step == "commit":
            group = min(number, end)
        elif step == "thin":
            del pairs[1:-1][:number]
            pairs = [pairs[0], *pairs[1:][number:]]
        elif step == "restart":
            first = LastCheckpoints()
            read[id(first)] = 0
        elif step == "other process":
            first, second = second, first
        first.remember(topic[read[id(first)] :])
        offset = of(index(*pairs), group)
        due = first.due("g", at(group, offset, end))
        read[id(first)] = len(topic)
        if step != "lost write":
            for one in due:
                before = topic[-1] if topic else one
                assert one.downstream <= one.upstream
                went_back = one.downstream < before.downstream
                assert not went_back or one.upstream < before.upstream
            topic += due
