"""The settings of topics and of this broker.

    API                      key  versions  behaviour
    DescribeConfigs           32  1-4       topics and this broker
    AlterConfigs              33  0-2       topics only; settings not named return to their default
    IncrementalAlterConfigs   44  0-1       topics; set, delete, append, subtract. The settings of
                                        the broker in `dynamic_configs`; set, delete

Deviations from Kafka: only the settings in `topic_configs` exist; every other one is refused. Most
settings of the broker are fixed at its start, so changing them is refused. DescribeConfigs responds
for each resource once, and for at most `MAX_DESCRIBED`.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import code_of
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.security.acls import ResourceType
from logmirror.broker.topic import RefusedTopicError, Topic, check_name
from logmirror.broker.topic_configs import (
    ConfigEntry,
    ConfigSource,
    ConfigType,
    MalformedConfigError,
    RefusedConfigError,
    TopicConfigs,
    broker_defaults,
    wanted_configs,
)
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_TOPIC: Final = 2
_BROKER: Final = 4
MAX_DESCRIBED: Final = 2000
"""Limit for the resources of one DescribeConfigs; each takes up to 1.5 KB and 20 entries."""

_NEVER: Final = str(2**31 - 1)
"""The largest value that Kafka accepts for `producer.id.expiration.ms`."""


class _Operation(enum.IntEnum):
    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


async def describe_configs(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DescribeConfigs."""
    kind = response_kind(Api.DESCRIBE_CONFIGS, header.version)
    results = []
    turns = Turns()
    named = {(found.resource_type, found.resource_name): found for found in request.resources}
    for number, resource in enumerate(named.values()):
        code, reason, entries = _look_up(broker, resource)
        if denied := _refusal(broker, caller, Api.DESCRIBE_CONFIGS, resource):
            code, reason, entries = denied, None, []
        if number >= MAX_DESCRIBED:
            code, entries = ErrorCode.POLICY_VIOLATION, []
            reason = f"describe at most {MAX_DESCRIBED} resources in one request"
        keys = resource.configuration_keys
        wanted = None if keys is None else frozenset(keys)
        shown = [entry for entry in entries if wanted is None or entry.name in wanted]
        await turns.took(1 + 2 * len(shown))
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
    return await turns.encoded(broker, kind, header, results=tuple(results))


def _refusal(broker: Broker, caller: Caller, api: Api, resource: Message) -> ErrorCode:
    if resource.resource_type == _TOPIC:
        name = resource.resource_name
        return broker.authorizer.refusal(caller, api, ResourceType.TOPIC, name)
    return broker.authorizer.refusal(caller, api)


def _look_up(broker: Broker, resource: Message) -> tuple[ErrorCode, str | None, list[ConfigEntry]]:
    name = resource.resource_name
    if resource.resource_type == _TOPIC:
        try:
            return ErrorCode.NONE, None, _topic(broker, name).configs.entries()
        except RefusedTopicError as refused:
            return refused.code, refused.reason, []
    if resource.resource_type == _BROKER:
        if name not in ("", str(broker.options.node_id)):
            return ErrorCode.INVALID_REQUEST, f"this is broker {broker.options.node_id}", []
        own = _broker_entries(broker) if name else []
        return ErrorCode.NONE, None, sorted(own + broker.configs.entries(name))
    return ErrorCode.INVALID_REQUEST, "resource type: only topics and brokers have settings", []


def _topic(broker: Broker, name: str) -> Topic:
    """Return a topic.

    Raises:
        RefusedTopicError: It does not exist, or no topic can have this name.
    """
    topic = broker.topics.by_name.get(name)
    if topic is None:
        check_name(name)
        raise RefusedTopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
    return topic


def _broker_entries(broker: Broker) -> list[ConfigEntry]:
    options = broker.options
    rows = {
        "auto.create.topics.enable": (
            ConfigType.BOOLEAN,
            str(options.auto_create_topics).lower(),
            "Whether a request for the metadata of an unknown topic creates it.",
        ),
        "default.replication.factor": (ConfigType.INT, "1", "There is one broker."),
        "log.dirs": (
            ConfigType.STRING,
            ",".join(broker.topics.dirs.by_name),
            "The log directories, by the names that moves use.",
        ),
        "node.id": (ConfigType.INT, str(options.node_id), "The ID of this broker."),
        "num.partitions": (
            ConfigType.INT,
            str(options.default_partitions),
            "Partitions of topics that are created without a count.",
        ),
        "producer.id.expiration.ms": (
            ConfigType.INT,
            _NEVER,
            "Producer state does not expire by age.",
        ),
        "socket.request.max.bytes": (
            ConfigType.INT,
            str(options.max_produce_frame_bytes),
            "The largest Produce request, in bytes.",
        ),
    }
    source = ConfigSource.STATIC_BROKER
    own = [
        ConfigEntry(name, value, kind, source, documentation)
        for name, (kind, value, documentation) in rows.items()
    ]
    return sorted(own + broker_defaults(options))


def _entity(kind: ResponseKind, request: Message, entry: ConfigEntry) -> Message:
    documented = request.include_documentation
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


async def alter_configs(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle AlterConfigs."""

    def change(resource: Message) -> Callable[[TopicConfigs], Mapping[str, str]]:
        return lambda _: wanted_configs(resource.configs)

    return await _alter(broker, header, request, caller, change)


async def incremental_alter_configs(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle IncrementalAlterConfigs."""

    def change(resource: Message) -> Callable[[TopicConfigs], Mapping[str, str]]:
        return lambda before: _changed(before, resource.configs)

    return await _alter(broker, header, request, caller, change)


async def _alter_broker(broker: Broker, api: Api, resource: Message, *, dry_run: bool) -> None:
    """Change settings of the broker, or replace all of them.

    Raises:
        MalformedConfigError: The request is.
        RefusedConfigError: A setting cannot be changed.
        LogmirrorError: The database could not be written.
    """
    scope = resource.resource_name
    if scope not in {"", str(broker.options.node_id)}:
        raise MalformedConfigError(f"this is broker {broker.options.node_id}")
    wanted: dict[str, str | None] = {}
    if api == Api.ALTER_CONFIGS:
        wanted |= dict.fromkeys(broker.configs.names(scope))
        wanted |= wanted_configs(resource.configs)
    for change in resource.configs if api == Api.INCREMENTAL_ALTER_CONFIGS else ():
        if change.name in wanted:
            raise MalformedConfigError(f"{change.name}: named twice")
        if change.config_operation not in {_Operation.SET, _Operation.DELETE}:
            raise MalformedConfigError(f"{change.name}: not a list")
        is_set = change.config_operation == _Operation.SET
        if is_set and change.value is None:
            raise MalformedConfigError(f"{change.name}: the value must not be null")
        wanted[change.name] = change.value if is_set else None
    changes = broker.configs.checked(scope, wanted)
    if not dry_run:
        store = broker.store.change_broker_configs
        await broker.changes.run(_stored(broker, store, changes))


async def _stored(
    broker: Broker,
    store: Callable[[Mapping[tuple[str, str], str | None]], None],
    changes: Mapping[tuple[str, str], str | None],
) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(broker.changers, store, changes)
    broker.configs.apply(changes)


def _changed(before: TopicConfigs, changes: tuple[Message, ...]) -> dict[str, str]:
    """Return a topic's values after an incremental change."""
    values = dict(before.values)
    named = Counter(change.name for change in changes)
    for change in changes:
        name = change.name
        if named[name] > 1:
            raise MalformedConfigError(f"{name}: named twice")
        if change.config_operation == _Operation.DELETE:
            values.pop(name, None)
            continue
        if change.value is None:
            raise MalformedConfigError(f"{name}: the value must not be null")
        if change.config_operation == _Operation.SET:
            values[name] = change.value
        elif change.config_operation in (_Operation.APPEND, _Operation.SUBTRACT):
            items = before.list_value(name)
            given = change.value.split(",")
            kept = [item for item in items if item not in given]
            values[name] = ",".join(
                [*items, *(item for item in given if item not in items)]
                if change.config_operation == _Operation.APPEND
                else kept
            )
        else:
            raise MalformedConfigError(f"{name}: unknown operation")
    return values


async def _alter(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
    change: Callable[[Message], Callable[[TopicConfigs], Mapping[str, str]]],
) -> bytes:
    kind = response_kind(header.api_key, header.version)
    named = Counter((found.resource_type, found.resource_name) for found in request.resources)
    responses = []
    turns = Turns()
    for resource in {
        (one.resource_type, one.resource_name): one for one in request.resources
    }.values():
        await turns.took()
        kind_and_name = resource.resource_type, resource.resource_name
        code, reason = ErrorCode.INVALID_REQUEST, "named twice"
        if denied := _refusal(broker, caller, Api(header.api_key), resource):
            code, reason = denied, ""
        elif named[kind_and_name] == 1:
            dry_run = request.validate_only
            code, reason = await _alter_one(
                broker, Api(header.api_key), resource, change(resource), dry_run=dry_run
            )
        responses.append(
            kind.entity(
                "AlterConfigsResourceResponse",
                error_code=code,
                error_message=reason,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
        )
    return await turns.encoded(broker, kind, header, responses=tuple(responses))


async def _alter_one(
    broker: Broker,
    api: Api,
    resource: Message,
    changed: Callable[[TopicConfigs], Mapping[str, str]],
    *,
    dry_run: bool,
) -> tuple[ErrorCode, str]:
    code, reason = ErrorCode.NONE, ""
    try:
        if resource.resource_type == _BROKER:
            await _alter_broker(broker, api, resource, dry_run=dry_run)
            return code, reason
        if resource.resource_type != _TOPIC or not resource.resource_name:
            raise MalformedConfigError("resource type: only topics and brokers have settings")  # noqa: TRY301  # as other refusals
        topic = _topic(broker, resource.resource_name)
        await broker.topics.set_configs(topic, changed, dry_run=dry_run)
    except MalformedConfigError as refused:
        code, reason = ErrorCode.INVALID_REQUEST, refused.reason
    except RefusedConfigError as refused:
        code, reason = ErrorCode.INVALID_CONFIG, refused.reason
    except RefusedTopicError as refused:
        code, reason = refused.code, refused.reason
    except LogmirrorError as error:
        _LOG.exception("%s could not be configured", resource.resource_name or "brokers")
        code, reason = code_of(error), error.message
    return code, reason
