"""The settings of a topic: names, accepted values, defaults and documentation.

Only settings that the broker implements are accepted. One that it would store and ignore is refused
with a reason, because the user would rely on it.

The defaults are Kafka's, except that of `retention.ms`: -1 instead of 7 days, so that nothing is
deleted unless the user asks for it. A broker setting, such as `log.retention.ms`, overrides them.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.broker.options import BrokerOptions


class RefusedConfigError(Exception):
    """The setting or its value is not supported by this broker."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class MalformedConfigError(RefusedConfigError):
    """A request names a setting twice, or without a value."""


class ConfigType(enum.IntEnum):
    """Kafka's numbers for the types of configuration values."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7


class ConfigSource(enum.IntEnum):
    """Kafka's numbers for where a value comes from."""

    TOPIC = 1
    DYNAMIC_BROKER = 2
    DYNAMIC_DEFAULT_BROKER = 3
    STATIC_BROKER = 4
    DEFAULT = 5


class ConfigEntry(NamedTuple):
    """One setting as DescribeConfigs shows it."""

    name: str
    value: str
    type: ConfigType
    source: ConfigSource
    documentation: str


class _Setting(NamedTuple):
    type: ConfigType
    default: str
    accepts: Callable[[str], bool]
    expected: str
    """The accepted values, for the error."""

    broker_name: str
    """The broker setting that overrides the default; empty: there is none."""

    documentation: str


def _fixed(kind: ConfigType, value: str, documentation: str) -> _Setting:
    expected = f"this broker supports only {value}"
    return _Setting(kind, value, lambda found: found == value, expected, "", documentation)


def _integer(  # noqa: PLR0913, PLR0917  # a row of the table
    kind: ConfigType, default: int, least: int, most: int, broker_name: str, documentation: str
) -> _Setting:
    expected = f"an integer from {least} to {most}"

    def accepts(value: str) -> bool:
        return bool(_INTEGER.fullmatch(value)) and least <= int(value) <= most

    return _Setting(kind, str(default), accepts, expected, broker_name, documentation)


def _is_ratio(value: str) -> bool:
    return bool(_RATIO.fullmatch(value)) and float(value) <= 1


def _is_policy(value: str) -> bool:
    policies = value.split(",")
    return set(policies) <= {"compact", "delete"} and len(policies) == len(set(policies))


def _throttled(side: str) -> Mapping[str, _Setting]:
    """Return the setting that Kafka's tool sets with `--throttle`, for moves of any kind."""
    row = _Setting(
        ConfigType.LIST,
        "",
        lambda value: bool(_REPLICAS.fullmatch(value)),
        "*, or partition:broker pairs like 0:1,1:1",
        "",
        "Without effect: there is no replication.",
    )
    return {f"{side}.replication.throttled.replicas": row}


_MAX_INT: Final = 2**31 - 1
NEVER: Final = 2**63 - 1
"""Kafka's default of `flush.messages` and `flush.ms`."""

_MAX_LONG: Final = 2**63 - 1
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}")
_REPLICAS: Final = re.compile(r"\*|([0-9]+:[0-9]+(,[0-9]+:[0-9]+)*)?")
_RATIO: Final = re.compile(r"[0-9]{1,3}(\.[0-9]{1,17})?")
_DAY_MS: Final = 86_400_000
_TIME_TYPES: Final = ("CreateTime", "LogAppendTime")

SETTINGS: Final[Mapping[str, _Setting]] = {
    "cleanup.policy": _Setting(
        ConfigType.LIST,
        "delete",
        _is_policy,
        "delete, compact, or both",
        "log.cleanup.policy",
        "Whether old records are deleted, or replaced by newer ones with their key.",
    ),
    "compression.type": _fixed(ConfigType.STRING, "producer", "Batches are stored as sent."),
    "delete.retention.ms": _integer(
        *(ConfigType.LONG, _DAY_MS, 0, _MAX_LONG, "log.cleaner.delete.retention.ms"),
        "How long compaction keeps a null value after its key was compacted first.",
    ),
    "flush.messages": _integer(
        *(ConfigType.LONG, 1, 1, NEVER, "log.flush.interval.messages"),
        "1: a record is flushed before its response is sent. Otherwise, only records of a "
        "transaction are. Others are acknowledged at once, and flushed in the background, at the "
        "latest when so many are not flushed.",
    ),
    "flush.ms": _integer(
        *(ConfigType.LONG, 0, 0, NEVER, "log.flush.interval.ms"),
        "In the background, a record is flushed at the latest after this time, in ms.",
    ),
    **_throttled("follower"),
    **_throttled("leader"),
    "max.compaction.lag.ms": _integer(
        *(ConfigType.LONG, _MAX_LONG, 1, _MAX_LONG, "log.cleaner.max.compaction.lag.ms"),
        "The age of a record at which its segment is compacted in any case.",
    ),
    "max.message.bytes": _integer(
        *(ConfigType.INT, 0, 0, _MAX_INT, "message.max.bytes"),
        "The largest batch that is accepted, in bytes.",
    ),
    "message.timestamp.type": _Setting(
        ConfigType.STRING,
        "CreateTime",
        lambda value: value in _TIME_TYPES,
        "this broker supports only CreateTime and LogAppendTime",
        "",
        "Whether records keep the producer's timestamp or get the append time.",
    ),
    "min.cleanable.dirty.ratio": _Setting(
        ConfigType.DOUBLE,
        "0.5",
        _is_ratio,
        "a number from 0 to 1",
        "log.cleaner.min.cleanable.ratio",
        "The part of the log that is not compacted yet at which it is compacted.",
    ),
    "min.compaction.lag.ms": _integer(
        *(ConfigType.LONG, 0, 0, _MAX_LONG, "log.cleaner.min.compaction.lag.ms"),
        "The age below which a record is not compacted.",
    ),
    "min.insync.replicas": _fixed(ConfigType.INT, "1", "There is one replica."),
    "retention.bytes": _integer(
        *(ConfigType.LONG, -1, -1, _MAX_LONG, "log.retention.bytes"),
        "The size of a partition at which its oldest segments are deleted; -1: no limit.",
    ),
    "retention.ms": _integer(
        *(ConfigType.LONG, -1, -1, _MAX_LONG, "log.retention.ms"),
        "The age of the newest record of a segment at which it is deleted; -1: no limit.",
    ),
    "segment.bytes": _integer(
        *(ConfigType.INT, 0, 1024, _MAX_INT, "log.segment.bytes"),
        "The largest segment, in bytes.",
    ),
    "segment.ms": _integer(
        *(ConfigType.LONG, 7 * _DAY_MS, 1, _MAX_LONG, "log.roll.ms"),
        "The age of the open segment at which it is sealed.",
    ),
}
"""The settings of topics, in the order of their names."""


def check_overrides(overrides: Mapping[str, str]) -> None:
    """Check broker settings that override defaults of topics.

    Raises:
        UsageError: A setting or its value is not supported.
    """
    known = {setting.broker_name: setting for setting in SETTINGS.values() if setting.broker_name}
    for name, value in overrides.items():
        setting = known.get(name)
        if setting is None:
            raise UsageError(
                "broker setting is not supported", name=name, supported=", ".join(sorted(known))
            )
        if not setting.accepts(value):
            raise UsageError(
                "the value of a broker setting is not valid",
                name=name,
                found=value,
                expected=setting.expected,
            )


def broker_defaults(options: BrokerOptions) -> list[ConfigEntry]:
    """Return the broker settings that are defaults of topics."""
    return [
        ConfigEntry(
            setting.broker_name,
            _default(name, options),
            setting.type,
            ConfigSource.STATIC_BROKER,
            f"Default of `{name}`.",
        )
        for name, setting in SETTINGS.items()
        if setting.broker_name
    ]


def _default(name: str, options: BrokerOptions) -> str:
    setting = _setting(name)
    if setting.broker_name in options.overrides:
        return options.overrides[setting.broker_name]
    if name == "segment.bytes":
        return str(options.segment_bytes)
    if name == "flush.messages":
        return setting.default if options.flush_on_ack else str(NEVER)
    if name == "flush.ms":
        return str(options.flush_ms)
    if name == "max.message.bytes":
        return str(options.max_message_bytes)
    return setting.default


class TopicConfigs:
    """The settings of one topic.

    Args:
        values: The values that were set. Other settings have their default.
        options: The broker's settings, for the defaults.

    Raises:
        RefusedConfigError: A setting or its value is not supported.
    """

    def __init__(self, values: Mapping[str, str], options: BrokerOptions) -> None:
        for name, value in values.items():
            _check(name, value)
        self.values: Mapping[str, str] = dict(values)
        self._options = options
        self.segment_bytes = int(self.value("segment.bytes"))
        self.max_message_bytes = int(self.value("max.message.bytes"))
        self.flush_messages = int(self.value("flush.messages"))
        self.flush_ms = int(self.value("flush.ms"))
        self.is_log_append_time = self.value("message.timestamp.type") == "LogAppendTime"
        policies = self.value("cleanup.policy").split(",")
        self.is_deleting = "delete" in policies
        self.is_compacted = "compact" in policies

    def value(self, name: str) -> str:
        """Return the effective value of a setting.

        Raises:
            RefusedConfigError: The setting is not supported.
        """
        return self.values.get(name) or _default(name, self._options)

    @cached_property
    def segment_ms(self) -> int:
        """`segment.ms`; of compacted topics at most `max.compaction.lag.ms`."""
        own = int(self.value("segment.ms"))
        return min(own, self.max_compaction_lag_ms) if self.is_compacted else own

    @cached_property
    def delete_retention_ms(self) -> int:
        """`delete.retention.ms`."""
        return int(self.value("delete.retention.ms"))

    @cached_property
    def min_compaction_lag_ms(self) -> int:
        """`min.compaction.lag.ms`."""
        return int(self.value("min.compaction.lag.ms"))

    @cached_property
    def max_compaction_lag_ms(self) -> int:
        """`max.compaction.lag.ms`."""
        return int(self.value("max.compaction.lag.ms"))

    @cached_property
    def min_cleanable_dirty_ratio(self) -> float:
        """`min.cleanable.dirty.ratio`."""
        return float(self.value("min.cleanable.dirty.ratio"))

    @cached_property
    def retention_ms(self) -> int:
        """`retention.ms`."""
        return int(self.value("retention.ms"))

    @cached_property
    def retention_bytes(self) -> int:
        """`retention.bytes`."""
        return int(self.value("retention.bytes"))

    def list_value(self, name: str) -> list[str]:
        """Return the items of a list setting.

        Raises:
            RefusedConfigError: The setting is not supported, or is not a list.
        """
        if _setting(name).type != ConfigType.LIST:
            raise RefusedConfigError(f"{name}: not a list")
        return [item for item in self.value(name).split(",") if item]

    def entries(self) -> list[ConfigEntry]:
        """Return all settings, in the order of their names."""
        return [
            ConfigEntry(
                name,
                self.value(name),
                setting.type,
                ConfigSource.TOPIC if name in self.values else ConfigSource.DEFAULT,
                setting.documentation,
            )
            for name, setting in SETTINGS.items()
        ]


def wanted_configs(entries: Iterable[Any]) -> dict[str, str]:
    """Return the settings in a request, by name.

    Raises:
        MalformedConfigError: A setting is named twice or its value is null.
    """
    configs: dict[str, str] = {}
    for entry in entries:
        if entry.name in configs:
            raise MalformedConfigError(f"{entry.name}: named twice")
        if entry.value is None:
            raise MalformedConfigError(f"{entry.name}: the value must not be null")
        configs[entry.name] = entry.value
    return configs


def _setting(name: str) -> _Setting:
    setting = SETTINGS.get(name)
    if setting is None:
        raise RefusedConfigError(f"{name}: not supported by this broker")
    return setting


def _check(name: str, value: str) -> None:
    setting = _setting(name)
    if not setting.accepts(value):
        raise RefusedConfigError(f"{name}: {setting.expected}")
