"""Runs the coordinator of groups on the event loop: time, durable changes, delayed responses.

No response is sent before all changes that were made until then are durable: `StateStore` writes
them in order, so it is enough to wait for the last one. After a failed write the coordinator
responds COORDINATOR_NOT_AVAILABLE until the broker restarts, because its state may be ahead of what
is durable.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar, cast

from logmirror.broker.changes import LateChangeError, in_time
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.coordinator import GroupCoordinator
from logmirror.broker.groups.values import (
    Effects,
    JoinResult,
    Now,
    RefusedError,
    SyncResult,
    Token,
)
from logmirror.broker.state_store import Change
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from logmirror.broker.groups.consumer_state import TopicInfo
    from logmirror.broker.groups.values import GroupSettings, StateChange
    from logmirror.broker.state_store import StateStore
    from logmirror.clock import Clock

_LOG: Final = logging.getLogger(__name__)
_T = TypeVar("_T")


class _Waiting(NamedTuple):
    """A request whose response comes later: the coordinator's token for it."""

    response: asyncio.Future[bytes]
    pack: Callable[[JoinResult | SyncResult | ErrorCode], bytes]


class GroupService:
    """The groups of a running broker. All methods run on the event loop."""

    def __init__(
        self,
        settings: GroupSettings,
        store: StateStore,
        clock: Clock,
        find_topic: Callable[[str], TopicInfo | None],
    ) -> None:
        self.coordinator = GroupCoordinator(settings, find_topic)
        self._store = store
        self._clock = clock
        self._last_write: asyncio.Future[None] | None = None
        self._failure: LogmirrorError | None = None
        self.timeout_s: float | None = None
        """How long a request waits until changes are durable; None: without a limit."""

        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0

    def now(self) -> Now:
        """Read both clocks."""
        return Now(self._clock.monotonic_ms(), self._clock.now_ms())

    def load(self, topic_ids: Mapping[str, bytes]) -> None:
        """Restore groups and offsets. Blocks; called before the broker listens.

        Raises:
            UnavailableError: The database cannot be read.
            CorruptionError: A value in it cannot be read.
        """
        changes = self.coordinator.load(self._store.load, topic_ids, self.now())
        self._write(changes)
        self._set_timer()

    def change(self, action: Callable[[Now, Effects], _T]) -> _T:
        """Call the coordinator and perform the effects. `durable` waits for the changes.

        Raises:
            RefusedError: The coordinator refused, or it cannot write.
        """
        if self._failure is not None:
            raise RefusedError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        out = Effects()
        try:
            return action(self.now(), out)
        finally:
            self.perform(out)

    async def durable(self) -> None:
        """Wait until all changes so far are durable.

        Raises:
            RefusedError: They could not be written, or not in time.
        """
        if self._last_write is not None:
            try:
                await in_time(self._last_write, self.timeout_s)
            except LateChangeError:
                raise RefusedError(ErrorCode.COORDINATOR_NOT_AVAILABLE) from None
            except LogmirrorError:
                pass
        if self._failure is not None:
            raise RefusedError(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def delayed(
        self,
        action: Callable[[Token, Now, Effects], None],
        pack: Callable[[JoinResult | SyncResult | ErrorCode], bytes],
    ) -> asyncio.Future[bytes]:
        """Call the coordinator with a request whose response may come later.

        Thousands of such requests may wait, so each costs a future and no task.

        Args:
            action: Calls the coordinator.
            pack: Encodes the response, or that of a failure.

        Raises:
            RefusedError: The coordinator refused, or it cannot write.
        """
        token = _Waiting(asyncio.get_running_loop().create_future(), pack)
        self.change(lambda now, out: action(token, now, out))
        return token.response

    def topic_deleted(self, topic: str) -> None:
        """Remove the offsets of a deleted topic."""
        if self._failure is None:
            self.change(lambda _, out: self.coordinator.topic_deleted(topic, out))

    def topic_added(self, topic: str, topic_id: bytes) -> None:
        """Remove the offsets of an earlier topic of this name."""
        if self._failure is None:
            self.change(lambda _, out: self.coordinator.topic_added(topic, topic_id, out))

    def perform(self, out: Effects) -> None:
        """Write the changes; send the responses once everything before them is durable."""
        self._write(out.changes)
        if self._last_write is None:
            self._reply(out.replies)
        elif out.replies:
            self._last_write.add_done_callback(lambda _: self._reply(out.replies))
            if self.timeout_s is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(self.timeout_s, self._reply_late, out.replies)
        self._set_timer()

    def _write(self, changes: Iterable[StateChange]) -> None:
        if changes:
            write = self._store.write(Change(*change) for change in changes)
            self._last_write = write
            write.add_done_callback(self._written)

    def _written(self, write: asyncio.Future[None]) -> None:
        if self._last_write is write:
            self._last_write = None
        error = write.exception()
        if isinstance(error, LogmirrorError) and self._failure is None:
            self._failure = error
            _LOG.error("groups are not available: %s; %s", error, error.hint)

    def _reply_late(self, replies: list[tuple[Token, JoinResult | SyncResult]]) -> None:
        """Respond to those whose changes are not durable yet; their clients repeat the request."""
        self._reply(replies, is_late=True)

    def _reply(
        self, replies: list[tuple[Token, JoinResult | SyncResult]], *, is_late: bool = False
    ) -> None:
        is_failed = is_late or self._failure is not None
        for token, result in replies:
            waiting = cast("_Waiting", token)
            if waiting.response.done():
                continue  # the client has disconnected
            try:
                frame = waiting.pack(ErrorCode.COORDINATOR_NOT_AVAILABLE if is_failed else result)
            except Exception as error:  # noqa: BLE001  # a defect ends one connection, not all
                waiting.response.set_exception(error)
            else:
                waiting.response.set_result(frame)

    # Time

    def _set_timer(self) -> None:
        """Make sure that the loop calls `_fire` when the next timer is due."""
        due_ms = self.coordinator.next_due_ms()
        if due_ms is None or (self._timer is not None and self._timer_ms <= due_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_ms = max(0, due_ms - self._clock.monotonic_ms())
        self._timer_ms = due_ms
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._failure is None:
            self.change(self.coordinator.fire_due)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
