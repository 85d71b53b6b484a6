"""The broker's settings that a request may change while it runs (KIP-226).

    replica.alter.log.dirs.io.max.bytes.per.second  limit of all moves between log directories
    leader.replication.throttled.rate               stored and shown; there is no replication
    follower.replication.throttled.rate             the same
    cordoned.log.dirs                               dirs that get no new partitions (KIP-1066);
                                                    of one broker only, as in Kafka

A value for this broker, under its ID, counts before one for all brokers, under the empty name.
Kafka's tools set and delete these; the deletion of a setting that is not set succeeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.topic_configs import (
    ConfigEntry,
    ConfigSource,
    ConfigType,
    MalformedConfigError,
    RefusedConfigError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

MOVE_RATE: Final = "replica.alter.log.dirs.io.max.bytes.per.second"
CORDONED: Final = "cordoned.log.dirs"
_NO_LIMIT: Final = 2**63 - 1
_SETTINGS: Final = {
    MOVE_RATE: "Limit for the bytes per second of moves between log directories.",
    "leader.replication.throttled.rate": "Without effect: there is no replication.",
    "follower.replication.throttled.rate": "Without effect: there is no replication.",
    CORDONED: "Log directories, separated by commas, that get no new partitions; *: all.",
}


class DynamicConfigs:
    """The values that are set, of this broker and of all brokers. Runs on the event loop.

    Args:
        node_id: This broker.
        stored: The stored values, by scope and name.
        log_dirs: The names of the log directories.
    """

    def __init__(
        self,
        node_id: int,
        stored: Mapping[tuple[str, str], str],
        log_dirs: Collection[str] = (),
    ) -> None:
        self._own = str(node_id)
        self._values = dict(stored)
        self._log_dirs = log_dirs
        self.when_changed: Callable[[], None] = lambda: None

    def checked(
        self, scope: str, changes: Mapping[str, str | None]
    ) -> dict[tuple[str, str], str | None]:
        """Return changes as they are stored; None: deleted.

        Raises:
            MalformedConfigError: A setting cannot be changed while the broker runs.
            RefusedConfigError: It has another range.
        """
        found: dict[tuple[str, str], str | None] = {}
        for name, value in changes.items():
            if value is None:
                found[scope, name] = None
            elif name not in _SETTINGS:
                raise MalformedConfigError(f"{name}: fixed when the broker starts")
            elif name == CORDONED and not scope:
                raise MalformedConfigError(f"{name}: set it for one broker, by its ID")
            elif name == CORDONED:
                found[scope, name] = self._checked_dirs(value)
            elif not value.isascii() or not value.isdigit() or int(value) > _NO_LIMIT:
                raise RefusedConfigError(f"{name}: bytes per second, 0 to {_NO_LIMIT}")
            else:
                found[scope, name] = value
        return found

    def _checked_dirs(self, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if names != ["*"] and (unknown := [one for one in names if one not in self._log_dirs]):
            reason = f"{CORDONED}: {unknown[0]} is no log directory of this broker"
            raise RefusedConfigError(reason)
        return ",".join(names)

    def cordoned(self) -> set[str]:
        """Return the names of the log directories that get no new partitions."""
        value = self._values.get((self._own, CORDONED), self._values.get(("", CORDONED), ""))
        return set(self._log_dirs) if value == "*" else {name for name in value.split(",") if name}

    def names(self, scope: str) -> list[str]:
        """Return the names of the settings that are set in a scope."""
        return [name for of, name in self._values if of == scope]

    def apply(self, changes: Mapping[tuple[str, str], str | None]) -> None:
        """Apply stored changes."""
        for key, value in changes.items():
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
        self.when_changed()

    def rate(self, name: str) -> int | None:
        """Return a limit in bytes per second; None: there is none."""
        value = self._values.get((self._own, name)) or self._values.get(("", name))
        return None if value is None or int(value) == _NO_LIMIT else int(value)

    def entries(self, scope: str) -> list[ConfigEntry]:
        """Return the settings as DescribeConfigs shows them; of all brokers: those that are set."""
        found = []
        for name, documentation in _SETTINGS.items():
            own, default = self._values.get((self._own, name)), self._values.get(("", name))
            if scope and own is not None:
                value, source = own, ConfigSource.DYNAMIC_BROKER
            elif default is not None:
                value, source = default, ConfigSource.DYNAMIC_DEFAULT_BROKER
            elif scope:
                value = "" if name == CORDONED else str(_NO_LIMIT)
                source = ConfigSource.DEFAULT
            else:
                continue
            kind = ConfigType.LIST if name == CORDONED else ConfigType.LONG
            found.append(ConfigEntry(name, value, kind, source, documentation))
        return found
