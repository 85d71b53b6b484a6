"""Dispatches a request to its handler.

A request is decoded before anything is awaited: its frame is a view of the connection's buffer,
which the next bytes overwrite. A large request is copied, and decoded in the executor. Only a few
of these are processed at the same time, so that their memory is bounded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api, has_response
from logmirror.broker.handlers import admin, configs, delete_records, fetch, offsets, producers
from logmirror.wire.frames import RemoteProtocolError, RequestHeader
from logmirror.wire.serve_fetch import parse_fetch
from logmirror.wire.serve_messages import Message, read_request

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.handlers.fetch import Part

    Response = bytes | list[Part] | Coroutine[None, None, bytes | list[Part]]

BULK_BYTES: Final = 64 * 1024
"""A larger request is decoded in the executor."""

_HANDLERS: Final[Mapping[int, Callable[[Broker, RequestHeader, Message, Caller], Response]]] = {
    Api.LIST_OFFSETS: offsets.list_offsets,
    Api.METADATA: admin.metadata,
    Api.FIND_COORDINATOR: admin.find_coordinator,
    Api.CREATE_TOPICS: admin.create_topics,
    Api.DELETE_TOPICS: admin.delete_topics,
    Api.DELETE_RECORDS: delete_records.delete_records,
    Api.INIT_PRODUCER_ID: producers.init_producer_id,
    Api.OFFSET_FOR_LEADER_EPOCH: offsets.offset_for_leader_epoch,
    Api.WRITE_TXN_MARKERS: producers.write_txn_markers,
    Api.DESCRIBE_CONFIGS: configs.describe_configs,
    Api.ALTER_CONFIGS: configs.alter_configs,
    Api.CREATE_PARTITIONS: admin.create_partitions,
    Api.INCREMENTAL_ALTER_CONFIGS: configs.incremental_alter_configs,
    Api.DESCRIBE_CLUSTER: admin.describe_cluster,
    Api.DESCRIBE_PRODUCERS: producers.describe_producers,
}


def response(broker: Broker, header: RequestHeader, frame: memoryview, caller: Caller) -> Response:
    """Handle one request other than Produce; returns its response, or a coroutine for it.

    Raises:
        RemoteProtocolError: The API or version is not implemented, or the request is malformed.
    """
    api_key, version, _ = header
    if api_key == Api.API_VERSIONS:
        if has_response(api_key, version):
            read_request(frame, api_key, version)
        return admin.api_versions(header)
    check_responded(header)
    if len(frame) > BULK_BYTES:
        return _bulk_response(broker, header, memoryview(bytes(frame)), caller)
    if api_key == Api.FETCH:
        return fetch.fetch(broker, header, parse_fetch(frame, version), caller)
    return _HANDLERS[api_key](broker, header, read_request(frame, api_key, version), caller)


async def _bulk_response(
    broker: Broker, header: RequestHeader, frame: memoryview, caller: Caller
) -> bytes | list[Part]:
    api_key, version, _ = header
    loop = asyncio.get_running_loop()
    async with broker.load.bulk:
        if api_key != Api.FETCH:
            request = await loop.run_in_executor(
                broker.executor, read_request, frame, api_key, version
            )
            response = _HANDLERS[api_key](broker, header, request, caller)
            return response if isinstance(response, bytes | list) else await response
        wanted = await loop.run_in_executor(broker.executor, parse_fetch, frame, version)
    # A Fetch waits for records; the limit of partitions that wait bounds its memory.
    found = fetch.fetch(broker, header, wanted, caller)
    return found if isinstance(found, list) else await found


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
