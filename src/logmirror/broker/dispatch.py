"""From a frame to its answer: which handler, and whether the answer is there at once.

Requests are read before anything is awaited, because a frame is a view of a buffer that the next
bytes of its connection overwrite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker import (
    handle_admin,
    handle_configs,
    handle_delete_records,
    handle_fetch,
    handle_offsets,
    handle_producers,
)
from logmirror.broker.apis import Api, is_answered
from logmirror.wire.frames import RemoteProtocolError, RequestHeader
from logmirror.wire.serve_messages import Message, read_request

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.handle_fetch import Part

    Answer = bytes | list[Part] | Coroutine[None, None, bytes] | Coroutine[None, None, list[Part]]


_HANDLERS: Final[Mapping[int, Callable[[Broker, RequestHeader, Message, Caller], Answer]]] = {
    Api.LIST_OFFSETS: handle_offsets.list_offsets,
    Api.METADATA: handle_admin.metadata,
    Api.FIND_COORDINATOR: handle_admin.find_coordinator,
    Api.CREATE_TOPICS: handle_admin.create_topics,
    Api.DELETE_TOPICS: handle_admin.delete_topics,
    Api.DELETE_RECORDS: handle_delete_records.delete_records,
    Api.INIT_PRODUCER_ID: handle_producers.init_producer_id,
    Api.OFFSET_FOR_LEADER_EPOCH: handle_offsets.offset_for_leader_epoch,
    Api.WRITE_TXN_MARKERS: handle_producers.write_txn_markers,
    Api.DESCRIBE_CONFIGS: handle_configs.describe_configs,
    Api.ALTER_CONFIGS: handle_configs.alter_configs,
    Api.CREATE_PARTITIONS: handle_admin.create_partitions,
    Api.INCREMENTAL_ALTER_CONFIGS: handle_configs.incremental_alter_configs,
    Api.DESCRIBE_CLUSTER: handle_admin.describe_cluster,
    Api.DESCRIBE_PRODUCERS: handle_producers.describe_producers,
}


def answer(broker: Broker, header: RequestHeader, frame: memoryview, caller: Caller) -> Answer:
    """Answer one request that is not Produce: with the answer, or with a coroutine for it.

    Raises:
        RemoteProtocolError: The request is not one that we answer, or not one at all.
    """
    api_key, version, _ = header
    if api_key == Api.API_VERSIONS:
        if is_answered(api_key, version):
            read_request(frame, api_key, version)
        return handle_admin.api_versions(header)
    check_answered(header)
    if api_key == Api.FETCH:
        return handle_fetch.fetch(broker, header, frame)
    return _HANDLERS[api_key](broker, header, read_request(frame, api_key, version), caller)


def check_answered(header: RequestHeader) -> None:
    """Refuse a request that nobody could answer in a way its sender understands."""
    if not is_answered(header.api_key, header.version):
        raise RemoteProtocolError(
            "request is of a kind or version that is not offered",
            api_key=header.api_key,
            version=header.version,
        )
