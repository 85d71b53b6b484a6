"""Goal: offsets of a transaction become the group's with its commit, together or not at all.

Method: the coordinator's service with a real database and a real log, and a plain table of
committed offsets in the place of the groups' coordinator. Requests go through the dispatcher. The
broker's parts are built again from their files between any two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from kio.schema.errors import ErrorCode as KafkaCode

from kit.judges.partition_client import data_batch
from kit.judges.raw_client import build, message_class, nested, read_response, request_frame
from kit.servers.coordinators import coordinators
from logmirror.broker.apis import Api
from logmirror.broker.broker import Broker, Caller
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.options import BrokerOptions
from logmirror.broker.protocol.dispatch import response
from logmirror.broker.topics import Topics
from logmirror.broker.transactions.coordinator import Writer
from logmirror.wire.frames import read_header

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
    from pathlib import Path

    from logmirror.broker.state_store import Change, StateStore
    from logmirror.broker.transactions.group_offsets import Member, PendingOffset
    from logmirror.broker.transactions.transaction import Partition, Row

TOPIC, ID, GROUP = "orders", "id", "group"
PENDING, COMMITTED = "test-pending", "test-committed"


class Offsets:
    """A table of offsets with its rows in the store. The group is in generation 3."""

    def __init__(self, state: StateStore) -> None:
        self.pending = {
            tuple(json.loads(key)): json.loads(value)[0] for key, value in state.load(PENDING)
        }
        self.committed = {
            tuple(json.loads(key)): json.loads(value)[0] for key, value in state.load(COMMITTED)
        }

    def add_pending(
        self,
        producer_id: int,
        group_id: str,
        member: Member,
        offsets: Mapping[Partition, PendingOffset],
    ) -> tuple[ErrorCode, Sequence[Row]]:
        """See `GroupOffsets`."""
        if member.generation_id not in {-1, 3}:
            return ErrorCode.FENCED_LEADER_EPOCH, ()
        rows: list[Row] = []
        for partition, pending in offsets.items():
            self.pending[producer_id, group_id, *partition] = pending.offset
            key = json.dumps([producer_id, group_id, *partition]).encode()
            rows.append((PENDING, key, json.dumps(pending).encode()))
        return ErrorCode.NONE, rows

    def end(self, producer_id: int, *, is_commit: bool) -> Sequence[Row]:
        """See `GroupOffsets`."""
        rows: list[Row] = []
        for name in [name for name in self.pending if name[0] == producer_id]:
            offset = self.pending.pop(name)
            rows.append((PENDING, json.dumps(name).encode(), None))
            if is_commit:
                self.committed[name[1:]] = offset
                rows.append((COMMITTED, json.dumps(name[1:]).encode(), b"[%d]" % offset))
        return rows


class Parts:
    """A running broker without its connections."""

    def __init__(self, broker: Broker, offsets: Offsets) -> None:
        self.broker, self.offsets = broker, offsets

    async def ask(self, api: Api, version: int, **fields: object) -> Any:
        """Handle a request as a connection does."""
        request = build(message_class(api, version, "request"), **fields)
        view = memoryview(bytearray(request_frame(api, version, request)))
        found = response(self.broker, read_header(view), view, Caller("127.0.0.1"))
        frame = found if isinstance(found, bytes | list) else await found
        assert isinstance(frame, bytes)
        return read_response(api, version, frame[4:])[1]

    async def commit_offset(
        self,
        writer: Any,
        offset: int,
        *,
        version: int = 3,
        generation: int = -1,
        topic: str = TOPIC,
    ) -> int:
        """TxnOffsetCommit; returns the error."""

        def part(entity: str, /, **fields: object) -> Any:
            return build(nested(Api.TXN_OFFSET_COMMIT, version, "request", entity), **fields)

        partition = part(
            "TxnOffsetCommitRequestPartition",
            partition_index=0,
            committed_offset=offset,
            committed_leader_epoch=0,
            committed_metadata="",
        )
        wanted = part("TxnOffsetCommitRequestTopic", name=topic, partitions=(partition,))
        found = await self.ask(
            Api.TXN_OFFSET_COMMIT,
            version,
            transactional_id=ID,
            group_id=GROUP,
            producer_id=writer.producer_id,
            producer_epoch=writer.producer_epoch,
            generation_id=generation,
            member_id="",
            group_instance_id=None,
            topics=(wanted,),
        )
        return int(found.topics[0].partitions[0].error_code)

    async def init(self) -> Any:
        """InitProducerId."""
        found = await self.ask(
            Api.INIT_PRODUCER_ID,
            4,
            transactional_id=ID,
            transaction_timeout=timedelta(minutes=1),
            producer_id=-1,
            producer_epoch=-1,
        )
        assert found.error_code == KafkaCode.none
        return found

    async def add_group(self, writer: Any) -> int:
        """AddOffsetsToTxn."""
        found = await self.ask(
            Api.ADD_OFFSETS_TO_TXN,
            3,
            transactional_id=ID,
            producer_id=writer.producer_id,
            producer_epoch=writer.producer_epoch,
            group_id=GROUP,
        )
        return int(found.error_code)

    async def end(self, writer: Any, *, commit: bool, version: int = 3) -> Any:
        """EndTxn."""
        return await self.ask(
            Api.END_TXN,
            version,
            transactional_id=ID,
            producer_id=writer.producer_id,
            producer_epoch=writer.producer_epoch,
            committed=commit,
        )


@contextlib.asynccontextmanager
async def running(root: Path, configs: Mapping[str, str] = {}) -> AsyncIterator[Parts]:
    """Build a broker from its files, or for the first time."""
    disk, options = Disk(), BrokerOptions(log_dir=root)
    with (
        ThreadPoolExecutor(2) as executor,
        contextlib.closing(MetadataStore(root / "db")) as store,
    ):
        cache, commits = SegmentCache(disk), GroupCommit(lambda _: executor, disk)
        topics = Topics(options, store, executor, disk, cache, commits)
        topics.load()
        if TOPIC not in topics.by_name:
            await topics.create(TOPIC, 1, configs)
        with coordinators(root, store, topics, commits, executor) as others:
            offsets = Offsets(others["state"])
            others["transactions"].groups = offsets
            broker = Broker(options=options, cache=cache, **others)
            yield Parts(broker, offsets)
            await others["transactions"].stop()
            await commits.drain()


NAME = GROUP, TOPIC, 0


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("version", [3, 5])
def test_offsets_become_the_group_s_with_the_commit(tmp_path, version, restarts):
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            parts = await stack.enter_async_context(running(tmp_path))

            async def again() -> Parts:
                if not restarts:
                    return parts
                await stack.aclose()
                return await stack.enter_async_context(running(tmp_path))

            for number, is_commit in enumerate((True, False, True)):
                writer = await parts.init()
                if version < 5:
                    assert await parts.add_group(writer) == 0
                parts = await again()
                before = dict(parts.offsets.committed)
                assert await parts.commit_offset(writer, 10 + number, version=version) == 0
                assert parts.offsets.committed == before
                parts = await again()
                found = await parts.end(writer, commit=is_commit, version=version)
                assert found.error_code == KafkaCode.none
                parts = await again()
                assert parts.offsets.pending == {}
                wanted = {NAME: 10 + number} if is_commit else before
                assert parts.offsets.committed == wanted

    asyncio.run(run())


def test_what_cannot_be_committed_is_refused(tmp_path):
    async def run() -> None:
        async with running(tmp_path) as parts:
            writer = await parts.init()
            assert await parts.commit_offset(writer, 1) == KafkaCode.invalid_txn_state
            assert await parts.commit_offset(writer, 1, version=4) == (
                KafkaCode.transaction_abortable
            )
            await parts.add_group(writer)
            assert await parts.commit_offset(writer, 1, generation=2) == (
                KafkaCode.fenced_leader_epoch
            )
            found = await parts.commit_offset(writer, 1, topic="none")
            assert found == KafkaCode.unknown_topic_or_partition
            assert await parts.commit_offset(writer, 1, generation=3) == 0
            newer = await parts.init()
            assert newer.producer_epoch == writer.producer_epoch + 2
            assert await parts.commit_offset(writer, 1) == KafkaCode.invalid_producer_epoch
            assert parts.offsets.pending == parts.offsets.committed == {}

    asyncio.run(run())


def test_unflushed_records_are_durable_before_their_commit(tmp_path):
    async def run() -> None:
        async with running(tmp_path, {"flush.messages": "1000000"}) as parts:
            transactions, state = parts.broker.transactions, parts.broker.state
            log = parts.broker.topics.by_name[TOPIC].logs[0]
            found = await parts.init()
            writer = Writer(found.producer_id, found.producer_epoch)
            await transactions.add(ID, writer, partitions=[(TOPIC, 0)])
            fields = {"producer_id": writer.producer_id, "epoch": writer.producer_epoch}
            batch = memoryview(bytearray(data_batch(3, sequence=0, transactional=True, **fields)))
            log.append(batch, check_batch(batch, max_bytes=10**6))
            assert (log.durable, log.high_watermark) == (0, 3)
            seen: list[tuple[str, int]] = []
            write = state.write

            def written(changes: Iterable[Change]) -> Any:
                listed = list(changes)
                seen.extend((json.loads(c.value or b"")["state"], log.durable) for c in listed)
                return write(listed)

            state.write = written  # type: ignore[method-assign]  # a spy
            found = await parts.end(found, commit=True)
            assert found.error_code == KafkaCode.none
            assert seen == [("PrepareCommit", 3), ("CompleteCommit", 4)]

    asyncio.run(run())


def test_an_aborted_timeout_drops_the_offsets(tmp_path):
    async def run() -> None:
        async with running(tmp_path) as parts:
            writer = await parts.init()
            await parts.add_group(writer)
            await parts.commit_offset(writer, 1)
            transactions = parts.broker.transactions
            write = transactions.coordinator.abort_overdue(ID, parts.broker.clock.now_ms() + 61_000)
            assert write is not None
            await transactions._carry_out(write)  # noqa: SLF001  # as a sweep does
            assert parts.offsets.pending == parts.offsets.committed == {}

    asyncio.run(run())
