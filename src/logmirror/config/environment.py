"""Switches of the process itself, which come from its environment and not from the file.

Two of them have had other names in mirror-v3, which count where ours are not set.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOG = logging.getLogger("logmirror.knobs")

METRICS_PORT: Final = "LOGMIRROR_METRICS_PORT"
METRICS_PARTITIONS: Final = "LOGMIRROR_METRICS_PARTITIONS"
HEARTBEAT_SECS: Final = "LOGMIRROR_HEARTBEAT_SECS"

_OF_MIRROR_V3: Final = {
    METRICS_PORT: "MIRROR_V3_METRICS_PORT",
    HEARTBEAT_SECS: "MIRROR_V3_HEARTBEAT_SECS",
}
WITHOUT_MEANING: Final = (
    "MIRROR_V3_CACHE_PORT",
    "MIRROR_V3_READINESS_LAG",
    "MIRROR_V3_READINESS_POLL_MS",
    "MIRROR_V3_OFFSET_COMMIT_INTERVAL_MS",
    "RUST_LOG",
)
"""Other variables of mirror-v3: of what is not offered, or is said by an option here."""

_PORT_MAX: Final = 65_535
_HEARTBEAT_MAX_SECS: Final = 86_400
_SWITCH: Final = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnvironment:
    """What the environment says, or the defaults."""

    metrics_port: int = 9090
    """Where `/metrics` and its neighbours answer; 0: nowhere."""

    metrics_partitions: bool = True
    """Whether `/metrics` has series of single partitions."""

    heartbeat_ms: int = 30_000
    """Between two heartbeats in the log; 0: none."""


def read_environment(environment: Mapping[str, str]) -> ProcessEnvironment:
    """Read the switches.

    Raises:
        UsageError: A value is not what the variable takes.
    """
    defaults = ProcessEnvironment()
    port = _number(environment, METRICS_PORT, defaults.metrics_port, _PORT_MAX)
    secs = _number(environment, HEARTBEAT_SECS, defaults.heartbeat_ms // 1000, _HEARTBEAT_MAX_SECS)
    partitions = _switch(environment, METRICS_PARTITIONS, default=defaults.metrics_partitions)
    return ProcessEnvironment(
        metrics_port=port, metrics_partitions=partitions, heartbeat_ms=secs * 1000
    )


def log_ignored_variables(environment: Mapping[str, str]) -> None:
    """Say in one line of the log which variables are set that do nothing here."""
    found = [name for name in WITHOUT_MEANING if name in environment]
    if found:
        _LOG.warning(
            "environment variables of mirror-v3 that have no meaning here",
            extra={"facts": {"variables": ",".join(found)}},
        )


def _number(environment: Mapping[str, str], name: str, default: int, most: int) -> int:
    if name not in environment and _OF_MIRROR_V3[name] in environment:
        name = _OF_MIRROR_V3[name]
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
