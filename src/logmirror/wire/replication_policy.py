"""Names of MirrorMaker 2's topics: which topic is a replica of which, and over which clusters.

A replica of the source `A` is named `A.orders` by the default policy, `orders` by the identity
policy. Heartbeat topics always get the alias, so that a chain of replications can be followed:
`B.A.heartbeats` came from `A` to `B`, and then here. All functions return the same as Apache
Kafka 4.3's `DefaultReplicationPolicy`, `IdentityReplicationPolicy` and `MirrorClient`; where those
return a name that no topic can have, these return None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HEARTBEATS: Final = "heartbeats"
"""The topic of heartbeats in the cluster that they are written to, whatever the separator."""

_TOPIC: Final = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,249}")
_SEPARATOR: Final = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationPolicy:
    """The rule by which replicas are named. No function raises, whatever the topic.

    Raises:
        UsageError: The separator is empty, or cannot be part of a topic's name.
    """

    separator: str = "."
    """`replication.policy.separator`: between alias and topic."""

    separates_internal_topics: bool = True
    """`replication.policy.internal.topic.separator.enabled`: False keeps `.` in the names of the
    topics for offset syncs and checkpoints (KIP-949)."""

    identity: bool = False
    """Whether replicas keep their names, except heartbeats."""

    source_alias: str | None = None
    """`source.cluster.alias` of the identity policy: the source of every topic."""

    def __post_init__(self) -> None:
        if not _SEPARATOR.fullmatch(self.separator):
            raise UsageError(
                "the separator of a replication policy cannot be part of a topic name",
                hint="use letters, digits, dots, dashes or underscores",
                separator=self.separator,
            )

    # -- replicas ----------------------------------------------------------------------------------

    def remote_topic(self, alias: str, topic: str) -> str | None:
        """The name of a topic's replica, for a source's alias; None if it is not valid."""
        keeps_name = self.identity and not _looks_like_heartbeats(topic)
        return _valid(topic if keeps_name else f"{alias}{self.separator}{topic}")

    def topic_source(self, topic: str) -> str | None:
        """The alias of the cluster that a topic was copied from; None: it is not a replica.

        It is decided by the name alone: a topic that was named `a.b` has the source `a`.
        """
        if self.identity and not _looks_like_heartbeats(topic):
            return self.source_alias
        alias, _, rest = topic.partition(self.separator)
        # Java drops empty parts at the end: `a..` has one part, and so no source.
        return alias if rest.replace(self.separator, "") else None

    def upstream_topic(self, topic: str) -> str | None:
        """The name of a replica's topic in its source; None: it is not a replica."""
        if self.identity and not _looks_like_heartbeats(topic):
            return topic
        alias = self.topic_source(topic)
        return None if alias is None else topic[len(alias) + len(self.separator) :]

    def original_topic(self, topic: str) -> str:
        """The name in the cluster where the topic was created: without any alias."""
        upstream = self.upstream_topic(topic)
        while upstream is not None and upstream != topic:
            topic, upstream = upstream, self.upstream_topic(upstream)
        return topic

    def checkpoint_topic(self, source_alias: str, target_alias: str, topic: str) -> str | None:
        """The name at the target for a topic of the source; None if it is not valid.

        A topic that came from the target has its original name there.
        """
        if self.topic_source(topic) == target_alias:
            return _valid(self.original_topic(topic))
        return self.remote_topic(source_alias, topic)

    # -- topics of MirrorMaker itself --------------------------------------------------------------

    def offset_syncs_topic(self, alias: str) -> str | None:
        """The topic for offset syncs; None if that is not a valid topic name.

        Args:
            alias: Of the target if the topic is in the source, which is the default; else of the
                source.
        """
        middle = self._internal_separator
        return _valid(f"mm2-offset-syncs{middle}{alias}{middle}internal")

    def checkpoints_topic(self, source_alias: str) -> str | None:
        """The topic, at the target, for checkpoints; None if that is not a valid topic name."""
        return _valid(source_alias + self._checkpoints_suffix)

    def is_heartbeats(self, topic: str) -> bool:
        """Whether it has heartbeats, of any cluster."""
        return self.original_topic(topic) == HEARTBEATS

    def is_checkpoints(self, topic: str) -> bool:
        """Whether it has checkpoints, of any source."""
        return topic.endswith(self._checkpoints_suffix)

    def is_internal(self, topic: str) -> bool:
        """Whether MirrorMaker never copies it: internal topics of Kafka and of MirrorMaker.

        Before release 4.0, MirrorMaker copied no topic that ends in `.internal` or `-internal`.
        """
        if topic.startswith(("__", ".")) or self.is_checkpoints(topic):
            return True
        return topic.startswith("mm2") and topic.endswith(f"{self._internal_separator}internal")

    @property
    def _internal_separator(self) -> str:
        return self.separator if self.separates_internal_topics else "."

    @property
    def _checkpoints_suffix(self) -> str:
        middle = self._internal_separator
        return f"{middle}checkpoints{middle}internal"

    # -- chains of clusters ------------------------------------------------------------------------

    def hops(self, topic: str, source: str) -> int | None:
        """How many replications are between a cluster and this topic; None: it is in no chain."""
        for count, alias in enumerate(self._sources(topic), 1):
            if alias == source:
                return count
        return None

    def replication_hops(self, topics: Iterable[str], source: str) -> int | None:
        """The fewest hops from a cluster, by its heartbeats among `topics`; None: it has none."""
        counts = [self.hops(topic, source) for topic in topics if self.is_heartbeats(topic)]
        return min((count for count in counts if count is not None), default=None)

    def upstream_clusters(self, topics: Iterable[str]) -> frozenset[str]:
        """The aliases of all clusters whose heartbeats are among `topics`; never an empty one."""
        return frozenset(
            alias
            for topic in topics
            if self.is_heartbeats(topic)
            for alias in self._sources(topic)
            if alias
        )

    def is_cycle(self, topic: str, target_alias: str) -> bool:
        """Whether a topic came from the target, directly or not: its replica would be a cycle.

        The identity policy shows it for heartbeats, and for all topics if its source is the target.
        """
        return target_alias in self._chain(topic)

    def _sources(self, topic: str) -> Iterator[str]:
        """The aliases before a topic, nearest first, up to the first one that repeats."""
        seen: set[str] = set()
        for alias in self._chain(topic):
            if alias in seen:
                return
            seen.add(alias)
            yield alias

    def _chain(self, topic: str) -> Iterator[str]:
        """All aliases before a topic, nearest first; each step makes the name shorter."""
        upstream: str | None = topic
        while upstream is not None:
            topic, alias = upstream, self.topic_source(upstream)
            if alias is None:
                return
            yield alias
            upstream = self.upstream_topic(topic)
            if upstream == topic:  # the identity policy: all aliases are known
                return


def _looks_like_heartbeats(topic: str) -> bool:
    return topic.endswith(HEARTBEATS)


def _valid(name: str) -> str | None:
    return name if _TOPIC.fullmatch(name) else None
