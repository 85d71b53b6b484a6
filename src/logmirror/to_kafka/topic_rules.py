"""Rules for the settings of a destination topic: how to create it, and what would break a replica.

Decided from settings alone, without a connection. The settings of a new topic:

- `cleanup.policy` is `delete`, whatever the source has. Compaction at the destination removes
  records at its own times, so the replica would lack some that the source still has.
- Retention is the source's plus one segment. A source deletes whole segments, so it keeps a record
  up to one segment longer than its retention; a replica with the same retention and other segment
  boundaries would delete it first. Retention is unlimited only if the source has no limit, or is
  compacted: a replica that grows forever would fill the disks of the other cluster.
- Batches are stored as they were produced (`compression.type=producer`). `max.message.bytes` is the
  source's, or the destination's default if that is larger. Timestamps are kept, however far from
  now (error 32 otherwise), or set by the destination if so configured.
- The replication factor, `min.insync.replicas` and segment settings are the destination's own.

A setting is written only if the cluster reports that it supports it: otherwise the cluster refuses
the whole topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TimestampMode = Literal["source", "destination"]
"""Whether records keep their timestamps, or the destination sets them at the append."""

Severity = Literal["error", "warning", "note"]
"""`error`: the replica would be wrong, or the mirror would stop. `warning`: the mirror may stop, or
acknowledged records may be lost. `note`: for information."""

_UNLIMITED: Final = 2**63 - 1
_DAY_MS: Final = 86_400_000

# Broker setting by topic setting: a cluster that reports the first supports the second.
_BROKER_NAME: Final = {
    "cleanup.policy": "log.cleanup.policy",
    "retention.ms": "log.retention.ms",
    "retention.bytes": "log.retention.bytes",
    "compression.type": "compression.type",
    "max.message.bytes": "message.max.bytes",
    "message.timestamp.type": "log.message.timestamp.type",
    "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
    "message.timestamp.difference.max.ms": "log.message.timestamp.difference.max.ms",
}
_KNOWN_TO_ALL: Final = frozenset(name for name in _BROKER_NAME if ".max.ms" not in name)
"""Settings that every broker since 0.11 supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A check of one setting of a destination."""

    severity: Severity
    setting: str
    """Kafka's name, or `partitions`."""

    source: str | None
    """The value at the source; None if it has none or was not read."""

    destination: str | None
    """The value at the destination; None if it has none or could not be read."""

    advice: str
    """The effect, and what to do: lower case, no full stop."""

    def __str__(self) -> str:
        there = "absent" if self.destination is None else self.destination
        here = "" if self.source is None else f" (source: {self.source})"
        return f"{self.severity}: {self.setting}: {there}{here}: {self.advice}"


def strictest(brokers: Iterable[Mapping[str, str | None]]) -> dict[str, str | None]:
    """The settings that hold on every broker: those that all have, with the least value of each.

    Args:
        brokers: The settings of each broker.
    """
    found: dict[str, str | None] | None = None
    for configs in brokers:
        if found is None:
            found = dict(configs)
            continue
        found = {
            name: min(value, configs[name], key=_as_number)
            for name, value in found.items()
            if name in configs
        }
    return found or {}


def _as_number(value: str | None) -> int:
    return _number({"": value}, "", _UNLIMITED)


def settings_for_copy(
    source: Mapping[str, str | None],
    cluster: Mapping[str, str | None] | None,
    *,
    timestamp_mode: TimestampMode,
) -> dict[str, str]:
    """The settings of a new topic for a replica.

    Args:
        source: All settings of the source topic, defaults included.
        cluster: Broker-wide settings of the destination; None if they could not be read.
        timestamp_mode: Whether records keep their timestamps.
    """
    retention_ms, retention_bytes = _kept_ms(source), _kept_bytes(source)
    own_max_bytes = _number(cluster or {}, "message.max.bytes", 0)
    wanted = {
        "cleanup.policy": "delete",
        "retention.ms": str(-1 if retention_ms == _UNLIMITED else retention_ms),
        "retention.bytes": str(-1 if retention_bytes == _UNLIMITED else retention_bytes),
        "compression.type": "producer",
        "max.message.bytes": str(max(_number(source, "max.message.bytes", 0), own_max_bytes)),
        "message.timestamp.type": "CreateTime",
        "message.timestamp.before.max.ms": str(_UNLIMITED),
        "message.timestamp.after.max.ms": str(_UNLIMITED),
        "message.timestamp.difference.max.ms": str(_UNLIMITED),
    }
    found = {
        name: value
        for name, value in wanted.items()
        if (name in _KNOWN_TO_ALL if cluster is None else _BROKER_NAME[name] in cluster)
    }
    if timestamp_mode == "destination":
        found["message.timestamp.type"] = "LogAppendTime"
    return found


def topic_findings(
    source: Mapping[str, str | None],
    destination: Mapping[str, str | None],
    *,
    timestamp_mode: TimestampMode,
) -> Iterator[Finding]:
    """Check the settings of a destination topic.

    Args:
        source: All settings of the source topic, defaults included.
        destination: All settings of the destination topic.
        timestamp_mode: Whether records keep their timestamps.
    """
    yield from _about_deletion(source, destination)
    yield from _about_batches(source, destination)
    if timestamp_mode == "source":
        yield from _about_kept_times(source, destination)
    elif destination.get("message.timestamp.type") != "LogAppendTime":
        yield _finding(
            "error",
            "message.timestamp.type",
            source,
            destination,
            "timestamp-mode: destination needs LogAppendTime; set it, or remove timestamp-mode",
        )
    yield from _about_durability(source, destination)


def cluster_findings(
    source: Mapping[str, str | None], cluster: Mapping[str, str | None] | None
) -> Iterator[Finding]:
    """Check the broker settings of a destination.

    Args:
        source: All settings of the source topic, defaults included.
        cluster: Broker-wide settings of the destination; None if they could not be read.
    """
    if cluster is None:
        yield Finding(
            severity="note",
            setting="producer.id.expiration.ms",
            source=None,
            destination=None,
            advice="broker settings could not be read; allow DescribeConfigs on the cluster to "
            "have them checked",
        )
        return
    expiration_ms = _number(cluster, "producer.id.expiration.ms", _DAY_MS)
    if expiration_ms < _DAY_MS:
        yield Finding(
            severity="note",
            setting="producer.id.expiration.ms",
            source=None,
            destination=str(expiration_ms),
            advice="for records older than this the mirror sends one batch at a time, because "
            f"brokers forget their producer; Kafka's default is {_DAY_MS}",
        )
    request_max_bytes = _number(cluster, "socket.request.max.bytes", _UNLIMITED)
    batch_max_bytes = _number(source, "max.message.bytes", 0)
    if request_max_bytes <= batch_max_bytes:
        yield Finding(
            severity="error",
            setting="socket.request.max.bytes",
            source=f"max.message.bytes={batch_max_bytes}",
            destination=str(request_max_bytes),
            advice="the source's largest batch does not fit into a request; raise the limit",
        )


def partition_findings(
    source_count: int, destination_count: int, *, needed: int, grows: bool
) -> Iterator[Finding]:
    """Check the number of partitions of a destination topic.

    Args:
        source_count: Partitions of the source topic.
        destination_count: Partitions of the destination topic.
        needed: Partitions that the destination must have for those that are copied.
        grows: Whether missing partitions are added.
    """
    severity: Severity
    if destination_count < needed:
        severity = "note" if grows else "error"
        advice = "missing partitions are added" if grows else "add the missing partitions"
    elif destination_count < source_count:
        severity = "warning"
        advice = "fewer than at the source; after a failover, keys would go to other partitions"
    elif destination_count > source_count:
        severity = "warning"
        advice = "more than at the source; after a failover, keys would go to other partitions"
    else:
        return
    yield Finding(
        severity=severity,
        setting="partitions",
        source=str(source_count),
        destination=str(destination_count),
        advice=advice,
    )


def _about_deletion(
    source: Mapping[str, str | None], destination: Mapping[str, str | None]
) -> Iterator[Finding]:
    policies = _policies(destination)
    if "compact" in policies:
        yield _finding(
            "error",
            "cleanup.policy",
            source,
            destination,
            "compaction would remove records that the source still has; set it to delete",
        )
    if "delete" not in policies:
        return
    unlimited = "delete" not in _policies(source)
    for name in ("retention.ms", "retention.bytes"):
        here = _UNLIMITED if unlimited else _limit(source, name)
        if _limit(destination, name) < here:
            advice = (
                "the replica would delete records that the source still has; "
                f"set it to {-1 if here == _UNLIMITED else here} or longer"
            )
            yield _finding("error", name, source, destination, advice)


def _about_batches(
    source: Mapping[str, str | None], destination: Mapping[str, str | None]
) -> Iterator[Finding]:
    largest = _number(source, "max.message.bytes", 0)
    if _number(destination, "max.message.bytes", _UNLIMITED) < largest:
        advice = f"the source's largest batches would be refused; set it to {largest} or more"
        yield _finding("error", "max.message.bytes", source, destination, advice)
    if destination.get("compression.type", "producer") != "producer":
        yield _finding(
            "note",
            "compression.type",
            source,
            destination,
            "brokers recompress batches: records are the same, bytes are not; producer keeps the "
            "bytes",
        )


def _about_kept_times(
    source: Mapping[str, str | None], destination: Mapping[str, str | None]
) -> Iterator[Finding]:
    name = "message.timestamp.type"
    if destination.get(name) == "LogAppendTime":
        advice = (
            "the source's timestamps would be overwritten; set it to CreateTime, or set "
            "timestamp-mode: destination"
        )
        yield _finding("error", name, source, destination, advice)
        return
    if source.get(name) == "LogAppendTime":
        advice = "timestamps are kept, their type is not: no client can write LogAppendTime"
        yield _finding("note", name, source, destination, advice)
    before, before_ms = _bound(destination, "before")
    age_ms = _sum(_bound(source, "before")[1], _kept_ms(source))
    if before_ms < age_ms:
        advice = (
            "records older than this would be refused, and the source may have some; "
            f"set it to {age_ms}"
        )
        yield _finding("error", before, source, destination, advice)
    after, after_ms = _bound(destination, "after")
    if after_ms < _bound(source, "after")[1]:
        advice = (
            "a record further in the future would be refused, and the mirror would stop; "
            f"set it to {_bound(source, 'after')[1]}"
        )
        yield _finding("warning", after, source, destination, advice)


def _about_durability(
    source: Mapping[str, str | None], destination: Mapping[str, str | None]
) -> Iterator[Finding]:
    if destination.get("unclean.leader.election.enable") == "true":
        yield _finding(
            "warning",
            "unclean.leader.election.enable",
            source,
            destination,
            "a broker that lacks records may become leader, and the mirror would stop; set it to "
            "false",
        )
    name = "min.insync.replicas"
    if _number(destination, name, 1) < _number(source, name, 1):
        advice = "acknowledged records are on fewer replicas than at the source; raise it"
        yield _finding("warning", name, source, destination, advice)


def _finding(
    severity: Severity,
    name: str,
    source: Mapping[str, str | None],
    destination: Mapping[str, str | None],
    advice: str,
) -> Finding:
    return Finding(
        severity=severity,
        setting=name,
        source=source.get(name),
        destination=destination.get(name),
        advice=advice,
    )


def _number(configs: Mapping[str, str | None], name: str, default: int) -> int:
    """An integer; the default if it is absent, secret or not an integer."""
    try:
        return int(configs.get(name) or "")
    except ValueError:
        return default


def _limit(configs: Mapping[str, str | None], name: str) -> int:
    """A limit; any negative value means no limit."""
    value = _number(configs, name, -1)
    return _UNLIMITED if value < 0 else value


def _sum(one: int, other: int) -> int:
    return min(one + other, _UNLIMITED)


def _policies(configs: Mapping[str, str | None]) -> set[str]:
    value = configs.get("cleanup.policy")
    return {part.strip() for part in ("delete" if value is None else value).split(",")}


def _kept_ms(source: Mapping[str, str | None]) -> int:
    """The greatest age of a record at the source, in milliseconds."""
    if "delete" not in _policies(source):
        return _UNLIMITED
    return _sum(_limit(source, "retention.ms"), _number(source, "segment.ms", 0))


def _kept_bytes(source: Mapping[str, str | None]) -> int:
    """The greatest size of a partition at the source, in bytes."""
    if "delete" not in _policies(source):
        return _UNLIMITED
    return _sum(_limit(source, "retention.bytes"), _number(source, "segment.bytes", 0))


def _bound(configs: Mapping[str, str | None], side: str) -> tuple[str, int]:
    """The setting that limits timestamps before or after now, and its value.

    `message.timestamp.difference.max.ms`, which 3.x still has, limits both.
    """
    names = (f"message.timestamp.{side}.max.ms", "message.timestamp.difference.max.ms")
    return min(((name, _number(configs, name, _UNLIMITED)) for name in names), key=lambda n: n[1])
