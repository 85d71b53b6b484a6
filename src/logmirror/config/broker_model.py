"""The shape of the configuration file's section `broker`: the settings of `logmirror broker`.

Each key has the name of the command's option, which overrides it. To add a setting: a field here
and in `BrokerSettings`, an option in `cli/broker.py`, then `make schema`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from logmirror.config.addresses import parse_address, parse_override, parse_topic
from logmirror.config.base_model import Model

_SEVERAL: Final = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]
}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _check_address(text: str) -> str:
    parse_address(text)
    return text


def _check_topics(topics: list[str]) -> list[str]:
    for text in topics:
        parse_topic(text, 1)
    return topics


def _check_overrides(overrides: list[str]) -> list[str]:
    for text in overrides:
        parse_override(text)
    return overrides


_Several = Annotated[
    list[str], BeforeValidator(_as_list), Field(min_length=1), WithJsonSchema(_SEVERAL)
]


class BrokerModel(Model):
    """The embedded broker. Each key is an option of `logmirror broker`, which overrides it."""

    log_dir: _Several
    """Directory of the topics, or a list of them. A new partition goes to the directory with the
    fewest partitions."""

    listen: Annotated[str, AfterValidator(_check_address)] = "127.0.0.1:9092"
    """`HOST:PORT`; port 0: any free port."""

    auto_create: bool = True
    """Whether a topic is created when a client asks for its metadata."""

    partitions: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Default number of partitions of a new topic."""

    flush_on_ack: bool = True
    """Whether a record is flushed before its response. Without, a power loss can take away the
    records of the last second."""

    topic: Annotated[_Several, AfterValidator(_check_topics)] = Field(default_factory=list)
    """`NAME` or `NAME:PARTITIONS`, or a list of them: topics that are created before the broker
    listens, if they do not exist."""

    override: Annotated[_Several, AfterValidator(_check_overrides)] = Field(default_factory=list)
    """`NAME=VALUE`, or a list of them: defaults of topic settings, by Kafka's name of the broker
    setting, such as `log.retention.ms=604800000`."""

    monitoring_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of `/metrics`, `/livez`, `/readyz` and `/status.json`; 0: none."""

    monitoring_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """IP address on which that port listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """The settings of the embedded broker; see `BrokerModel`."""

    log_dir: tuple[str, ...]
    listen: str
    auto_create: bool
    partitions: int
    flush_on_ack: bool
    topic: tuple[str, ...]
    override: tuple[str, ...]
    monitoring_port: int
    monitoring_host: str


def broker_settings(model: BrokerModel) -> BrokerSettings:
    """Return the settings of a valid section."""
    return BrokerSettings(
        log_dir=tuple(model.log_dir),
        listen=model.listen,
        auto_create=model.auto_create,
        partitions=model.partitions,
        flush_on_ack=model.flush_on_ack,
        topic=tuple(model.topic),
        override=tuple(model.override),
        monitoring_port=model.monitoring_port,
        monitoring_host=model.monitoring_host,
    )
