"""Routing: which broker a request goes to, and retries when that changes.

Invariants:
1. One request per leader, for any number of partitions.
2. Results are kept; only partitions without a result are requested again.
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

    Returns the result of each: a value, or the error for its error code. Raises if there was no
    response.
    """


class Router:
    """Sends the requests of one cluster's operations. Not thread-safe.

    Args:
        settings: The connection settings.
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
        """Send requests to the leaders, and retry failed partitions, until all have a result.

        Args:
            partitions: Any number, of any topics.
            call: Called once per leader and attempt.
            action: The start of error messages, such as "could not look up offsets".
            writes: See `Retrier`.
            facts: Added to every error.

        Raises:
            UsageError: A topic or partition does not exist, or is not visible to this user.
            UnavailableError: A partition had no reachable leader within the budget.
            OutcomeUnknownError: With `writes`: a partition's response is lost.
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
        """Add the results to `found`, then raise an error if there was one.

        An unknown outcome is raised before other errors, because it must not be retried.
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
        """Send one request to each leader; every partition gets a value or an error."""
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
                results = call(self.topology.connection(leader), led)
            except LogmirrorError as error:
                responses |= dict.fromkeys(led, error)
            else:
                for partition in led:
                    responses[partition] = (
                        results[partition] if partition in results else _left_out(partition)
                    )
        return responses


def _left_out(partition: TopicPartition) -> LogmirrorError:
    return CorruptionError(
        "a broker's response does not contain a requested partition",
        topic=partition.topic,
        partition=partition.partition,
    )


def by_topic(
    partitions: Iterable[TopicPartition], entry: Callable[[TopicPartition], Any]
) -> dict[str, list[Any]]:
    """Group partitions by topic, with one `entry` per partition, as requests do."""
    topics: dict[str, list[Any]] = {}
    for partition in partitions:
        topics.setdefault(partition.topic, []).append(entry(partition))
    return topics


def read_entries(
    entries: Iterable[tuple[TopicPartition, Any]], value: Callable[[Any], _T], action: str
) -> dict[TopicPartition, _T | LogmirrorError]:
    """Read a leader's response: a value per partition, or the error for its `error_code`."""
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
