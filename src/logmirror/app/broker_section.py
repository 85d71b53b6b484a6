"""The section `broker` of a configuration, checked for what only the embedded broker knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker import topic_configs
from logmirror.config.addresses import parse_override
from logmirror.config.problems import config_error
from logmirror.config.suggestions import did_you_mean
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from logmirror.config.settings import Settings

_PATH = "broker.override"


def check_overrides(settings: Settings) -> None:
    """Check the settings that override defaults of topics, as the broker does when it starts.

    Raises:
        ConfigError: A setting or its value is not supported.
    """
    if settings.broker is None:
        return
    problems = []
    for name, value in map(parse_override, settings.broker.override):
        try:
            topic_configs.check_overrides({name: value})
        except UsageError as error:
            problems.append(settings.locations.problem(_PATH, *_described(name, error)))
    if problems:
        raise config_error(settings.name, problems)


def _described(name: str, error: UsageError) -> tuple[str, str]:
    """Return a message without the value, and a suggestion."""
    if "expected" in error.facts:
        return f"{name} must be {error.facts['expected']}", ""
    supported = str(error.facts["supported"])
    near = did_you_mean(name, supported.split(", "))
    return f"{name} is not supported", near or f"supported are {supported}"
