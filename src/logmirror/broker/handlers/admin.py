"""Topics and the cluster.

    API               key  versions  behaviour
    ApiVersions        18  0-4       unsupported versions: error 35 in the layout of version 0
    Metadata            3  0-12      creates unknown topics if broker and request allow it; while an
                                     archive was never listed, they are LEADER_NOT_AVAILABLE
    CreateTopics       19  2-7       durable before the response
    DeleteTopics       20  1-6       by name, or by topic ID (version 6); files are removed first
    CreatePartitions   37  0-3       durable before the response
    DescribeCluster    60  0-1       endpoint type: brokers only

Deviations from Kafka: one broker, which holds the only replica of every partition and is the
controller. The leader epoch is always 0. Request timeouts are not used.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import ADVERTISED_FROM, TRANSACTION_VERSION, VERSIONS, Api
from logmirror.broker.changes import code_of
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.security.acls import CLUSTER_NAME, Operation, ResourceType
from logmirror.broker.topic import RefusedTopicError, Topic, check_name
from logmirror.broker.topic_configs import RefusedConfigError, wanted_configs
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, ResponseKind, response_kind

if TYPE_CHECKING:
    import uuid
    from collections.abc import Sequence

    from logmirror.broker.broker import Broker, Caller
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
_DEFAULT_COUNT: Final = -1
_NO_NODE: Final = -1
_TRANSACTIONS: Final = 1
_SUPPORTED_FROM_ZERO: Final = 4
"""Clients of ApiVersions below this version do not accept a feature from level 0 on."""

_SOFTWARE_FROM: Final = 3
_SOFTWARE: Final = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?")
"""A client's name or version, from that version of ApiVersions on (KIP-511)."""

_TOPIC_IDS_FROM: Final = 12
"""Metadata of versions 10 and 11 has topic IDs that a request must not use, as in Apache Kafka."""

_OFFLINE: Final = ErrorCode.LEADER_NOT_AVAILABLE
_CONFIGS: Final = "CreatableTopicConfigs"
_BROKERS_ENDPOINT: Final = 1
_CONTROLLERS_ENDPOINT: Final = 2
_TOPIC: Final = ResourceType.TOPIC
_KEY_TYPES: Final = {0: ResourceType.GROUP, 1: ResourceType.TRANSACTIONAL_ID}


def api_versions(header: RequestHeader, request: Message | None) -> bytes:
    """Handle ApiVersions.

    An unsupported version, which has no request, gets an error response in version 0.
    """
    if request is None:
        return _api_versions(0, ErrorCode.UNSUPPORTED_VERSION, header.correlation_id)
    names = request.client_software_name, request.client_software_version
    if header.version >= _SOFTWARE_FROM and not all(map(_SOFTWARE.fullmatch, names)):
        kind = response_kind(Api.API_VERSIONS, header.version)
        return kind.frame(header.correlation_id, error_code=ErrorCode.INVALID_REQUEST, api_keys=())
    return _api_versions(header.version, ErrorCode.NONE, header.correlation_id)


def _api_versions(version: int, code: ErrorCode, correlation_id: int) -> bytes:
    kind = response_kind(Api.API_VERSIONS, version)
    keys = tuple(
        kind.entity(
            "ApiVersion",
            api_key=key,
            min_version=ADVERTISED_FROM.get(key, first),
            max_version=last,
        )
        for key, (first, last) in VERSIONS.items()
    )
    feature = {"name": "transaction.version", "min_version": 0, "max_version": TRANSACTION_VERSION}
    level = {"max_version_level": TRANSACTION_VERSION, "min_version_level": TRANSACTION_VERSION}
    has_zero = version >= _SUPPORTED_FROM_ZERO
    return kind.frame(
        correlation_id,
        error_code=code,
        api_keys=keys,
        supported_features=(kind.entity("SupportedFeatureKey", **feature),) if has_zero else (),
        finalized_features_epoch=0,
        finalized_features=(kind.entity("FinalizedFeatureKey", name=feature["name"], **level),),
    )


def address_of(caller: Caller) -> dict[str, object]:
    """Return the broker's address as a response gives it to this client."""
    host, port = caller.broker_address
    return {"host": host, "port": port}


async def metadata(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle Metadata."""
    kind = response_kind(Api.METADATA, header.version)
    topics = []
    turns = Turns()
    wanted = _asked_topics(broker, header, request, caller)
    has_ids = any(name is None or topic_id is not None for name, topic_id in wanted)
    for name, topic_id in wanted:
        if has_ids and header.version < _TOPIC_IDS_FROM:
            refused = (name or "", topic_id), ErrorCode.INVALID_REQUEST
            topics.append(await _topic_entity(broker, kind, turns, *refused, None, None))
            continue
        may_create = request.allow_auto_topic_creation
        code, topic = await _find_or_create(broker, caller, name, topic_id, may_create=may_create)
        operations = None
        if topic is not None and request.include_topic_authorized_operations:
            operations = broker.authorizer.operations(caller, _TOPIC, topic.name)
        asked = name, topic_id
        topics.append(await _topic_entity(broker, kind, turns, asked, code, topic, operations))
    node, (host, port) = broker.options.node_id, caller.broker_address
    address = {"node_id": node, "host": host, "port": port, "rack": None}
    operations = None
    if request.include_cluster_authorized_operations:
        operations = _cluster_operations(broker, caller)
    return await turns.encoded(
        broker,
        kind,
        header,
        brokers=(kind.entity("MetadataResponseBroker", **address),),
        cluster_id=broker.store.cluster_id,
        controller_id=node,
        topics=tuple(topics),
        authorized_operations=operations,
    )


def _cluster_operations(broker: Broker, caller: Caller) -> set[int]:
    """Return the operations on the cluster that the client may do; none if it may not describe."""
    cluster, authorizer = ResourceType.CLUSTER, broker.authorizer
    if not authorizer.allows(caller, Operation.DESCRIBE, cluster, CLUSTER_NAME):
        return set()
    return authorizer.operations(caller, cluster)


def _asked_topics(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> list[tuple[str | None, uuid.UUID | None]]:
    """Return name and ID of each requested topic, once. In version 0 an empty list means all."""
    if request.topics is None or (header.version == 0 and not request.topics):
        names = sorted(broker.topics.by_name)
        refusal = broker.authorizer.refusal
        return [(n, None) for n in names if not refusal(caller, Api.METADATA, _TOPIC, n)]
    # Java clients send an empty name beside an ID. Where IDs count, a name beside one does not.
    by_id = header.version >= _TOPIC_IDS_FROM
    asked = [
        (None if by_id and topic.topic_id is not None else topic.name, topic.topic_id)
        for topic in request.topics
    ]
    return list(dict.fromkeys(asked))


async def _find_or_create(
    broker: Broker,
    caller: Caller,
    name: str | None,
    topic_id: uuid.UUID | None,
    *,
    may_create: bool,
) -> tuple[ErrorCode, Topic | None]:
    refusal = broker.authorizer.refusal
    if name is None:
        topic = broker.topics.by_id.get(topic_id.bytes) if topic_id is not None else None
        if topic is not None and refusal(caller, Api.METADATA, _TOPIC, topic.name):
            topic = None
        return (ErrorCode.UNKNOWN_TOPIC_ID if topic is None else ErrorCode.NONE), topic
    if code := refusal(caller, Api.METADATA, _TOPIC, name):
        return code, None
    topic = broker.topics.by_name.get(name)
    if topic is not None or broker.topics.has_unlisted_archives:  # it may be a topic of theirs
        return (ErrorCode.LEADER_NOT_AVAILABLE if topic is None else ErrorCode.NONE), topic
    if may_create and broker.options.auto_create_topics:
        return await _create_on_first_use(broker, caller, name)
    try:
        check_name(name)
    except RefusedTopicError as refused:
        return refused.code, None
    return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None


def _create_refusal(broker: Broker, caller: Caller, name: str) -> ErrorCode:
    """Check the creation of a topic: CREATE on the cluster, or on the topic, is enough."""
    if not broker.authorizer.refusal(caller, Api.CREATE_TOPICS):
        return ErrorCode.NONE
    return broker.authorizer.refusal(caller, Api.CREATE_TOPICS, _TOPIC, name)


async def _create_on_first_use(
    broker: Broker, caller: Caller, name: str
) -> tuple[ErrorCode, Topic | None]:
    if code := _create_refusal(broker, caller, name):
        return code, None
    try:
        return ErrorCode.NONE, await broker.topics.create(name, _DEFAULT_COUNT, {})
    except RefusedTopicError as refused:
        if refused.code == ErrorCode.TOPIC_ALREADY_EXISTS:  # created meanwhile by another request
            return ErrorCode.NONE, broker.topics.by_name.get(name)
        return refused.code, None
    except LogmirrorError as error:
        _LOG.exception("topic %s could not be created", name)
        return code_of(error), None


async def _topic_entity(  # noqa: PLR0913, PLR0917  # one topic of a response
    broker: Broker,
    kind: ResponseKind,
    turns: Turns,
    asked: tuple[str | None, uuid.UUID | None],
    code: ErrorCode,
    topic: Topic | None,
    operations: set[int] | None,
) -> Message:
    node = broker.options.node_id
    name, topic_id = asked
    partitions = []
    await turns.took()
    for number, log in enumerate(topic.logs if topic is not None else ()):
        await turns.took()
        partitions.append(
            kind.entity(
                "MetadataResponsePartition",
                error_code=ErrorCode.NONE if log.failure is None else _OFFLINE,
                partition_index=number,
                leader_id=node if log.failure is None else _NO_NODE,
                leader_epoch=0,
                replica_nodes=(node,),
                isr_nodes=(node,) if log.failure is None else (),
                offline_replicas=() if log.failure is None else (node,),
            )
        )
    return kind.entity(
        "MetadataResponseTopic",
        error_code=code,
        name=topic.name if topic is not None else name,
        topic_id=topic.topic_id if topic is not None else topic_id,
        is_internal=False,
        partitions=tuple(partitions),
        authorized_operations=operations,
    )


async def create_topics(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle CreateTopics."""
    kind = response_kind(Api.CREATE_TOPICS, header.version)
    names = Counter(wanted.name for wanted in request.topics)
    results = []
    turns = Turns()
    for wanted in {wanted.name: wanted for wanted in request.topics}.values():
        code, reason, topic = ErrorCode.NONE, None, None
        await turns.took()
        try:
            if denied := _create_refusal(broker, caller, wanted.name):
                raise RefusedTopicError(denied, denied.name)  # noqa: TRY301  # as other refusals
            node = broker.options.node_id
            count = _partition_count(wanted, node, times_named=names[wanted.name])
            configs = wanted_configs(wanted.configs)
            topic = await broker.topics.create(
                wanted.name, count, configs, dry_run=request.validate_only
            )
        except RefusedTopicError as refused:
            code, reason = refused.code, refused.reason
        except RefusedConfigError as refused:
            code, reason = ErrorCode.INVALID_CONFIG, refused.reason
        except LogmirrorError as error:
            _LOG.exception("topic %s could not be created", wanted.name)
            code, reason = code_of(error), error.message
        shows_configs = broker.authorizer.allows(
            caller, Operation.DESCRIBE_CONFIGS, _TOPIC, wanted.name
        )
        found = _created_entity(kind, wanted, code, reason, topic if shows_configs else None)
        if topic is not None and not shows_configs:
            found.topic_id = topic.topic_id
            found.topic_config_error_code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        results.append(found)
    return await turns.encoded(broker, kind, header, topics=tuple(results))


def _partition_count(wanted: Message, node_id: int, *, times_named: int) -> int:
    """Return the requested partition count, from the count or from the replica assignment."""
    if times_named > 1:
        raise RefusedTopicError(ErrorCode.INVALID_REQUEST, "topic is named twice")
    if not wanted.assignments:
        if wanted.replication_factor not in (_DEFAULT_COUNT, 1):
            raise RefusedTopicError(
                ErrorCode.INVALID_REPLICATION_FACTOR, "one broker holds one replica"
            )
        return int(wanted.num_partitions)
    if wanted.num_partitions != _DEFAULT_COUNT or wanted.replication_factor != _DEFAULT_COUNT:
        raise RefusedTopicError(
            ErrorCode.INVALID_REQUEST, "both an assignment and a number of partitions"
        )
    indexes = sorted(assignment.partition_index for assignment in wanted.assignments)
    one_each = all(list(assignment.broker_ids) == [node_id] for assignment in wanted.assignments)
    if indexes != list(range(len(indexes))) or not one_each:
        raise RefusedTopicError(
            ErrorCode.INVALID_REPLICA_ASSIGNMENT,
            f"partitions 0 to n - 1, one replica each, on broker {node_id}",
        )
    return len(indexes)


def _created_entity(
    kind: ResponseKind, wanted: Message, code: ErrorCode, reason: str | None, topic: Topic | None
) -> Message:
    entries = topic.configs.entries() if topic is not None else []
    return kind.entity(
        "CreatableTopicResult",
        name=wanted.name,
        topic_id=topic.topic_id if topic is not None else None,
        error_code=code,
        error_message=reason,
        num_partitions=len(topic.logs) if topic is not None else -1,
        replication_factor=1 if topic is not None else -1,
        configs=tuple(
            kind.entity(
                _CONFIGS,
                name=entry.name,
                value=entry.value,
                read_only=False,
                config_source=entry.source,
                is_sensitive=False,
            )
            for entry in entries
        ),
    )


async def delete_topics(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle DeleteTopics."""
    kind = response_kind(Api.DELETE_TOPICS, header.version)
    results = []
    turns = Turns()
    for name, topic_id in _topics_to_delete(request):
        await turns.took()
        topics = broker.topics
        if name is not None:
            topic, code = topics.by_name.get(name), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        else:
            key = topic_id.bytes if topic_id is not None else b""
            topic, code = topics.by_id.get(key), ErrorCode.UNKNOWN_TOPIC_ID
        reason, asked = None, name if topic is None else topic.name
        denied = asked is not None and _delete_refusal(broker, caller, asked)
        if denied:
            code = denied
            if not broker.authorizer.allows(caller, Operation.DESCRIBE, _TOPIC, str(asked)):
                topic = None
        elif topic is not None:
            try:
                await topics.delete(topic)
                code = ErrorCode.NONE
            except RefusedTopicError as refused:
                code, reason = refused.code, refused.reason
            except (LogmirrorError, OSError) as error:
                _LOG.exception("topic %s could not be deleted", topic.name)
                code, reason = code_of(error), str(error)
        results.append(
            kind.entity(
                "DeletableTopicResult",
                name=topic.name if topic is not None else name,
                topic_id=topic.topic_id if topic is not None else topic_id,
                error_code=code,
                error_message=reason,
            )
        )
    return await turns.encoded(broker, kind, header, responses=tuple(results))


def _delete_refusal(broker: Broker, caller: Caller, name: str) -> ErrorCode:
    return broker.authorizer.refusal(caller, Api.DELETE_TOPICS, _TOPIC, name)


def _topics_to_delete(request: Message) -> Sequence[tuple[str | None, uuid.UUID | None]]:
    """Return name and ID of each topic to delete, each once; before version 6 only names."""
    named = [(name, None) for name in request.topic_names]
    listed = [(topic.name, topic.topic_id) for topic in request.topics]
    return list(dict.fromkeys([*named, *listed]))


async def create_partitions(
    broker: Broker,
    header: RequestHeader,
    request: Message,
    caller: Caller,
) -> bytes:
    """Handle CreatePartitions."""
    kind = response_kind(Api.CREATE_PARTITIONS, header.version)
    names = Counter(wanted.name for wanted in request.topics)
    results = []
    turns = Turns()
    for wanted in {wanted.name: wanted for wanted in request.topics}.values():
        code, reason = ErrorCode.NONE, None
        await turns.took()
        try:
            if denied := broker.authorizer.refusal(
                caller, Api.CREATE_PARTITIONS, _TOPIC, wanted.name
            ):
                raise RefusedTopicError(denied, denied.name)  # noqa: TRY301  # as other refusals
            topic = _topic_to_grow(broker, wanted, times_named=names[wanted.name])
            await broker.topics.add_partitions(topic, wanted.count, dry_run=request.validate_only)
        except RefusedTopicError as refused:
            code, reason = refused.code, refused.reason
        except LogmirrorError as error:
            _LOG.exception("topic %s: partitions could not be added", wanted.name)
            code, reason = code_of(error), error.message
        results.append(
            kind.entity(
                "CreatePartitionsTopicResult",
                name=wanted.name,
                error_code=code,
                error_message=reason,
            )
        )
    return await turns.encoded(broker, kind, header, results=tuple(results))


def _topic_to_grow(broker: Broker, wanted: Message, *, times_named: int) -> Topic:
    if times_named > 1:
        raise RefusedTopicError(ErrorCode.INVALID_REQUEST, "topic is named twice")
    topic = broker.topics.by_name.get(wanted.name)
    if topic is None:
        raise RefusedTopicError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "no such topic")
    if wanted.assignments is not None:
        mine = [broker.options.node_id]
        one_each = all(list(assignment.broker_ids) == mine for assignment in wanted.assignments)
        if not one_each or len(wanted.assignments) != wanted.count - len(topic.logs):
            raise RefusedTopicError(
                ErrorCode.INVALID_REPLICA_ASSIGNMENT, "one replica for each new partition"
            )
    return topic


def describe_cluster(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle DescribeCluster."""
    kind = response_kind(Api.DESCRIBE_CLUSTER, header.version)
    endpoint_type = request.endpoint_type
    node, (host, port) = broker.options.node_id, caller.broker_address
    address = {"broker_id": node, "host": host, "port": port, "rack": None}
    is_ours = endpoint_type == _BROKERS_ENDPOINT
    code = ErrorCode.NONE if is_ours else ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
    if endpoint_type == _CONTROLLERS_ENDPOINT:
        code = ErrorCode.MISMATCHED_ENDPOINT_TYPE
    shows_operations = is_ours and request.include_cluster_authorized_operations
    return kind.frame(
        header.correlation_id,
        error_code=code,
        error_message=None,
        endpoint_type=_BROKERS_ENDPOINT,
        cluster_id=broker.store.cluster_id,
        controller_id=node,
        brokers=(kind.entity("DescribeClusterBroker", **address),) if is_ours else (),
        authorized_operations=_cluster_operations(broker, caller) if shows_operations else None,
    )
