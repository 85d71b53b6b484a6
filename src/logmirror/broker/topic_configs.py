"""The settings of a topic: names, accepted values, defaults and documentation.

Only settings that the broker implements are accepted. One that it would store and ignore, such as a
retention time, is refused with a reason, because the user would rely on it.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.broker.options import BrokerOptions


class RefusedConfigError(Exception):
    """The setting or its value is not supported by this broker."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ConfigType(enum.IntEnum):
    """Kafka's numbers for the types of configuration values."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    LIST = 7


class ConfigSource(enum.IntEnum):
    """Kafka's numbers for where a value comes from."""

    TOPIC = 1
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
    default: Callable[[BrokerOptions], str]
    allowed: tuple[str, ...]
    """The accepted values. Empty: any integer from `least` to 2^31 - 1."""
    least: int
    documentation: str


def _fixed(kind: ConfigType, value: str, documentation: str) -> _Setting:
    return _Setting(kind, lambda _: value, (value,), 0, documentation)


_SETTINGS: Final[Mapping[str, _Setting]] = {
    "cleanup.policy": _fixed(ConfigType.LIST, "delete", "Records stay until the topic is deleted."),
    "compression.type": _fixed(ConfigType.STRING, "producer", "Batches are stored as sent."),
    "flush.messages": _fixed(
        ConfigType.LONG, "1", "A record is durable before its response is sent."
    ),
    "max.message.bytes": _Setting(
        ConfigType.INT,
        lambda options: str(options.max_message_bytes),
        (),
        0,
        "The largest batch that is accepted, in bytes.",
    ),
    "message.timestamp.type": _Setting(
        ConfigType.STRING,
        lambda _: "CreateTime",
        ("CreateTime", "LogAppendTime"),
        0,
        "Whether records keep the producer's timestamp or get the append time.",
    ),
    "min.insync.replicas": _fixed(ConfigType.INT, "1", "There is one replica."),
    "retention.bytes": _fixed(ConfigType.LONG, "-1", "Nothing is deleted because of size."),
    "retention.ms": _fixed(ConfigType.LONG, "-1", "Nothing is deleted because of age."),
    "segment.bytes": _Setting(
        ConfigType.INT,
        lambda options: str(options.segment_bytes),
        (),
        1024,
        "The largest segment, in bytes.",
    ),
}
_MAX_INT: Final = 2**31 - 1
_MAX_DIGITS: Final = 10


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
        self.is_log_append_time = self.value("message.timestamp.type") == "LogAppendTime"

    def value(self, name: str) -> str:
        """Return the effective value of a setting.

        Raises:
            RefusedConfigError: The setting is not supported.
        """
        return self.values.get(name) or _setting(name).default(self._options)

    def list_value(self, name: str) -> list[str]:
        """Return the items of a list setting.

        Raises:
            RefusedConfigError: The setting is not supported, or is not a list.
        """
        if _setting(name).type != ConfigType.LIST:
            raise RefusedConfigError(f"{name}: not a list")
        return self.value(name).split(",")

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
            for name, setting in _SETTINGS.items()
        ]


def wanted_configs(entries: Iterable[Any]) -> dict[str, str]:
    """Return the settings in a request, by name.

    Raises:
        RefusedConfigError: A setting is named twice or its value is null.
    """
    configs: dict[str, str] = {}
    for entry in entries:
        if entry.name in configs:
            raise RefusedConfigError(f"{entry.name}: named twice")
        if entry.value is None:
            raise RefusedConfigError(f"{entry.name}: the value must not be null")
        configs[entry.name] = entry.value
    return configs


def _setting(name: str) -> _Setting:
    setting = _SETTINGS.get(name)
    if setting is None:
        raise RefusedConfigError(f"{name}: not supported by this broker")
    return setting


def _check(name: str, value: str) -> None:
    setting = _setting(name)
    if setting.allowed:
        if value not in setting.allowed:
            offered = " and ".join(setting.allowed)
            raise RefusedConfigError(f"{name}: this broker supports only {offered}")
        return
    digits = value if value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS else "-1"
    if not setting.least <= int(digits) <= _MAX_INT:
        raise RefusedConfigError(f"{name}: an integer from {setting.least} to {_MAX_INT}")
