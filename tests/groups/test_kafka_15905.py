"""Goal: a group never continues behind MirrorMaker's position, nor beyond its own (KAFKA-15905).

Method: MirrorMaker's own classes and logmirror read the same records, at a start and as they
arrive, and translate every offset. The source has 1,000 records, then 1,000 more, with the same
offsets on both sides; between them the checkpoint task is restarted. A1 to A8: MirrorMaker can read
its checkpoints (since 3.8). B1 to B4: it cannot, as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kit.judges.clients import Message, produce
from kit.judges.mirror_translation import (
    CheckpointStart,
    MirrorTranslation,
    Records,
    sync_records,
    table,
)
from kit.servers.apache import RELEASES
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.offset_syncs import OffsetSyncWriter, Run, SyncRule, create_sync_topic
from logmirror.cluster.properties import connection_settings
from logmirror.groups.checkpoint_topics import last_of_each_key
from logmirror.groups.emission import LastCheckpoints, Position
from logmirror.groups.offset_syncs import OffsetSyncs
from logmirror.groups.replicas import SyncReader
from logmirror.groups.translation import Log, preserved, translated
from logmirror.model import TopicPartition
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import Checkpoint, encode_checkpoint, syncs_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from logmirror.groups.offset_syncs import SyncIndex

pytestmark = pytest.mark.jvm

ORDERS: Final = TopicPartition("orders", 0)
LIFE_1: Final = [*range(0, 1000, 101), 999]
REST: Final = [*range(1010, 2000, 101), 1999]
LIFE_2: Final = LIFE_1 + REST
END: Final = 2000


@pytest.fixture(scope="module", params=RELEASES)
def java(request) -> Iterator[MirrorTranslation]:
    with MirrorTranslation(request.param) as program:
        yield program


def syncs(offsets: list[int]) -> Records:
    return sync_records(ORDERS, [(offset, offset) for offset in offsets])


def checkpoint(upstream: int, downstream: int, group: str = "g") -> tuple[bytes, bytes]:
    return encode_checkpoint(Checkpoint(group, "orders", 0, upstream, downstream, ""))


class Ours:
    """logmirror's stores, with the records that MirrorMaker's get."""

    def __init__(self, read: Records, checkpoints: Records, committed: int | None = None) -> None:
        self.syncs = OffsetSyncs()
        self.indexes: Callable[[], Mapping[TopicPartition, SyncIndex]] = self.syncs.indexes
        self.add(read)
        self.last = LastCheckpoints()
        self.last.remember(one.checkpoint for one in last_of_each_key(table(checkpoints)))
        if committed is not None:
            self.last.restore("g", {ORDERS: committed})

    def add(self, records: Records) -> None:
        self.syncs.add(table(records))

    def translated(self, offset: int) -> int:
        found = translated(offset, Log(0, END), self.indexes()[ORDERS]).offset
        assert found is not None
        return found

    def emitted(self, offset: int) -> int | None:
        position = Position(offset, self.translated(offset), "", END)
        due = self.last.due("g", {ORDERS: position})
        self.last.remember(due)
        return due[0].downstream if due else None


def assert_never_behind(java: MirrorTranslation, ours: Ours, pairs: list[int], end: int) -> int:
    """Compare every offset; return how many only logmirror translates."""
    offsets = range(end + 1)
    theirs = java.translated(ORDERS, offsets)
    more = 0
    for offset, their in zip(offsets, theirs, strict=True):
        our = ours.translated(offset)
        assert our <= offset, offset
        assert our == offset or offset not in pairs
        if their is None or their < 0:
            more += 1
        else:
            assert their <= our, offset
    assert ours.translated(end) == end
    return more


def restarted(  # noqa: PLR0913  # what is there, what arrives, and who may read it
    java: MirrorTranslation,
    checkpoints: Records,
    read: list[int] = LIFE_1,
    arrived: list[int] = REST,
    *,
    is_readable: bool = True,
    committed: int | None = None,
) -> Ours:
    """Both sides start with what was read, and then get what has arrived."""
    start = java.read_checkpoints(checkpoints, is_readable=is_readable)
    java.read_syncs(syncs(read), must_read_to_end=not start.is_read)
    java.add_syncs(syncs(arrived))
    ours = Ours(syncs(read), checkpoints if is_readable else [], committed)
    ours.add(syncs(arrived))
    return ours


def theirs(java: MirrorTranslation, *offsets: int) -> list[int | None]:
    return java.translated(ORDERS, offsets)


def test_the_syncs_are_those_that_both_write(java):
    pairs = [(offset, offset) for offset in range(END)]
    rule = SyncRule()
    for number, expected in enumerate([LIFE_1, REST]):
        due = rule.due([Run(1000 * number, 1000 * number, 1000)]) + rule.flush()
        assert [up for up, _ in due] == expected
    their = [
        up for (up, _), is_due in zip(pairs, java.syncs_due(100, pairs), strict=True) if is_due
    ]
    assert their == [offset for offset in LIFE_2 if offset not in {999, 1999}]


# -- checkpoints that can be read ------------------------------------------------------------------


def test_a1_after_a_restart_every_offset_is_translated_as_before(java):
    ours = Ours([], [])
    ours.add(syncs(LIFE_1))
    before = [ours.translated(offset) for offset in range(1001)]

    again = restarted(java, [checkpoint(500, 405)], arrived=[])

    assert java.slots(ORDERS) == [999, 909, 808, 404, 0]
    assert theirs(java, 0, 50, 400, 499, 500, 909, 999, 1000) == [0, 1, 1, 405, 405, 909, 999, 1000]
    assert [again.translated(offset) for offset in range(1001)] == before
    assert assert_never_behind(java, again, LIFE_1, 1000) == 0


def test_a2_after_1000_more_records_nothing_is_coarser(java):
    before = Ours(syncs(LIFE_1), [])

    ours = restarted(java, [checkpoint(500, 405)])

    assert java.slots(ORDERS) == [1999, 1919, 1818, 1616, 808, 0]
    assert theirs(java, 500, 909, 1500, 1999, 2000) == [1, 809, 809, 1999, 2000]
    assert all(ours.translated(at) == before.translated(at) for at in range(1000))
    assert assert_never_behind(java, ours, LIFE_2, END) == 0


def test_a3_a_group_that_stands_still_does_not_go_back(java):
    ours = restarted(java, [checkpoint(500, 405)])

    assert theirs(java, 500) == [1]
    assert java.emitted(ORDERS, 500) is None
    assert ours.emitted(500) is None


def test_a4_a_group_that_moves_is_emitted_and_not_behind(java):
    ours = restarted(java, [checkpoint(500, 405)])

    assert java.emitted(ORDERS, 1250) == 809
    assert ours.emitted(1250) == 1213


def test_a5_a_rewind_at_the_source_is_emitted_also_backwards(java):
    ours = restarted(java, [checkpoint(500, 405)])

    assert java.emitted(ORDERS, 300) == 1
    assert ours.emitted(300) == 203
    assert java.emitted(ORDERS, 300) is ours.emitted(300) is None


def test_a6_without_checkpoints_no_offset_is_lost_and_none_goes_back(java):
    """`e2e/test_groups_acls.py` has it with a broker that refuses the topic."""
    start = java.read_checkpoints([checkpoint(500, 405)], is_readable=False)
    assert start == CheckpointStart(is_read=False, is_initialized=True, count=0)

    ours = restarted(java, [checkpoint(500, 405)], is_readable=False, committed=405)

    assert java.emitted(ORDERS, 500) is None  # forgotten: it has no translation
    assert ours.emitted(500) is None  # the group has it already
    assert java.emitted(ORDERS, 1250) == 1000
    assert ours.emitted(1250) == 1213


def test_a7_other_groups_and_malformed_records_are_without_influence(java):
    mine = [checkpoint(500, 405)]
    key, value = checkpoint(500, 1999)
    others = [(b"", b""), checkpoint(7, 1999, group="other"), (key, value[:9]), *mine]
    others += [(key[:5], value), (key, b"")]
    assert java.read_checkpoints(others) == CheckpointStart(
        is_read=True, is_initialized=True, count=1
    )
    alone = restarted(java, mine)
    alone_theirs = [java.emitted(ORDERS, at) for at in (500, 1250, 300)]

    ours = restarted(java, others)

    assert [java.emitted(ORDERS, at) for at in (500, 1250, 300)] == alone_theirs
    found = [ours.emitted(at) for at in (500, 1250, 300)]
    assert found == [alone.emitted(at) for at in (500, 1250, 300)] == [None, 1213, 203]


def test_a8_after_compaction_of_the_syncs_nothing_goes_back(java):
    ours = restarted(java, [checkpoint(500, 405)], read=[999], arrived=[])

    assert theirs(java, 500, 998, 999, 1000) == [-1, -1, 999, 1000]
    assert java.emitted(ORDERS, 500) is ours.emitted(500) is None
    assert java.emitted(ORDERS, 998) is ours.emitted(998) is None
    assert java.emitted(ORDERS, 1000) == ours.emitted(1000) == 1000


# -- checkpoints that cannot be read ---------------------------------------------------------------


def test_b1_after_a_restart_mirrormaker_forgets_and_logmirror_does_not(java):
    ours = restarted(java, [], arrived=[], is_readable=False)

    assert java.slots(ORDERS) == [999]
    assert theirs(java, 998, 999, 1000, 1999) == [-1, 999, 1000, 1000]
    assert assert_never_behind(java, ours, LIFE_1, 1000) == 999
    assert [ours.translated(at) for at in (500, 998)] == [405, 910]


def test_b2_after_1000_more_records_mirrormaker_knows_the_second_half_only(java):
    ours = restarted(java, [], is_readable=False)

    assert java.slots(ORDERS) == [1999, 1919, 1818, 1414, 999]
    assert theirs(java, 500, 950, 999, 1250, 1500, 1999, 2000) == [
        *(-1, -1),
        *(999, 1000, 1415, 1999, 2000),
    ]
    assert assert_never_behind(java, ours, LIFE_2, END) == 999


def test_b3_what_was_translated_before_the_restart_still_is(java):
    ours = restarted(java, [], is_readable=False)

    assert theirs(java, 500, 1500) == [-1, 1415]
    assert [ours.translated(at) for at in (500, 1500)] == [405, 1415]


def test_b4_a_group_that_stands_still_is_emitted_and_never_moved_back(java):
    ours = restarted(java, [], is_readable=False)
    assert java.emitted(ORDERS, 500) is None
    assert ours.emitted(500) == 405

    # The group had 1213 in the target; MirrorMaker does not compare.
    later = restarted(java, [checkpoint(1250, 1213)], is_readable=False, committed=1213)
    assert java.emitted(ORDERS, 1250) == 1000
    assert later.emitted(1250) is None


@pytest.mark.parametrize("offset", [0, 1, 500, 998, 999, 1500, 1999, 2000, 2001])
def test_an_offset_of_a_replica_that_keeps_offsets_is_exact_in_all_of_them(offset):
    assert preserved(offset, Log(0, END)).offset == min(offset, END)


# -- the topics of a broker ------------------------------------------------------------------------


def test_a1_a2_of_topics_that_logmirror_wrote(java, kafka_431, topic_name):
    servers = kafka_431.bootstrap
    with ClusterClient(connection_settings(servers, {})) as client:
        create_sync_topic(client, topic_name, SYSTEM_CLOCK, mirror="m")
        checkpoints = f"{topic_name}.checkpoints.internal"
        kafka_431.create_topic(checkpoints, config={"cleanup.policy": "compact"})
        produce(servers, checkpoints, [Message(*checkpoint(500, 405))])
        rule = SyncRule()
        with client.pipeline() as pipeline:
            writer = OffsetSyncWriter(pipeline, topic_name, SYSTEM_CLOCK, mirror="m")
            for number in range(2):
                due = rule.due([Run(1000 * number, 1000 * number, 1000)]) + rule.flush()
                writer.write(ORDERS, due)
                writer.finish()
        reader = SyncReader(client, syncs_topic(topic_name), RecordDecoder())
        assert reader.refresh()
        ours = Ours([], [checkpoint(500, 405)])
        ours.indexes = lambda: reader.indexes
    assert java.read_topics(task(servers, topic_name))

    assert java.slots(ORDERS) == [1999, 1919, 1818, 1616, 808, 0]
    assert assert_never_behind(java, ours, LIFE_2, END) == 0
    assert java.emitted(ORDERS, 500) is ours.emitted(500) is None


def task(servers: str, alias: str) -> dict[str, object]:
    """The configuration of MirrorMaker's checkpoint task, with one alias for both clusters."""
    return {
        "name": "checkpoints",
        "connector.class": "org.apache.kafka.connect.mirror.MirrorCheckpointConnector",
        "source.cluster.alias": alias,
        "target.cluster.alias": alias,
        "source.cluster.bootstrap.servers": servers,
        "target.cluster.bootstrap.servers": servers,
        "task.assigned.groups": "g",
    }
