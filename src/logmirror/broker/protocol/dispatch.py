"""Dispatches a request to its handler.

A request is decoded before anything is awaited: its frame is a view of the connection's buffer,
which the next bytes overwrite. A large request is copied, and decoded in the executor. Only a few
of these are processed at the same time, so that their memory is bounded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api, has_response
from logmirror.broker.handlers import (
    acls,
    admin,
    client_quotas,
    configs,
    consumer_groups,
    delete_records,
    fetch,
    group_offsets,
    groups,
    log_dirs,
    offsets,
    producers,
    transactions,
    users,
)
from logmirror.wire import serve_consumer_groups
from logmirror.wire.frames import RemoteProtocolError, RequestHeader, read_client_id
from logmirror.wire.serve_fetch import parse_fetch
from logmirror.wire.serve_messages import Message, read_request

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.handlers.fetch import Part

    Later = Coroutine[None, None, bytes | list[Part]] | asyncio.Future[bytes]
    Response = bytes | list[Part] | Later

BULK_BYTES: Final = 64 * 1024
"""A larger request is decoded in the executor."""

_HANDLERS: Final[Mapping[int, Callable[[Broker, RequestHeader, Message, Caller], Response]]] = {
    Api.LIST_OFFSETS: offsets.list_offsets,
    Api.METADATA: admin.metadata,
    Api.OFFSET_COMMIT: group_offsets.offset_commit,
    Api.OFFSET_FETCH: group_offsets.offset_fetch,
    Api.OFFSET_DELETE: group_offsets.offset_delete,
    Api.FIND_COORDINATOR: groups.find_coordinator,
    Api.JOIN_GROUP: groups.join_group,
    Api.HEARTBEAT: groups.heartbeat,
    Api.LEAVE_GROUP: groups.leave_group,
    Api.SYNC_GROUP: groups.sync_group,
    Api.DESCRIBE_GROUPS: groups.describe_groups,
    Api.LIST_GROUPS: groups.list_groups,
    Api.DELETE_GROUPS: groups.delete_groups,
    Api.CREATE_TOPICS: admin.create_topics,
    Api.DELETE_TOPICS: admin.delete_topics,
    Api.DELETE_RECORDS: delete_records.delete_records,
    Api.INIT_PRODUCER_ID: producers.init_producer_id,
    Api.OFFSET_FOR_LEADER_EPOCH: offsets.offset_for_leader_epoch,
    Api.ADD_PARTITIONS_TO_TXN: transactions.add_partitions_to_txn,
    Api.ADD_OFFSETS_TO_TXN: transactions.add_offsets_to_txn,
    Api.END_TXN: transactions.end_txn,
    Api.WRITE_TXN_MARKERS: producers.write_txn_markers,
    Api.TXN_OFFSET_COMMIT: transactions.txn_offset_commit,
    Api.DESCRIBE_ACLS: acls.describe_acls,
    Api.CREATE_ACLS: acls.create_acls,
    Api.DELETE_ACLS: acls.delete_acls,
    Api.DESCRIBE_CONFIGS: configs.describe_configs,
    Api.ALTER_CONFIGS: configs.alter_configs,
    Api.CREATE_PARTITIONS: admin.create_partitions,
    Api.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    Api.ALTER_REPLICA_LOG_DIRS: log_dirs.alter_replica_log_dirs,
    Api.DESCRIBE_LOG_DIRS: log_dirs.describe_log_dirs,
    Api.ALTER_PARTITION_REASSIGNMENTS: log_dirs.alter_partition_reassignments,
    Api.LIST_PARTITION_REASSIGNMENTS: log_dirs.list_partition_reassignments,
    Api.DESCRIBE_CLUSTER: admin.describe_cluster,
    Api.DESCRIBE_PRODUCERS: producers.describe_producers,
    Api.DESCRIBE_TRANSACTIONS: transactions.describe_transactions,
    Api.LIST_TRANSACTIONS: transactions.list_transactions,
    Api.CONSUMER_GROUP_HEARTBEAT: consumer_groups.consumer_group_heartbeat,
    Api.CONSUMER_GROUP_DESCRIBE: consumer_groups.consumer_group_describe,
    Api.SASL_HANDSHAKE: users.sasl_handshake,
    Api.SASL_AUTHENTICATE: users.sasl_authenticate,
    Api.DESCRIBE_CLIENT_QUOTAS: client_quotas.describe_client_quotas,
    Api.ALTER_CLIENT_QUOTAS: client_quotas.alter_client_quotas,
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: users.describe_user_scram_credentials,
    Api.ALTER_USER_SCRAM_CREDENTIALS: users.alter_user_scram_credentials,
}

_PARSERS: Final[Mapping[int, Callable[[memoryview, int], Message]]] = {
    Api.CONSUMER_GROUP_HEARTBEAT: serve_consumer_groups.parse_heartbeat,
    Api.CONSUMER_GROUP_DESCRIBE: serve_consumer_groups.parse_describe,
}
"""Of requests with codecs of their own."""

_JOINING: Final = frozenset({Api.JOIN_GROUP, Api.CONSUMER_GROUP_HEARTBEAT})
"""Their handlers need the client ID."""

_WAITING: Final = frozenset({Api.FETCH, Api.JOIN_GROUP, Api.SYNC_GROUP})
"""They wait for records or other members, and must not keep other large requests out meanwhile."""


def response(broker: Broker, header: RequestHeader, frame: memoryview, caller: Caller) -> Response:
    """Handle one request other than Produce; returns its response, or what to await for it.

    Raises:
        RemoteProtocolError: The API or version is not implemented, or the request is malformed.
    """
    api_key, version, _ = header
    if api_key == Api.API_VERSIONS:
        known = has_response(api_key, version)
        return admin.api_versions(header, _request(frame, *header[:2]) if known else None)
    check_responded(header)
    if api_key in _JOINING:
        caller.client_id = read_client_id(frame)
    if len(frame) > BULK_BYTES:
        return _bulk_response(broker, header, memoryview(bytes(frame)), caller)
    if api_key == Api.FETCH:
        return fetch.fetch(broker, header, parse_fetch(frame, version), caller)
    return _HANDLERS[api_key](broker, header, _request(frame, api_key, version), caller)


def _request(frame: memoryview, api_key: int, version: int) -> Message:
    parse = _PARSERS.get(api_key)
    return read_request(frame, api_key, version) if parse is None else parse(frame, version)


async def _bulk_response(
    broker: Broker, header: RequestHeader, frame: memoryview, caller: Caller
) -> bytes | list[Part]:
    api_key, version, _ = header
    loop = asyncio.get_running_loop()
    async with broker.load.bulk:
        read = parse_fetch if api_key == Api.FETCH else _request
        arguments = (frame, version) if api_key == Api.FETCH else (frame, api_key, version)
        request = await loop.run_in_executor(broker.executor, read, *arguments)
        if api_key not in _WAITING:
            return await _awaited(_HANDLERS[api_key](broker, header, request, caller))
    # The limit of partitions that wait bounds the memory of a Fetch, and the limits of groups that
    # of the others.
    handle = fetch.fetch if api_key == Api.FETCH else _HANDLERS[api_key]
    return await _awaited(handle(broker, header, request, caller))


async def _awaited(found: Response) -> bytes | list[Part]:
    return found if isinstance(found, bytes | list) else await found


def check_responded(header: RequestHeader) -> None:
    """Refuse a request whose API or version is not implemented.

    Raises:
        RemoteProtocolError: It is not implemented; the connection ends, as in Kafka.
    """
    if not has_response(header.api_key, header.version):
        raise RemoteProtocolError(
            "API or version not supported",
            api_key=header.api_key,
            version=header.version,
        )
