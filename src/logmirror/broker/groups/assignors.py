"""The server-side assignors of KIP-848: which member shall have which partitions.

Each takes the members with the topics that they subscribe to, and returns a set of partitions for
each member. Every partition of a subscribed topic goes to exactly one of its subscribers.

- `uniform` keeps what members have as far as the shares stay balanced: with equal subscriptions
  they differ by one partition at most.
- `range` gives each member a contiguous range of every topic, in the order of the members' names,
  so that partitions with the same number of different topics go to the same member.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TopicPartition = tuple[bytes, int]
"""Topic ID and partition."""

Shares = dict[str, set[TopicPartition]]


def assign_range(
    subscriptions: Mapping[str, frozenset[bytes]],
    partition_counts: Mapping[bytes, int],
    current: Mapping[str, set[TopicPartition]],  # noqa: ARG001  # as the other assignor
) -> Shares:
    """Assign contiguous ranges of each topic.

    Args:
        subscriptions: Topic IDs by member.
        partition_counts: Partitions of each topic that exists.
        current: What each member has now; not used.
    """
    shares: Shares = {member: set() for member in subscriptions}
    for topic, subscribers in _subscribers(subscriptions, partition_counts).items():
        size, extra = divmod(partition_counts[topic], len(subscribers))
        start = 0
        for place, member in enumerate(subscribers):
            end = start + size + (place < extra)
            shares[member] |= {(topic, number) for number in range(start, end)}
            start = end
    return shares


def _subscribers(
    subscriptions: Mapping[str, frozenset[bytes]], partition_counts: Mapping[bytes, int]
) -> dict[bytes, list[str]]:
    """Return the members of each subscribed topic that exists, in the order of their names."""
    found: dict[bytes, list[str]] = {}
    for member in sorted(subscriptions):
        for topic in subscriptions[member]:
            if topic in partition_counts:
                found.setdefault(topic, []).append(member)
    return found


def assign_uniform(
    subscriptions: Mapping[str, frozenset[bytes]],
    partition_counts: Mapping[bytes, int],
    current: Mapping[str, set[TopicPartition]],
) -> Shares:
    """Assign equal shares, and move as little as that allows.

    Args:
        subscriptions: Topic IDs by member.
        partition_counts: Partitions of each topic that exists.
        current: What each member has now.
    """
    shares = _kept(subscriptions, partition_counts, current)
    taken = set().union(*shares.values())
    members = _subscribers(subscriptions, partition_counts)
    heaps: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for topic in sorted(members, key=lambda one: (len(members[one]), one)):
        subscribers = tuple(members[topic])
        heap = heaps.get(subscribers)
        if heap is None:
            heap = heaps[subscribers] = [(len(shares[one]), one) for one in subscribers]
            heapq.heapify(heap)
        for number in range(partition_counts[topic]):
            if (topic, number) not in taken:
                shares[_smallest(heap, shares)].add((topic, number))
    return shares


def _smallest(heap: list[tuple[int, str]], shares: Shares) -> str:
    """Return the member of a heap with the smallest share. Its sizes may be out of date."""
    while True:
        size, member = heap[0]
        actual = len(shares[member])
        if size == actual:
            heapq.heapreplace(heap, (actual + 1, member))
            return member
        heapq.heapreplace(heap, (actual, member))


def _kept(
    subscriptions: Mapping[str, frozenset[bytes]],
    partition_counts: Mapping[bytes, int],
    current: Mapping[str, set[TopicPartition]],
) -> Shares:
    """Return what members may keep: at most their fair part of each set of common subscribers."""
    wanted = set().union(*subscriptions.values())
    total = sum(count for topic, count in partition_counts.items() if topic in wanted)
    fair, extra = divmod(total, max(1, len(subscriptions)))
    kept: Shares = {}
    for member in sorted(subscriptions, key=lambda one: (-len(current.get(one, ())), one)):
        topics = subscriptions[member]
        has = sorted(
            (topic, number)
            for topic, number in current.get(member, ())
            if topic in topics and number < partition_counts.get(topic, 0)
        )
        limit = fair + (extra > 0 and len(has) > fair)
        extra -= limit > fair
        kept[member] = set(has[:limit])
    return kept


ASSIGNORS: Final[dict[str, Callable[..., Shares]]] = {
    "uniform": assign_uniform,
    "range": assign_range,
}
"""By name; the first is the default."""

DEFAULT_ASSIGNOR: Final = "uniform"
