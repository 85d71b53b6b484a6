"""Switches of the process itself, which come from its environment and not from the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

METRICS_PORT: Final = "LOGMIRROR_METRICS_PORT"
METRICS_PARTITIONS: Final = "LOGMIRROR_METRICS_PARTITIONS"
HEARTBEAT_SECS: Final = "LOGMIRROR_HEARTBEAT_SECS"

_PORT_MAX: Final = 65_535
_HEARTBEAT_MAX_SECS: Final = 86_400
_SWITCH: Final = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What the environment says, or the defaults."""

    metrics_port: int = 9090
    """Where `/metrics` and its neighbours answer; 0: nowhere."""

    metrics_partitions: bool = True
    """Whether `/metrics` has series of single partitions."""

    heartbeat_ms: int = 30_000
    """Between two heartbeats in the log; 0: none."""


def read_knobs(environment: Mapping[str, str]) -> Knobs:
    """Read the switches.

    Raises:
        UsageError: A value is not what the variable takes.
    """
    defaults = Knobs()
    port = _number(environment, METRICS_PORT, defaults.metrics_port, _PORT_MAX)
    secs = _number(environment, HEARTBEAT_SECS, defaults.heartbeat_ms // 1000, _HEARTBEAT_MAX_SECS)
    partitions = _switch(environment, METRICS_PARTITIONS, default=defaults.metrics_partitions)
    return Knobs(metrics_port=port, metrics_partitions=partitions, heartbeat_ms=secs * 1000)


def _number(environment: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = environment.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > len(str(most)) or int(text) > most:
        raise UsageError(
            "an environment variable is not a number in its range",
            hint=f"set {name} to a whole number from 0 (off) to {most}, or unset it",
            variable=name,
            value=text,
        )
    return int(text)


def _switch(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(name)
    if text is None:
        return default
    if text not in _SWITCH:
        raise UsageError(
            "an environment variable is neither on nor off",
            hint=f"set {name} to `on` or `off`, or unset it",
            variable=name,
            value=text,
        )
    return _SWITCH[text]
