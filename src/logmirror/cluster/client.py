"""A Kafka cluster as its client sees it: topics, offsets, raw batches, writing.

Invariants:
1. Every operation ends: retriable errors are retried with growing, jittered pauses until
   `retry_budget_ms` has passed, and then are an `UnavailableError` with the last cause.
2. Requests go to the current leader of a partition. A broker that no longer leads refuses them
   (leader epochs are sent), and the leader is looked up again.
3. Records of a recreated topic are never taken for the old topic's: with a topic ID, the broker
   checks it if it can, otherwise each lookup of leaders does.
4. Reading creates and writes nothing. What writes says so, and is never sent again after a lost
   response: that is an `OutcomeUnknownError`, and the caller reads the result.

One client belongs to one thread of one process. It is not picklable; `ConnectionSettings` is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn, Self

from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.admin import Admin
from logmirror.cluster.fetch_ahead import FetchAhead
from logmirror.cluster.groups import Groups
from logmirror.cluster.leader_epochs import LeaderEpochs
from logmirror.cluster.lease import Lease
from logmirror.cluster.log_dirs import LogDirs
from logmirror.cluster.offsets import (
    EARLIEST,
    LATEST,
    NO_OFFSET,
    LogEnd,
    Offsets,
    ProducerState,
)
from logmirror.cluster.produce import ProducePipeline
from logmirror.cluster.retry import MISSING_GRACE_MS
from logmirror.cluster.router import Router
from logmirror.cluster.transactions import TransactionalProducer
from logmirror.errors import LogmirrorError, PositionError, UnavailableError
from logmirror.wire.fetch import Fetched, FetchHead, FetchRequest
from logmirror.wire.messages import (
    INCONSISTENT_TOPIC_ID,
    OFFSET_OUT_OF_RANGE,
    UNKNOWN_TOPIC_ID,
    api_error,
)
from logmirror.wire.produce import ACKS_ALL

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.model import EpochEnd, TopicPartition

__all__ = ["EARLIEST", "LATEST", "NO_OFFSET", "ClusterClient", "FetchResult"]


class FetchResult(NamedTuple):
    """The result of one fetch. The records are at the start of the caller's view."""

    size: int
    """Bytes in the view. The last batch may be truncated; the first may begin before the offset."""
    high_watermark: int
    last_stable_offset: int
    """The end of what a read_committed consumer may read; -1 if the broker does not report it."""
    log_start_offset: int
    """-1 if the broker does not report it."""
    aborted: tuple[tuple[int, int], ...]
    """(producer ID, first offset) of aborted transactions in these records; read_committed only."""
    needed_bytes: int
    """0, or the size of the first batch if it is larger than the view; then `size` is 0."""
    diverging: EpochEnd | None = None
    """Not None: the log does not hold the `last_epoch` of the request up to its offset, and no
    records were fetched. The epoch that it does hold, and where that one ends."""


class ClusterClient:
    """A client of one cluster. It connects on first use.

    Args:
        settings: The connection settings.
        clock: For deadlines and pauses.

    Raises:
        UsageError: Certificates or keys cannot be loaded.
    """

    def __init__(self, settings: ConnectionSettings, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings = settings
        self._router = Router(settings, clock)
        self._topology = self._router.topology
        self._ahead = FetchAhead(self._topology)
        self._retry = self._router.retry
        self._offsets = Offsets(self._router)
        self._epochs = LeaderEpochs(self._router)
        self.admin = Admin(self._router)
        """Creates, changes and deletes: topics, partitions, records, markers."""
        self.groups = Groups(self._router)
        """Consumer groups and their committed offsets."""
        self.log_dirs = LogDirs(self._router)
        """Log directories, and moves of replicas between them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        message = "a ClusterClient cannot be pickled; send its ConnectionSettings"
        raise TypeError(message)

    def close(self) -> None:
        """Close all connections. May be called again."""
        self._ahead.close()
        self._topology.close()

    def cluster_id(self) -> str:
        """The cluster ID, which never changes.

        Raises:
            UnavailableError: No broker responded within the budget, or the cluster has no ID.
        """

        def attempt() -> str | None:
            self._topology.refresh([])
            return self._topology.cluster_id

        found = self._retry.run(attempt, "could not read the cluster id")
        if not found:
            raise UnavailableError("the cluster has no cluster ID yet")
        return found

    def topic(self, name: str) -> TopicMetadata:
        """Describe one topic, with a new request.

        Raises:
            UsageError: It does not exist, or is not visible to this user. It is not created.
            UnavailableError: No broker responded within the budget.
        """
        return self._retry.run(
            lambda: self._topology.topic(name), "could not describe the topic", topic=name
        )

    def describe_topics(self, names: Iterable[str]) -> dict[str, TopicMetadata]:
        """Describe topics with one new request; see `topic` for errors."""
        wanted = list(names)
        return self._retry.run(
            lambda: self._topology.refresh(wanted), "could not describe topics", topics=len(wanted)
        )

    def topics(self) -> list[str]:
        """The names of all visible topics, sorted, including internal ones."""
        return self._retry.run(self._topology.topics, "could not list the topics")

    def describe_topic_configs(self, name: str) -> dict[str, str | None]:
        """The topic's effective configuration, including defaults; a secret value is None.

        Raises:
            UsageError: The topic does not exist, or permission is missing.
            UnavailableError: No broker responded within the budget.
        """
        return self.admin.topic_configs(name)

    def describe_configs_of_topics(
        self, names: Collection[str], keys: Sequence[str]
    ) -> dict[str, dict[str, str | None]]:
        """Some configurations of several topics, with one request.

        Topics that do not exist, or whose configuration may not be read, are left out.

        Raises:
            UnavailableError: No broker responded within the budget.
        """
        return self.admin.configs_of_topics(names, keys)

    def list_offsets(
        self, partitions: Iterable[TopicPartition], at: int, *, read_committed: bool = True
    ) -> dict[TopicPartition, int]:
        """Look up one offset per partition, with one request per leader.

        Args:
            partitions: Any number, of any topics.
            at: `EARLIEST`, `LATEST`, or milliseconds since 1970 for the first record at or after.
            read_committed: Makes `LATEST` the last stable offset instead of the high watermark.

        Returns:
            An offset for each partition; by time `NO_OFFSET` if no record qualifies.

        Raises:
            UsageError: A topic or partition does not exist, or is not visible to this user.
            UnavailableError: A partition had no reachable leader within the budget.
        """
        return self._offsets.list_offsets(partitions, at, read_committed=read_committed)

    def try_list_offsets(
        self, partitions: Iterable[TopicPartition], at: int
    ) -> dict[TopicPartition, int | LogmirrorError]:
        """Look up one offset per partition as `list_offsets` does, but without retries.

        Returns:
            An offset for each partition, or its error. An error is not raised.
        """
        return self._offsets.try_list_offsets(partitions, at)

    def log_ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, LogEnd]:
        """Look up log end offsets, with one request per leader.

        `LATEST` is the high watermark, which excludes records that the leader has appended and the
        followers have not replicated. After a lost response those matter. This requests the end of
        the leader's current epoch (OffsetForLeaderEpoch), to which only the leader responds.

        Raises:
            UsageError: A topic or partition does not exist, is not visible to this user, or the
                brokers are older than Apache Kafka 2.1.
            UnavailableError: A partition had no reachable leader within the budget.
        """
        return self._offsets.log_ends(partitions)

    def epoch_ends(
        self, epochs: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, EpochEnd | None]:
        """Look up where leader epochs end (OffsetForLeaderEpoch), with one request per leader.

        Args:
            epochs: For each partition the leader epoch of a batch that was read.

        Returns:
            For each partition the largest epoch of the log that is not above the given one, and its
            end. None if the log has no such epoch, or the brokers have no leader epochs (before
            Apache Kafka 2.1).

        Raises:
            UsageError: A topic or partition does not exist, or is not visible to this user.
            UnavailableError: A partition had no reachable leader within the budget.
        """
        return self._epochs.ends(epochs)

    def producer_states(
        self, producer_ids: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, ProducerState | None]:
        """Look up producer states, with one request per leader.

        Args:
            producer_ids: One for each partition.

        Returns:
            The state for each partition. None if the leader has no state of the producer, and so
            accepts any first sequence from it.

        Raises:
            UsageError: A topic or partition does not exist, is not readable by this user, or the
                brokers are older than Apache Kafka 2.8.
            UnavailableError: A partition had no reachable leader within the budget.
        """
        return self._offsets.producer_states(producer_ids)

    def pipeline(
        self,
        *,
        acks: int = ACKS_ALL,
        timeout_ms: int | None = None,
        transactional_id: str | None = None,
    ) -> ProducePipeline:
        """Create a `ProducePipeline`, which the caller closes before the client.

        It has its own connections, and shares the client's metadata.
        """
        return ProducePipeline(
            self._router, acks=acks, timeout_ms=timeout_ms, transactional_id=transactional_id
        )

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = 60_000
    ) -> TransactionalProducer:
        """Create a `TransactionalProducer`; sends no request."""
        return TransactionalProducer(self._router, transactional_id, timeout_ms=timeout_ms)

    def has_leases(self) -> bool:
        """Whether `lease` can be used: Apache Kafka 3.0 or later.

        Raises:
            UnavailableError: No broker responded within the budget.
        """

        def attempt() -> bool:
            return Lease.is_offered(self._router.topology.any_connection().versions)

        return self._router.retry.run(attempt, "could not read the API versions")

    def lease(self, transactional_id: str) -> Lease:
        """Create a `Lease`; sends no request."""
        return Lease(self._router, transactional_id)

    def fetch(  # noqa: PLR0913  # the parts of a fetch; the mirror passes four
        self,
        partition: TopicPartition,
        offset: int,
        view: memoryview,
        *,
        topic_id: bytes | None,
        max_wait_ms: int = 500,
        min_bytes: int = 1,
        read_committed: bool = True,
        last_epoch: int = -1,
    ) -> FetchResult:
        """Fetch raw batches into `view`.

        Args:
            partition: The partition.
            offset: The first offset to fetch; the first batch may begin before it.
            view: Writable bytes; its length is the fetch size. A broker also sends a larger first
                batch: then the view stays empty, and `needed_bytes` is the size required. Call
                again with a larger view.
            topic_id: 16 bytes from `topic`; None fetches by name, from any topic of that name.
            max_wait_ms: How long the broker may wait for `min_bytes`.
            min_bytes: The broker sends fewer bytes only after `max_wait_ms`.
            read_committed: End at the last stable offset and list aborted transactions. Their
                batches and the markers are in the view as well.
            last_epoch: The leader epoch of the batch before `offset`, which the log must have up to
                there (KIP-320); -1: not compared.

        Raises:
            PositionError: The offset is outside the log (facts `log_start_offset` and
                `log_end_offset` if they could be read), or the topic was recreated.
            UsageError: The topic or partition does not exist, or is not readable by this user.
            UnavailableError: No leader responded within the budget.
            CorruptionError: A broker's response contradicts itself.
        """
        wanted = FetchRequest(
            partition.topic,
            topic_id,
            partition.partition,
            -1,
            offset,
            len(view),
            max_wait_ms,
            min_bytes,
            read_committed,
            last_epoch,
        )
        fetched = self._ahead.take(partition, wanted, view) or self._retry.run(
            lambda: self._fetch_once(partition, wanted, view),
            "could not fetch",
            missing_grace_ms=MISSING_GRACE_MS,
            topic=partition.topic,
            partition=partition.partition,
        )
        head = fetched.head
        return FetchResult(
            fetched.size,
            head.high_watermark,
            head.last_stable_offset,
            head.log_start_offset,
            head.aborted,
            fetched.needed_bytes,
            head.diverging,
        )

    def fetch_ahead(
        self,
        partition: TopicPartition,
        offset: int,
        size: int,
        *,
        topic_id: bytes | None,
        last_epoch: int = -1,
    ) -> None:
        """Prefetch: send the next fetch now, so that its response arrives meanwhile.

        Does not wait for the response, only for the leader's address and connection if necessary.
        The next `fetch` of the partition uses the response if it has the same offset and topic ID,
        and is read_committed. An unused prefetch does no harm.

        Args:
            partition: The partition.
            offset: As in the next `fetch`; records should be available there.
            size: The length of the next view, in bytes.
            topic_id: As in the next `fetch`.
            last_epoch: As in the next `fetch`.
        """
        wanted = (partition.topic, topic_id, partition.partition, -1, offset, size, 0, 1, True)
        self._ahead.ask(partition, FetchRequest(*wanted, last_epoch))

    def _fetch_once(
        self, partition: TopicPartition, wanted: FetchRequest, view: memoryview
    ) -> Fetched:
        topic_id = wanted.topic_id
        metadata = self._topology.partition(partition)
        connection = self._topology.connection(metadata.leader)
        by_id = topic_id is not None and connection.speaks_topic_ids()
        if topic_id is not None and not by_id:
            self._check_topic_id(partition.topic, topic_id)
        last_epoch = wanted.last_fetched_epoch
        if last_epoch > metadata.leader_epoch:
            last_epoch = -1  # no log of this leader has it; the position is compared at a start
        if last_epoch >= 0 and not connection.checks_fetched_epochs(by_id=by_id):
            end = self._epochs.diverging(partition, wanted.offset, last_epoch, metadata)
            if end is not None:
                return Fetched(FetchHead(0, -1, -1, -1, (), 0, 0, 0, diverging=end), 0, 0)
        request = wanted._replace(
            topic_id=topic_id if by_id else None,
            leader_epoch=metadata.leader_epoch,
            last_fetched_epoch=last_epoch,
        )
        fetched = connection.fetch(request, view)
        if fetched.head.error_code:
            self._refuse(fetched.head.error_code, partition, wanted.offset, topic_id)
        return fetched

    def _check_topic_id(self, name: str, expected: bytes) -> None:
        """Compare with the topic ID in the metadata, for brokers whose Fetch cannot check it."""
        current = self._topology.known(name).topic_id
        if current is not None and current != expected:
            raise _recreated(name, expected, current)

    def _refuse(
        self, code: int, partition: TopicPartition, offset: int, topic_id: bytes | None
    ) -> NoReturn:
        """Raise the error for a Fetch error code."""
        facts = {"topic": partition.topic, "partition": partition.partition, "offset": offset}
        if code in (UNKNOWN_TOPIC_ID, INCONSISTENT_TOPIC_ID) and topic_id is not None:
            current = self._topology.topic(partition.topic).topic_id
            if current is not None and current != topic_id:
                raise _recreated(partition.topic, topic_id, current)
        if code == OFFSET_OUT_OF_RANGE:
            raise PositionError(
                "the offset is outside the partition's log",
                hint="retention, DeleteRecords or a truncation moved the log start or the log end",
                **facts,
                **self._bounds(partition),
            )
        raise api_error(code, action="could not fetch", **facts)

    def _bounds(self, partition: TopicPartition) -> dict[str, int]:
        """The log's bounds, as facts of an error; empty if the one request for them fails."""
        bounds: dict[str, int] = {}
        for name, at in (("log_start_offset", EARLIEST), ("log_end_offset", LATEST)):
            offset = self._offsets.list_offsets_once(partition, at, read_committed=False)
            if offset is not None:
                bounds[name] = offset
        return bounds


def _recreated(topic: str, expected: bytes, found: bytes) -> PositionError:
    return PositionError(
        "the topic was deleted and created again",
        hint="its old records are deleted; the replica ends here. Mirror the new topic elsewhere.",
        reason="SourceRecreated",
        topic=topic,
        expected_topic_id=expected.hex(),
        found_topic_id=found.hex(),
    )
