"""DescribeConfigs (key 32, versions 1-4): topics and this broker, as `topic_configs` knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from logmirror.broker.apis import Api
from logmirror.broker.topic_configs import ConfigEntry, ConfigSource, ConfigType
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    from logmirror.broker.broker import Broker, Caller
    from logmirror.wire.frames import RequestHeader

_TOPIC: Final = 2
_BROKER: Final = 4


def describe_configs(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,  # noqa: ARG001  # as all handlers
) -> bytes:
    """Answer DescribeConfigs."""
    kind = response_kind(Api.DESCRIBE_CONFIGS, header.version)
    results = []
    for resource in request.resources:
        code, reason, entries = _look_up(broker, resource)
        keys = resource.configuration_keys
        shown = [entry for entry in entries if keys is None or entry.name in keys]
        results.append(
            kind.entity(
                "DescribeConfigsResult",
                error_code=code,
                error_message=reason,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
                configs=tuple(_entity(kind, request, entry) for entry in shown),
            )
        )
    return kind.frame(header.correlation_id, results=tuple(results))


def _look_up(broker: Broker, resource: Message) -> tuple[ErrorCode, str | None, list[ConfigEntry]]:
    name = resource.resource_name
    if resource.resource_type == _TOPIC:
        topic = broker.topics.by_name.get(name)
        if topic is None:
            return ErrorCode.unknown_topic_or_partition, "no such topic", []
        return ErrorCode.none, None, topic.configs.entries()
    if resource.resource_type == _BROKER:
        if name not in ("", str(broker.options.node_id)):
            return ErrorCode.invalid_request, f"this is broker {broker.options.node_id}", []
        return ErrorCode.none, None, _broker_entries(broker)
    return ErrorCode.invalid_request, "this broker has topics and itself", []


def _broker_entries(broker: Broker) -> list[ConfigEntry]:
    options = broker.options
    rows = {
        "auto.create.topics.enable": (
            ConfigType.BOOLEAN,
            str(options.auto_create_topics).lower(),
            "Whether asking for an unknown topic creates it.",
        ),
        "default.replication.factor": (ConfigType.INT, "1", "There is one broker."),
        "log.dirs": (ConfigType.STRING, str(options.log_dir), "Where records are."),
        "log.segment.bytes": (
            ConfigType.INT,
            str(options.segment_bytes),
            "`segment.bytes` of topics that do not say.",
        ),
        "message.max.bytes": (
            ConfigType.INT,
            str(options.max_message_bytes),
            "`max.message.bytes` of topics that do not say.",
        ),
        "node.id": (ConfigType.INT, str(options.node_id), "This broker."),
        "num.partitions": (
            ConfigType.INT,
            str(options.default_partitions),
            "Of topics whose creator does not say.",
        ),
        "socket.request.max.bytes": (
            ConfigType.INT,
            str(options.max_produce_frame_bytes),
            "The largest Produce request.",
        ),
    }
    source = ConfigSource.STATIC_BROKER
    return [
        ConfigEntry(name, value, kind, source, documentation)
        for name, (kind, value, documentation) in rows.items()
    ]


def _entity(kind: ResponseKind, request: Message, entry: ConfigEntry) -> Message:
    documented = getattr(request, "include_documentation", False)
    synonym = kind.entity(
        "DescribeConfigsSynonym", name=entry.name, value=entry.value, source=entry.source
    )
    return kind.entity(
        "DescribeConfigsResourceResult",
        name=entry.name,
        value=entry.value,
        read_only=entry.source == ConfigSource.STATIC_BROKER,
        is_default=entry.source == ConfigSource.DEFAULT,
        config_source=entry.source,
        is_sensitive=False,
        synonyms=(synonym,) if request.include_synonyms else (),
        config_type=entry.type,
        documentation=entry.documentation if documented else None,
    )
