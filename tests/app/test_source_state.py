"""What `status` reads of a source: each leader epoch once, however many flows copied with it.

Method: a source that records what it is asked, and knows one epoch of each partition.
"""

from __future__ import annotations

from logmirror.app.source_state import read_states
from logmirror.cluster.client import EARLIEST
from logmirror.model import EpochEnd, TopicPartition

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


class Source:
    """Two topics, of which `b` is compacted. The log of both has epoch 3, which ends at 20."""

    def __init__(self) -> None:
        self.epochs: list[dict[TopicPartition, int]] = []
        self.configs: list[str] = []

    def list_offsets(self, partitions, at):
        return dict.fromkeys(partitions, 5 if at == EARLIEST else 20)

    def epoch_ends(self, epochs):
        self.epochs.append(epochs)
        return {where: EpochEnd(3, 20) if epoch >= 3 else None for where, epoch in epochs.items()}

    def describe_topic_configs(self, topic):
        self.configs.append(topic)
        return {"cleanup.policy": "compact,delete" if topic == "b" else "delete"}


def test_epochs_are_looked_up_one_per_partition_at_a_time():
    source = Source()

    states = read_states(source, {A: {-1, 2, 3}, B: {3}})

    assert source.epochs == [{A: 2, B: 3}, {A: 3}]
    assert dict(states[A].epoch_ends) == {2: None, 3: EpochEnd(3, 20)}
    assert (states[A].log_start, states[A].last_stable_offset) == (5, 20)


def test_nothing_is_looked_up_without_an_epoch():
    source = Source()

    states = read_states(source, {A: {-1}, B: set()})

    assert source.epochs == source.configs == []
    assert not states[B].epoch_ends


def test_cleanup_policies_are_read_where_an_epoch_is_not_in_the_log():
    source = Source()

    states = read_states(source, {A: {3}, B: {4}})

    assert source.configs == ["b"]
    assert (states[A].is_compacted, states[B].is_compacted) == (False, True)
