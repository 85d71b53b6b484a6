"""Driver: the topic that receives a copy is made, follows the source's partitions, and is compared.

    report = sync_topic(source, "orders", standby, "orders", mode="create", ...)

Invariants:
1. A topic that exists is never changed but for partitions that are added, and that only with
   `create`. What its settings would do to the copy is said instead (`topic_rules`).
2. A topic is never copied onto itself: clusters are compared by their id, whatever their servers
   are called.
3. `check_topic` changes nothing anywhere.
4. After `sync_topic` each partition that is copied has one at the destination, unless the mode is
   `off`; the leaders of new ones have answered.
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
"""What is done about the destination's topic; see `sync_topic`."""

_READY_MS: Final = 30_000
"""How long a new topic may take until each partition has a leader: some tenths of a second with one
broker, some seconds in a busy cluster."""

_LOOK_AGAIN_MS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicReport:
    """What became of a destination topic."""

    topic: str
    created: bool = False
    """We made it, and were told so: nobody can have written to it before."""

    partitions_added: int = 0
    findings: tuple[Finding, ...] = ()
    """Warnings and notes; an error is raised instead."""


class UnfitTopicError(UsageError):
    """The settings of a destination topic would break the copy. Fact `findings`: all of them."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that was found, errors first."""
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
    """Make the destination topic fit for a copy, as far as the mode allows; see the invariants.

    May be called again at any time: it follows partitions that the source got meanwhile.

    Args:
        source: The cluster that is copied.
        source_topic: Its topic.
        destination: The cluster that receives the copy.
        destination_topic: The topic there.
        mode: `create` makes and grows it, `validate` compares, `off` does neither.
        replication_factor: Of a topic that is made; None or -1 for the cluster's own default.
        timestamp_mode: Whether records keep their timestamps.
        partitions: Those that are copied; None for all. An existing topic is grown for them only.
        clock: For the time that a new topic takes.

    Raises:
        UnfitTopicError: Something about the destination would break the copy; nothing was changed
            that existed before.
        UsageError: Both topics are the same one, a topic does not exist, or we may not look.
        UnavailableError: A cluster did not answer, or a new topic got no leaders in time.
    """
    _refuse_same_topic(source, source_topic, destination, destination_topic)
    if mode == "off":
        return TopicReport(topic=destination_topic)
    look_now = functools.partial(
        _look, source, source_topic, destination, destination_topic, partitions
    )
    look, created, added = look_now(), False, 0
    if mode == "create" and look.target is None:
        created = _create(destination, destination_topic, look, replication_factor, timestamp_mode)
        count = look.needed if created else 1  # what somebody else made, we may have to grow
        look = _await_leaders(destination, destination_topic, count, look_now, clock)
    findings = _fit(look, mode, timestamp_mode)
    if mode == "create" and look.target is not None and len(look.target.partitions) < look.needed:
        added = _grow(destination, look.target, look.needed)
        look = _await_leaders(destination, destination_topic, look.needed, look_now, clock)
        findings = _fit(look, mode, timestamp_mode)
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
    """What `sync_topic` would find, errors first. Changes nothing, and says what would be made.

    With the mode `off` nothing is compared, as at the start.

    Raises:
        UsageError: Both topics are the same one, the source's does not exist, or we may not look.
        UnavailableError: A cluster did not answer.
    """
    _refuse_same_topic(source, source_topic, destination, destination_topic)
    if mode == "off":
        return ()
    look = _look(source, source_topic, destination, destination_topic, partitions)
    return _findings(look, mode=mode, timestamp_mode=timestamp_mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Both topics at one moment."""

    target_name: str
    origin: TopicMetadata
    origin_configs: Mapping[str, str | None]
    target: TopicMetadata | None
    """None: it does not exist."""

    target_configs: Mapping[str, str | None]
    cluster_configs: Mapping[str, str | None] | None
    """Of the destination's brokers; None: we may not see them."""

    needed: int
    """How many partitions the destination must have, as they keep their numbers."""


def _look(
    source: ClusterClient,
    source_topic: str,
    destination: ClusterClient,
    destination_topic: str,
    partitions: Collection[int] | None,
) -> _Look:
    origin, target = source.topic(source_topic), _find(destination, destination_topic)
    return _Look(
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
    """Broker-wide settings; None where we may not read them, which many a cluster forbids."""
    try:
        return strictest(cluster.admin.broker_configs().values())
    except UsageError:
        return None


def _fit(look: _Look, mode: TopicSync, timestamp_mode: TimestampMode) -> tuple[Finding, ...]:
    """The findings where none of them is an error."""
    findings = _findings(look, mode=mode, timestamp_mode=timestamp_mode)
    if any(finding.severity == "error" for finding in findings):
        raise UnfitTopicError(
            "the destination's topic would break the copy",
            hint="follow the advice behind each error, or set `topic-sync: off` to go on all the "
            "same",
            topic=look.target_name,
            findings=findings,
        )
    return findings


def _findings(
    look: _Look, *, mode: TopicSync, timestamp_mode: TimestampMode
) -> tuple[Finding, ...]:
    """Everything there is to say, errors first."""
    creates = mode == "create"
    found = list(cluster_findings(look.origin_configs, look.cluster_configs))
    if look.target is None:
        missing = Finding(
            severity="note" if creates else "error",
            setting="topic",
            source=look.origin.name,
            destination=None,
            advice="it is made at the start" if creates else "make it, or say topic-sync: create",
        )
        found.append(missing)
    else:
        counts = len(look.origin.partitions), len(look.target.partitions)
        found += partition_findings(*counts, needed=look.needed, grows=creates)
        found += topic_findings(
            look.origin_configs, look.target_configs, timestamp_mode=timestamp_mode
        )
    order = ("error", "warning", "note")
    return tuple(sorted(found, key=lambda finding: order.index(finding.severity)))


# -- changing the destination ----------------------------------------------------------------------


def _create(
    cluster: ClusterClient,
    topic: str,
    look: _Look,
    replication_factor: int | None,
    timestamp_mode: TimestampMode,
) -> bool:
    """Make a topic; False if it is there and may be somebody else's, which is compared next.

    An answer that is lost is looked for (I7): the topic is there, or it was not made.
    """
    try:
        cluster.admin.create_topic(
            topic,
            partition_count=len(look.origin.partitions),
            replication_factor=-1 if replication_factor is None else replication_factor,
            configs=settings_for_copy(
                look.origin_configs, look.cluster_configs, timestamp_mode=timestamp_mode
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
    """Add the partitions that are missing; returns how many were."""
    try:
        cluster.admin.create_partitions(target.name, partition_count)
    except (OutcomeUnknownError, UsageError):
        # Somebody else may have added them, or our own request did and its answer was lost.
        if len(cluster.topic(target.name).partitions) < partition_count:
            raise
    return partition_count - len(target.partitions)


def _await_leaders(
    cluster: ClusterClient,
    topic: str,
    partition_count: int,
    look_now: Callable[[], _Look],
    clock: Clock,
) -> _Look:
    """Wait until the destination shows the partitions, each with a leader, and the leaders answer.

    Brokers learn of a topic one after the other, and are named as leaders before they know it.
    """
    deadline_ms = clock.monotonic_ms() + _READY_MS
    while True:
        with contextlib.suppress(NotFoundError):
            look = look_now()
            if look.target is not None and _has_leaders(look.target, partition_count):
                numbers = range(partition_count)
                cluster.list_offsets((TopicPartition(topic, n) for n in numbers), LATEST)
                return look
        if clock.monotonic_ms() >= deadline_ms:
            raise UnavailableError(
                f"the topic has no leaders {_READY_MS} ms after it was made",
                hint="too few brokers may be up for its replication factor",
                topic=topic,
                partitions=partition_count,
            )
        clock.sleep_ms(_LOOK_AGAIN_MS)


def _has_leaders(topic: TopicMetadata, partition_count: int) -> bool:
    return len(topic.partitions) >= partition_count and all(
        one.leader >= 0 for one in topic.partitions.values()
    )
