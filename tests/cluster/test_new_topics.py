"""Goal: after a topic was created its leader is waited for, but not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from logmirror.clock import Clock
from logmirror.cluster.new_topics import await_leader
from logmirror.cluster.retry import NotFoundError
from logmirror.cluster.topology import PartitionMetadata, TopicMetadata
from logmirror.errors import LogmirrorError, UnavailableError, UsageError
from logmirror.model import TopicPartition

WHERE = TopicPartition("orders", 0)


class Cluster(Clock):
    """Returns what was given, one after the other, the last one for ever. Time stands still
    between the waits."""

    def __init__(self, *leaders: int | LogmirrorError, lists: LogmirrorError | None = None) -> None:
        self.leaders, self.lists, self.time_ms, self.listed = list(leaders), lists, 0, 0

    def topic(self, name: str) -> TopicMetadata:
        leader = self.leaders.pop(0) if len(self.leaders) > 1 else self.leaders[0]
        if isinstance(leader, LogmirrorError):
            raise leader
        found = PartitionMetadata(leader=leader, leader_epoch=0, error=0 if leader >= 0 else 5)
        return TopicMetadata(name=name, topic_id=None, partitions={0: found})

    def list_offsets(self, partitions: Any, _: int) -> None:
        assert partitions == [WHERE]
        self.listed += 1
        if self.lists is not None:
            raise self.lists

    def monotonic_ms(self) -> int:
        return self.time_ms

    def sleep_ms(self, duration_ms: float) -> None:
        self.time_ms += round(duration_ms)


def missing() -> NotFoundError:
    return NotFoundError("topic does not exist")


def test_a_topic_is_waited_for_until_it_has_a_leader_that_responds():
    cluster: Any = Cluster(missing(), -1, 1)
    await_leader(cluster, WHERE, cluster, timeout_ms=1_000)
    assert (cluster.time_ms, cluster.listed) == (200, 1)


@pytest.mark.parametrize("lists", [None, missing(), UnavailableError("no response")])
@pytest.mark.parametrize("leader", [missing(), -1, 1])
def test_the_wait_ends_with_what_is_missing(leader, lists):
    cluster: Any = Cluster(leader, lists=lists)
    if leader == 1 and lists is None:
        await_leader(cluster, WHERE, cluster, timeout_ms=1_000)
        return
    with pytest.raises(LogmirrorError) as raised:
        await_leader(cluster, WHERE, cluster, timeout_ms=1_000)
    expected = lists if leader == 1 else leader
    kind = type(expected) if isinstance(expected, LogmirrorError) else UnavailableError
    assert type(raised.value) is kind
    assert raised.value.facts == {"topic": "orders", "partition": 0}
    assert 1_000 <= cluster.time_ms <= 1_100


def test_a_refusal_is_not_waited_out():
    cluster: Any = Cluster(UsageError("not allowed"))
    with pytest.raises(UsageError):
        await_leader(cluster, WHERE, cluster, timeout_ms=1_000)
    assert cluster.time_ms == 0
