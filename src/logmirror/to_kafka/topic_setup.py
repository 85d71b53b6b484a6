"""Driver: creates the destination topic, adds partitions, and compares its settings.

    report = sync_topic(source, "orders", standby, "orders", mode="create", ...)

Invariants:
1. An existing topic is not changed, except that `create` adds missing partitions. The effect of its
   settings is reported instead (`topic_rules`).
2. A topic is never copied onto itself: clusters are compared by cluster ID, not by server name.
3. `check_topic` changes nothing.
4. After `sync_topic` each copied partition has one at the destination, unless the mode is `off`,
and
   the leaders of new partitions have responded.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.offsets import LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.errors import OutcomeUnknownError, UnavailableError, UsageError
from logmirror.model import TopicPartition
from logmirror.to_kafka.topic_rules import (
    Finding,
    cluster_findings,
    partition_findings,
    settings_for_copy,
    strictest,
    topic_findings,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.topology import TopicMetadata
    from logmirror.to_kafka.topic_rules import TimestampMode

TopicSync = Literal["create", "validate", "off"]
"""How the destination topic is set up; see `sync_topic`."""

_READY_MS: Final = 30_000
"""How long to wait for the leaders of a new topic: tenths of a second suffice with one broker, some
seconds in a busy cluster."""

_POLL_MS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicReport:
    """The result of `sync_topic`."""

    topic: str
    created: bool = False
    """Created by this call, as the broker confirmed: it had no earlier writer."""

    partitions_added: int = 0
    findings: tuple[Finding, ...] = ()
    """Warnings and notes; errors are raised."""


class UnfitTopicError(UsageError):
    """The settings of a destination topic would break the replica. Fact `findings`: all."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, errors first."""
        findings = self.facts.get("findings", ())
        return findings if isinstance(findings, tuple) else ()

    def __str__(self) -> str:
        lines = [f"{self.message} [topic={self.facts.get('topic')!r}]"]
        return "\n  ".join(lines + [str(finding) for finding in self.findings])


def sync_topic(  # noqa: PLR0913  # two topics and what the configuration says about them
    source: ClusterClient,
    source_topic: str,
    destination: ClusterClient,
    destination_topic: str,
    *,
    mode: TopicSync,
    replication_factor: int | None = None,
    timestamp_mode: TimestampMode = "source",
    partitions: Collection[int] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> TopicReport:
    """Set up the destination topic as far as the mode allows; see the invariants.

    May be called again at any time, to add partitions that the source got meanwhile.

    Args:
        source: The source cluster.
        source_topic: The topic to copy.
        destination: The destination cluster.
        destination_topic: The topic to write.
        mode: `create` creates it and adds partitions, `validate` only compares, `off` does neither.
        replication_factor: For a new topic; None or -1 for the cluster's default.
        timestamp_mode: Whether records keep their timestamps.
        partitions: The partitions to copy; None for all. Partitions are added for these only.
        clock: For deadlines.

    Raises:
        UnfitTopicError: The destination topic would break the replica; nothing that existed before
            was changed.
        UsageError: Both topics are the same, a topic does not exist, or permission is missing.
        UnavailableError: A cluster did not respond, or a new topic had no leaders in time.
    """
    _refuse_same_topic(source, source_topic, destination, destination_topic)
    if mode == "off":
        return TopicReport(topic=destination_topic)
    read_topics = functools.partial(
        _read_topics, source, source_topic, destination, destination_topic, partitions
    )
    topics, created, added = read_topics(), False, 0
    if mode == "create" and topics.target is None:
        created = _create(
            destination, destination_topic, topics, replication_factor, timestamp_mode
        )
        count = topics.needed if created else 1  # another client's topic may need partitions
        topics = _await_leaders(destination, destination_topic, count, read_topics, clock)
    findings = _fit(topics, mode, timestamp_mode)
    if (
        mode == "create"
        and topics.target is not None
        and len(topics.target.partitions) < topics.needed
    ):
        added = _grow(destination, topics.target, topics.needed)
        topics = _await_leaders(destination, destination_topic, topics.needed, read_topics, clock)
        findings = _fit(topics, mode, timestamp_mode)
    return TopicReport(
        topic=destination_topic, created=created, partitions_added=added, findings=findings
    )


def check_topic(  # noqa: PLR0913  # as sync_topic
    source: ClusterClient,
    source_topic: str,
    destination: ClusterClient,
    destination_topic: str,
    *,
    mode: TopicSync,
    timestamp_mode: TimestampMode = "source",
    partitions: Collection[int] | None = None,
) -> tuple[Finding, ...]:
    """Return what `sync_topic` would find, errors first. Changes nothing.

    With the mode `off` nothing is compared, as at the start.

    Raises:
        UsageError: Both topics are the same, the source topic does not exist, or permission is
            missing.
        UnavailableError: A cluster did not respond.
    """
    _refuse_same_topic(source, source_topic, destination, destination_topic)
    if mode == "off":
        return ()
    topics = _read_topics(source, source_topic, destination, destination_topic, partitions)
    return _findings(topics, mode=mode, timestamp_mode=timestamp_mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Topics:
    """Both topics at one moment."""

    target_name: str
    origin: TopicMetadata
    origin_configs: Mapping[str, str | None]
    target: TopicMetadata | None
    """None: it does not exist."""

    target_configs: Mapping[str, str | None]
    cluster_configs: Mapping[str, str | None] | None
    """The broker settings of the destination; None without permission to read them."""

    needed: int
    """The number of partitions that the destination must have."""


def _read_topics(
    source: ClusterClient,
    source_topic: str,
    destination: ClusterClient,
    destination_topic: str,
    partitions: Collection[int] | None,
) -> _Topics:
    origin, target = source.topic(source_topic), _find(destination, destination_topic)
    return _Topics(
        target_name=destination_topic,
        origin=origin,
        origin_configs=source.describe_topic_configs(source_topic),
        target=target,
        target_configs=(
            {} if target is None else destination.describe_topic_configs(destination_topic)
        ),
        cluster_configs=_broker_configs(destination),
        needed=len(origin.partitions) if partitions is None else max(partitions) + 1,
    )


def _refuse_same_topic(
    source: ClusterClient, source_topic: str, destination: ClusterClient, destination_topic: str
) -> None:
    if source_topic != destination_topic:
        return
    cluster_id = source.cluster_id()
    if cluster_id == destination.cluster_id():
        raise UsageError(
            "source and destination are the same topic of the same cluster",
            hint="name another cluster, or another topic",
            topic=source_topic,
            cluster_id=cluster_id,
        )


def _find(cluster: ClusterClient, topic: str) -> TopicMetadata | None:
    try:
        return cluster.topic(topic)
    except NotFoundError:
        return None


def _broker_configs(cluster: ClusterClient) -> Mapping[str, str | None] | None:
    """The broker settings; None without permission to read them, which is common."""
    try:
        return strictest(cluster.admin.broker_configs().values())
    except UsageError:
        return None


def _fit(topics: _Topics, mode: TopicSync, timestamp_mode: TimestampMode) -> tuple[Finding, ...]:
    """Return the findings if none is an error."""
    findings = _findings(topics, mode=mode, timestamp_mode=timestamp_mode)
    if any(finding.severity == "error" for finding in findings):
        raise UnfitTopicError(
            "the destination topic would break the replica",
            hint="follow the advice after each error, or set `topic-sync: off` to skip the check",
            topic=topics.target_name,
            findings=findings,
        )
    return findings


def _findings(
    topics: _Topics, *, mode: TopicSync, timestamp_mode: TimestampMode
) -> tuple[Finding, ...]:
    """All findings, errors first."""
    creates = mode == "create"
    found = list(cluster_findings(topics.origin_configs, topics.cluster_configs))
    if topics.target is None:
        missing = Finding(
            severity="note" if creates else "error",
            setting="topic",
            source=topics.origin.name,
            destination=None,
            advice="created at the start" if creates else "create it, or set topic-sync: create",
        )
        found.append(missing)
    else:
        counts = len(topics.origin.partitions), len(topics.target.partitions)
        found += partition_findings(*counts, needed=topics.needed, grows=creates)
        found += topic_findings(
            topics.origin_configs, topics.target_configs, timestamp_mode=timestamp_mode
        )
    order = ("error", "warning", "note")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


# -- changing the destination ----------------------------------------------------------------------


def _create(
    cluster: ClusterClient,
    topic: str,
    topics: _Topics,
    replication_factor: int | None,
    timestamp_mode: TimestampMode,
) -> bool:
    """Create a topic; False if it exists and another client may have created it.

    After a lost response the topic's existence decides (I7).
    """
    try:
        cluster.admin.create_topic(
            topic,
            partition_count=len(topics.origin.partitions),
            replication_factor=-1 if replication_factor is None else replication_factor,
            configs=settings_for_copy(
                topics.origin_configs, topics.cluster_configs, timestamp_mode=timestamp_mode
            ),
        )
    except OutcomeUnknownError:
        if _find(cluster, topic) is None:
            raise
    except UsageError as error:
        if error.facts.get("error") != "TOPIC_ALREADY_EXISTS":
            raise
    else:
        return True
    return False


def _grow(cluster: ClusterClient, target: TopicMetadata, partition_count: int) -> int:
    """Add the missing partitions; return how many."""
    try:
        cluster.admin.create_partitions(target.name, partition_count)
    except (OutcomeUnknownError, UsageError):
        # Another client may have added them, or this request did and its response was lost.
        if len(cluster.topic(target.name).partitions) < partition_count:
            raise
    return partition_count - len(target.partitions)


def _await_leaders(
    cluster: ClusterClient,
    topic: str,
    partition_count: int,
    read_topics: Callable[[], _Topics],
    clock: Clock,
) -> _Topics:
    """Wait until each partition has a leader in the metadata, and the leaders respond.

    Metadata reaches brokers one by one, and may name a leader that does not serve requests yet.
    """
    deadline_ms = clock.monotonic_ms() + _READY_MS
    while True:
        with contextlib.suppress(NotFoundError):
            topics = read_topics()
            if topics.target is not None and _has_leaders(topics.target, partition_count):
                numbers = range(partition_count)
                cluster.list_offsets((TopicPartition(topic, n) for n in numbers), LATEST)
                return topics
        if clock.monotonic_ms() >= deadline_ms:
            raise UnavailableError(
                f"the topic has no leaders {_READY_MS} ms after it was created",
                hint="too few brokers may be up for its replication factor",
                topic=topic,
                partitions=partition_count,
            )
        clock.sleep_ms(_POLL_MS)


def _has_leaders(topic: TopicMetadata, partition_count: int) -> bool:
    return len(topic.partitions) >= partition_count and all(
        one.leader >= 0 for one in topic.partitions.values()
    )
