"""Whom a request goes to, and again when that has changed: leaders, any broker, the controller.

Invariants:
1. One request per leader, however many partitions are asked about.
2. What was answered is kept; only the rest is asked again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from logmirror.cluster.retry import MISSING_GRACE_MS, Retrier
from logmirror.cluster.topology import Topology
from logmirror.errors import CorruptionError, LogmirrorError, OutcomeUnknownError
from logmirror.wire.messages import api_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.connection import Connection
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import PartitionMetadata
    from logmirror.model import TopicPartition

_T = TypeVar("_T")

if TYPE_CHECKING:
    LeaderCall: TypeAlias = Callable[
        [Connection, Mapping[TopicPartition, PartitionMetadata]],
        dict[TopicPartition, _T | LogmirrorError],
    ]
    """One request to one leader about the partitions that it leads.

    Returns what each was answered: a value, or the error that its code stands for. Raises when
    nothing was answered at all.
    """


class Router:
    """What the operations on one cluster share. Not thread-safe.

    Args:
        settings: Of the cluster.
        clock: For deadlines and pauses.
    """

    def __init__(self, settings: ConnectionSettings, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.topology = Topology(settings, clock)
        self.retry = Retrier(settings, clock, self.topology.forget)

    def ask_leaders(
        self,
        partitions: Iterable[TopicPartition],
        call: LeaderCall[_T],
        action: str,
        *,
        writes: bool = False,
        **facts: object,
    ) -> dict[TopicPartition, _T]:
        """Ask each partition's leader, and those that failed again, until all have answered.

        Args:
            partitions: Any number, of any topics.
            call: Called once per leader and attempt.
            action: Fits before " within": "could not look up offsets".
            writes: See `Retrier`.
            facts: Added to every error.

        Raises:
            UsageError: A topic or partition does not exist, or we may not see it.
            UnavailableError: A partition had no reachable leader within the budget.
            OutcomeUnknownError: With `writes`: a partition's answer is lost.
        """
        found: dict[TopicPartition, _T] = {}
        wanted = dict.fromkeys(partitions)

        def attempt() -> None:
            remaining = [partition for partition in wanted if partition not in found]
            self.ask_leaders_once(remaining, call, found)

        if wanted:
            self.retry.run(
                attempt, action, missing_grace_ms=MISSING_GRACE_MS, writes=writes, **facts
            )
        return found

    def ask_leaders_once(
        self,
        partitions: Iterable[TopicPartition],
        call: LeaderCall[_T],
        found: dict[TopicPartition, _T],
    ) -> None:
        """Put into `found` what can be had now, then raise a failure, if there was one.

        An unknown outcome goes before all others: it must not be tried again.
        """
        failures: list[LogmirrorError] = []
        for partition, response in self.each_leader(partitions, call).items():
            if isinstance(response, LogmirrorError):
                failures.append(response)
            else:
                found[partition] = response
        if failures:
            raise min(failures, key=lambda error: not isinstance(error, OutcomeUnknownError))

    def each_leader(
        self, partitions: Iterable[TopicPartition], call: LeaderCall[_T]
    ) -> dict[TopicPartition, _T | LogmirrorError]:
        """Ask each leader once; every partition gets its answer or its error."""
        wanted = list(partitions)
        self.topology.ensure(partition.topic for partition in wanted)
        responses: dict[TopicPartition, _T | LogmirrorError] = {}
        by_leader: dict[int, dict[TopicPartition, PartitionMetadata]] = {}
        for partition in wanted:
            try:
                metadata = self.topology.partition(partition)
            except LogmirrorError as error:
                responses[partition] = error
            else:
                by_leader.setdefault(metadata.leader, {})[partition] = metadata
        for leader, led in by_leader.items():
            try:
                told = call(self.topology.connection(leader), led)
            except LogmirrorError as error:
                responses |= dict.fromkeys(led, error)
            else:
                for partition in led:
                    responses[partition] = (
                        told[partition] if partition in told else _left_out(partition)
                    )
        return responses


def _left_out(partition: TopicPartition) -> LogmirrorError:
    return CorruptionError(
        "a broker's answer leaves out a partition that it was asked about",
        topic=partition.topic,
        partition=partition.partition,
    )


def by_topic(
    partitions: Iterable[TopicPartition], entry: Callable[[TopicPartition], Any]
) -> dict[str, list[Any]]:
    """Group partitions as requests do: topic to one `entry` per partition."""
    topics: dict[str, list[Any]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(entry(partition))
    return topics


def read_entries(
    entries: Iterable[tuple[TopicPartition, Any]], value: Callable[[Any], _T], action: str
) -> dict[TopicPartition, _T | LogmirrorError]:
    """Read a leader's answer: a value per partition, or what its `error_code` stands for."""
    return {
        partition: api_error(
            entry.error_code,
            action=action,
            topic=partition.topic,
            partition=partition.partition,
        )
        if entry.error_code
        else value(entry)
        for partition, entry in entries
    }
