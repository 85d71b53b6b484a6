"""What the settings of a destination topic mean for a copy: what to make, what would break it.

Decided from settings alone, without a connection. The settings of a new topic:

- `cleanup.policy` is `delete`, whatever the source has: compaction at the destination removes
  records at its own times, so the copy would lack some that the source still has.
- Retention is that of the source and one segment more. A source deletes whole segments, so it keeps
  a record up to one segment longer than its retention says; a copy with the same retention and
  other segment bounds would lose it first. Without a limit only where the source has none, or is
  compacted: a copy that grows for ever would one day fill the disks of the other cluster.
- Batches are stored as they come (`compression.type=producer`), are at most as large as at the
  source, or larger where the destination's own default is, and keep their timestamps, however far
  from now (error 32 otherwise); or the destination stamps them, where that is asked for.
- Replication, `min.insync.replicas` and segments are the destination's business.

A setting is written only where the cluster shows that it knows it: others refuse the whole topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

TimestampMode = Literal["source", "destination"]
"""Whether records keep their timestamps, or the destination stamps them when it appends them."""

Severity = Literal["error", "warning", "note"]
"""`error`: the copy would be wrong or stop. `warning`: it may stop, or lose what was acknowledged,
in circumstances that can happen. `note`: good to know."""

_UNLIMITED: Final = 2**63 - 1
_DAY_MS: Final = 86_400_000

# Broker-wide setting by topic setting: a cluster that shows the one knows the other.
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
"""Settings that every released broker since 0.11 knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One setting of a destination that matters for a copy."""

    severity: Severity
    setting: str
    """Kafka's name, or `partitions`."""

    source: str | None
    """Its value at the source; None where it has none or was not looked at."""

    destination: str | None
    """Its value at the destination; None where it has none or could not be read."""

    advice: str
    """What it means and what to do: lower case, no full stop."""

    def __str__(self) -> str:
        there = "not there" if self.destination is None else self.destination
        here = "" if self.source is None else f" (source: {self.source})"
        return f"{self.severity}: {self.setting}: {there}{here}: {self.advice}"


def strictest(brokers: Iterable[Mapping[str, str | None]]) -> dict[str, str | None]:
    """Settings that hold wherever a partition is led: those of all brokers, the least of each.

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
    """The settings with which a topic is made that is to hold a copy.

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
    """What the settings of a destination topic would do to a copy.

    Args:
        source: All settings of the source topic, defaults included.
        destination: The same of the destination topic.
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
    """What the broker-wide settings of a destination would do to a copy.

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
            advice="brokers forget who wrote records older than this, and the copy goes on with "
            f"one batch at a time; {_DAY_MS} is Kafka's default",
        )
    request_max_bytes = _number(cluster, "socket.request.max.bytes", _UNLIMITED)
    batch_max_bytes = _number(source, "max.message.bytes", 0)
    if request_max_bytes <= batch_max_bytes:
        yield Finding(
            severity="error",
            setting="socket.request.max.bytes",
            source=f"max.message.bytes={batch_max_bytes}",
            destination=str(request_max_bytes),
            advice="the source's largest batch does not fit into a request; raise it there",
        )


def partition_findings(
    source_count: int, destination_count: int, *, needed: int, grows: bool
) -> Iterator[Finding]:
    """What a number of partitions means for a copy.

    Args:
        source_count: Partitions of the source topic.
        destination_count: Partitions of the destination topic.
        needed: How many the destination must have for the partitions that are copied.
        grows: Whether missing ones are added.
    """
    severity: Severity
    if destination_count < needed:
        severity = "note" if grows else "error"
        advice = "the missing ones are added" if grows else "add the missing ones"
    elif destination_count < source_count:
        severity = "warning"
        advice = "the copy has fewer; producers that move here would send keys to other partitions"
    elif destination_count > source_count:
        severity = "warning"
        advice = "the copy has more; producers that move here would send keys to other partitions"
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
            "compaction removes records that the source still has; set it to delete",
        )
    if "delete" not in policies:
        return
    unlimited = "delete" not in _policies(source)
    for name in ("retention.ms", "retention.bytes"):
        here = _UNLIMITED if unlimited else _limit(source, name)
        if _limit(destination, name) < here:
            advice = (
                "the copy would delete records that the source still has; "
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
            "brokers compress batches again: records are the same, bytes are not; producer keeps "
            "them",
        )


def _about_kept_times(
    source: Mapping[str, str | None], destination: Mapping[str, str | None]
) -> Iterator[Finding]:
    name = "message.timestamp.type"
    if destination.get(name) == "LogAppendTime":
        advice = (
            "the timestamps of the source would be overwritten; set it to CreateTime, or say "
            "timestamp-mode: destination"
        )
        yield _finding("error", name, source, destination, advice)
        return
    if source.get(name) == "LogAppendTime":
        advice = "times are kept, their type is not: no client may send LogAppendTime"
        yield _finding("note", name, source, destination, advice)
    before, before_ms = _bound(destination, "before")
    age_ms = _sum(_bound(source, "before")[1], _kept_ms(source))
    if before_ms < age_ms:
        advice = (
            "records older than this would be refused, and the source may have them; "
            f"set it to {age_ms}"
        )
        yield _finding("error", before, source, destination, advice)
    after, after_ms = _bound(destination, "after")
    if after_ms < _bound(source, "after")[1]:
        advice = (
            "a record further in the future would be refused and stop the copy; "
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
            "a broker that lacks records may become leader; the copy would then stop as damaged; "
            "set it to false",
        )
    name = "min.insync.replicas"
    if _number(destination, name, 1) < _number(source, name, 1):
        advice = "what the copy reports as done is on fewer replicas than at the source; raise it"
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
    """A whole number; the default where it is absent, secret or no number."""
    try:
        return int(configs.get(name) or "")
    except ValueError:
        return default


def _limit(configs: Mapping[str, str | None], name: str) -> int:
    """A limit of which any negative value means that there is none."""
    value = _number(configs, name, -1)
    return _UNLIMITED if value < 0 else value


def _sum(one: int, other: int) -> int:
    return min(one + other, _UNLIMITED)


def _policies(configs: Mapping[str, str | None]) -> set[str]:
    value = configs.get("cleanup.policy")
    return {part.strip() for part in ("delete" if value is None else value).split(",")}


def _kept_ms(source: Mapping[str, str | None]) -> int:
    """How old, in milliseconds, a record may become at the source before it is deleted."""
    if "delete" not in _policies(source):
        return _UNLIMITED
    return _sum(_limit(source, "retention.ms"), _number(source, "segment.ms", 0))


def _kept_bytes(source: Mapping[str, str | None]) -> int:
    """How large, in bytes, a partition of the source may become before records are deleted."""
    if "delete" not in _policies(source):
        return _UNLIMITED
    return _sum(_limit(source, "retention.bytes"), _number(source, "segment.bytes", 0))


def _bound(configs: Mapping[str, str | None], side: str) -> tuple[str, int]:
    """The setting that bounds how far from now a timestamp may be, and its value.

    `message.timestamp.difference.max.ms`, which 3.x still has, bounds both sides.
    """
    names = (f"message.timestamp.{side}.max.ms", "message.timestamp.difference.max.ms")
    return min(((name, _number(configs, name, _UNLIMITED)) for name in names), key=lambda n: n[1])
