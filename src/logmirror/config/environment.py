"""Settings of the process, which come from environment variables instead of the file.

Two of them have other names in mirror-v3. These are used if logmirror's variables are not set.
"""

from __future__ import annotations

import ipaddress
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_LOG = logging.getLogger("logmirror.environment")

METRICS_PORT: Final = "LOGMIRROR_METRICS_PORT"
METRICS_HOST: Final = "LOGMIRROR_METRICS_HOST"
METRICS_PARTITIONS: Final = "LOGMIRROR_METRICS_PARTITIONS"
HEARTBEAT_SECS: Final = "LOGMIRROR_HEARTBEAT_SECS"

_MIRROR_V3_NAMES: Final = {
    METRICS_PORT: "MIRROR_V3_METRICS_PORT",
    HEARTBEAT_SECS: "MIRROR_V3_HEARTBEAT_SECS",
}
IGNORED_VARIABLES: Final = (
    "MIRROR_V3_CACHE_PORT",
    "MIRROR_V3_READINESS_LAG",
    "MIRROR_V3_READINESS_POLL_MS",
    "MIRROR_V3_OFFSET_COMMIT_INTERVAL_MS",
    "RUST_LOG",
)
"""Other variables of mirror-v3. They configure unsupported features, or have an option instead."""

_EVERYWHERE: Final = "0.0.0.0"  # noqa: S104  # where mirror-v3 listens
_PORT_MAX: Final = 65_535
_HEARTBEAT_MAX_SECS: Final = 86_400
_SWITCH: Final = {"on": True, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnvironment:
    """The environment variables' values, or the defaults."""

    metrics_port: int = 9090
    """Port of `/metrics` and the other HTTP endpoints; 0 disables them."""

    metrics_port_is_set: bool = False
    """Whether a variable sets the port. A port that is set must be free."""

    metrics_host: str = "127.0.0.1"
    """IP address on which that port listens."""

    metrics_partitions: bool = True
    """Whether `/metrics` has series per partition."""

    heartbeat_ms: int = 30_000
    """Interval of heartbeats in the log, in milliseconds; 0 disables them."""


def read_environment(environment: Mapping[str, str]) -> ProcessEnvironment:
    """Return the settings of the process.

    Where only `MIRROR_V3_METRICS_PORT` sets the port, it listens on all of IPv4, as in mirror-v3.

    Raises:
        UsageError: A variable has an invalid value. Facts: `variable`, `value`.
    """
    defaults = ProcessEnvironment()
    port = _number(environment, METRICS_PORT, defaults.metrics_port, _PORT_MAX)
    default_secs = defaults.heartbeat_ms // 1000
    secs = _number(environment, HEARTBEAT_SECS, default_secs, _HEARTBEAT_MAX_SECS)
    partitions = _switch(environment, METRICS_PARTITIONS, default=defaults.metrics_partitions)
    is_old = METRICS_PORT not in environment and _MIRROR_V3_NAMES[METRICS_PORT] in environment
    return ProcessEnvironment(
        metrics_port=port,
        metrics_port_is_set=is_old or METRICS_PORT in environment,
        metrics_host=_address(environment, _EVERYWHERE if is_old else defaults.metrics_host),
        metrics_partitions=partitions,
        heartbeat_ms=secs * 1000,
    )


def log_ignored_variables(environment: Mapping[str, str]) -> None:
    """Log, in one line, the variables of mirror-v3 that are set and ignored."""
    found = [name for name in IGNORED_VARIABLES if name in environment]
    if found:
        _LOG.warning(
            "environment variables of mirror-v3 are ignored",
            extra={"facts": {"variables": ",".join(found)}},
        )


def _number(environment: Mapping[str, str], name: str, default: int, maximum: int) -> int:
    if name not in environment and _MIRROR_V3_NAMES[name] in environment:
        name = _MIRROR_V3_NAMES[name]
    text = environment.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(maximum))
    if not is_number or int(text) > maximum:
        raise UsageError(
            "an environment variable is not a number in its range",
            hint=f"set {name} to a whole number from 0 (off) to {maximum}, or unset it",
            variable=name,
            value=text,
        )
    return int(text)


def _address(environment: Mapping[str, str], default: str) -> str:
    text = environment.get(METRICS_HOST, default)
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise UsageError(
            "an environment variable is not an IP address",
            hint=f"set {METRICS_HOST} to an address of this machine, to 0.0.0.0 for all its IPv4 "
            "addresses, to :: for all its addresses, or unset it",
            variable=METRICS_HOST,
            value=text,
        ) from error


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
