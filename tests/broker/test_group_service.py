"""No response of the coordinator leaves before what it shows is durable."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.runs.group_world import TOPIC_ID
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.group_service import GroupService
from logmirror.broker.groups.consumer_state import TopicInfo
from logmirror.broker.groups.values import (
    CommittedOffset,
    Effects,
    GroupSettings,
    Identity,
    JoinRequest,
    RefusedError,
    SyncRequest,
    SyncResult,
)
from logmirror.broker.state_store import StateStore
from logmirror.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

TOPICS = {"orders": TopicInfo(TOPIC_ID, 1)}


class SlowStore(StateStore):
    """Writes only while the gate is open."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()
        commit = self._commit

        def wait_and_commit(batch: Any) -> Any:
            self.gate.wait(20)
            return commit(batch)

        self._commit = wait_and_commit  # type: ignore[method-assign]  # the same, later


def run(path: Path, test: Callable[[GroupService, SlowStore], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        store = SlowStore(path)
        try:
            service = GroupService(GroupSettings(), store, Clock(), TOPICS.get)
            service.load({"orders": TOPIC_ID})
            await asyncio.wait_for(test(service, store), 30)
            service.stop()
        finally:
            store.gate.set()
            store.close()

    asyncio.run(body())


async def commit(service: GroupService, offset: int) -> None:
    found = CommittedOffset(TOPIC_ID, offset, 0, "", service.now().time_ms)
    who = Identity("g", "", -1)
    service.change(
        lambda now, out: service.coordinator.commit(who, {("orders", 0): found}, now, out)
    )
    await service.durable()


async def join(service: GroupService) -> Any:
    request = JoinRequest(
        group_id="g",
        member_id="",
        instance_id=None,
        protocol_type="consumer",
        protocols=(("range", b""),),
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        client_id="test",
        client_host="",
        new_member_id="m",
        requires_known_id=False,
    )
    return await delayed(service, functools.partial(service.coordinator.join, request))


async def delayed(service: GroupService, action: Any) -> Any:
    """Wait for the response of a request, which is not encoded."""
    waiting: Any = service.delayed(action, lambda found: found)  # type: ignore[arg-type,return-value]  # no bytes
    found = await waiting
    if isinstance(found, ErrorCode):
        raise RefusedError(found)
    return found


def test_commits_and_what_reads_them_wait_for_the_disk(tmp_path):
    async def test(service: GroupService, store: SlowStore) -> None:
        store.gate.clear()
        committing = asyncio.create_task(commit(service, 5))
        reading = asyncio.create_task(service.durable())
        await asyncio.sleep(0.1)
        assert not committing.done()
        store.gate.set()
        await committing
        await reading

    run(tmp_path / "state.sqlite", test)


def test_an_assignment_waits_for_the_disk(tmp_path):
    async def test(service: GroupService, store: SlowStore) -> None:
        joined = await join(service)
        store.gate.clear()
        request = SyncRequest(Identity("g", "m", joined.generation), None, None, {"m": b"share"})
        sync = functools.partial(service.coordinator.sync, request)
        syncing = asyncio.create_task(delayed(service, sync))
        await asyncio.sleep(0.1)
        assert not syncing.done()
        store.gate.set()
        synced: Any = await syncing
        assert synced.assignment == b"share"

    run(tmp_path / "state.sqlite", test)


def test_requests_do_not_wait_longer_than_their_limit_and_the_change_is_made_later(tmp_path):
    async def test(service: GroupService, store: SlowStore) -> None:
        joined = await join(service)
        service.timeout_s = 0.1
        store.gate.clear()
        request = SyncRequest(Identity("g", "m", joined.generation), None, None, {"m": b"share"})
        sync = functools.partial(service.coordinator.sync, request)
        for late in (delayed(service, sync), service.durable()):
            with pytest.raises(RefusedError) as refused:
                await late
            assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE
        store.gate.set()
        service.timeout_s = None
        await service.durable()
        synced: Any = await delayed(service, sync)
        assert synced.assignment == b"share"

    run(tmp_path / "state.sqlite", test)


def test_a_response_that_cannot_be_encoded_fails_its_own_request_only(tmp_path):
    def defective(_: object) -> bytes:
        raise ValueError

    async def test(service: GroupService, _: SlowStore) -> None:
        tokens: list[object] = []
        failing, other = (
            service.delayed(lambda token, _now, _out: tokens.append(token), pack)
            for pack in (defective, lambda _: b"frame")
        )
        service.perform(Effects(replies=[(token, SyncResult(ErrorCode.NONE)) for token in tokens]))
        assert isinstance(failing.exception(), ValueError)
        assert other.result() == b"frame"

    run(tmp_path / "state.sqlite", test)


def test_a_client_that_disconnects_does_not_undo_its_commit(tmp_path):
    async def test(service: GroupService, store: SlowStore) -> None:
        store.gate.clear()
        committing = asyncio.create_task(commit(service, 5))
        other = asyncio.create_task(service.durable())
        await asyncio.sleep(0.1)
        committing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await committing
        store.gate.set()
        await other
        await commit(service, 6)
        assert service.coordinator.offsets.of_group("g")["orders", 0].offset == 6

    run(tmp_path / "state.sqlite", test)
    store = StateStore(tmp_path / "state.sqlite")
    assert len(list(store.load("offset"))) == 1
    store.close()


def test_after_a_failed_write_nothing_is_acknowledged(tmp_path, caplog):
    async def test(service: GroupService, store: SlowStore) -> None:
        await commit(service, 5)
        store._database._connection.execute("PRAGMA query_only=ON")  # noqa: SLF001  # as a disk that fails
        for action in (commit(service, 6), commit(service, 7), join(service)):
            with pytest.raises(RefusedError) as refused:
                await action
            assert refused.value.code is ErrorCode.COORDINATOR_NOT_AVAILABLE

    run(tmp_path / "state.sqlite", test)
    assert caplog.text.count("groups are not available") == 1
    store = StateStore(tmp_path / "state.sqlite")
    [(_, value)] = store.load("offset")
    store.close()
    assert (5).to_bytes(8) in value
