"""Charges the requests of one connection to the quotas of its client (KIP-219).

A client over its quota gets its response at once, with the time for which its connection is muted:
the next request is taken when that time is over. What is charged:

    producer_byte_rate    the bytes of a Produce request, when it is taken
    consumer_byte_rate    the bytes of a Fetch response, when it is complete
    request_percentage    the time that a request takes of the event loop, not of worker threads

Nothing of this module runs unless a quota is set. Requests before authentication are not charged.
"""

from __future__ import annotations

from asyncio import Future
from time import perf_counter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from logmirror.broker.apis import Api
from logmirror.broker.quotas.entities import Quota
from logmirror.wire.frames import read_client_id
from logmirror.wire.throttle_time import set_throttle_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.handlers.fetch import Part
    from logmirror.broker.handlers.produce import ProduceResponse
    from logmirror.broker.protocol.dispatch import Later, Response
    from logmirror.wire.frames import RequestHeader

_Result = TypeVar("_Result")
_SIZE_BYTES: Final = 4


class Charge:
    """One request, from the moment when it is taken.

    Args:
        broker: The broker.
        header: The request's header.
        frame: The request.
        caller: Who sent it. Its `fetch_limit` is set until the response is complete.
        mute: Called with milliseconds if the client is over a quota.

    Raises:
        RemoteProtocolError: The client ID is malformed.
    """

    def __init__(
        self,
        broker: Broker,
        header: RequestHeader,
        frame: memoryview,
        caller: Caller,
        mute: Callable[[int], None],
    ) -> None:
        self._broker = broker
        self._header = header
        self._caller = caller
        self._mute = mute
        self._frame_bytes = _SIZE_BYTES + len(frame)
        self._client_id = read_client_id(frame)
        if header.api_key == Api.FETCH:
            caller.fetch_limit = broker.quotas.fetch_limit(caller.user, self._client_id)
        self._began_s = perf_counter()

    def produced(self, pending: ProduceResponse) -> None:
        """Charge a Produce request; its `rest` is charged to later requests."""
        took_s = perf_counter() - self._began_s
        pending.throttle(self._spend(took_s, Quota.PRODUCE, self._frame_bytes))
        if pending.rest is not None:
            pending.rest = self._rest(_Metered(pending.rest))

    async def _rest(self, rest: _Metered[None]) -> None:
        await rest
        self._use(Quota.REQUEST, rest.took_s * 1000)

    def responded(self, found: Response) -> Response:
        """Charge any other request, when its response is complete; sets its throttle time."""
        took_s = perf_counter() - self._began_s
        if isinstance(found, bytes | list):
            return self._throttled(found, took_s)
        return self._when_complete(found, took_s)

    async def _when_complete(self, found: Later, took_s: float) -> bytes | list[Part]:
        if isinstance(found, Future):  # of a group's member; it takes no time by itself
            return self._throttled(await found, took_s)
        metered = _Metered(found)
        response = await metered
        return self._throttled(response, took_s + metered.took_s)

    def _throttled(self, found: bytes | list[Part], took_s: float) -> bytes | list[Part]:
        self._caller.fetch_limit = None
        api_key, version, _ = self._header
        if isinstance(found, bytes):
            if delay_ms := self._spend(took_s):
                changed = bytearray(found)
                set_throttle_time(changed, api_key, version, delay_ms)
                return bytes(changed)
            return found
        head = found[0]
        assert isinstance(head, bytearray)  # noqa: S101  # records are behind it
        size_bytes = _SIZE_BYTES + int.from_bytes(head[:_SIZE_BYTES])
        if delay_ms := self._spend(took_s, Quota.FETCH, size_bytes):
            set_throttle_time(head, api_key, version, delay_ms)
        return found

    def _spend(self, took_s: float, quota: Quota | None = None, size_bytes: int = 0) -> int:
        """Charge time and bytes, and mute the connection; returns for how many milliseconds."""
        delay_ms = self._use(Quota.REQUEST, took_s * 1000)
        if quota is not None:
            delay_ms = max(delay_ms, self._use(quota, size_bytes))
        if delay_ms:
            self._mute(delay_ms)
        return delay_ms

    def _use(self, quota: Quota, amount: float) -> int:
        user, now_ms = self._caller.user, perf_counter() * 1000
        delay_ms = self._broker.quotas.charge(quota, user, self._client_id, amount, now_ms)
        if delay_ms:
            self._broker.traffic.throttled[quota] += 1
        return delay_ms


class _Metered(Generic[_Result]):
    """Awaits a coroutine, and measures for how long it runs on the event loop."""

    def __init__(self, coroutine: Coroutine[object, None, _Result]) -> None:
        self._coroutine = coroutine
        self.took_s = 0.0

    def __await__(self) -> Generator[object, None, _Result]:
        thrown: BaseException | None = None
        while True:
            began_s = perf_counter()
            try:
                if thrown is None:
                    waits_for = self._coroutine.send(None)
                else:
                    waits_for = self._coroutine.throw(thrown)
            except StopIteration as stopped:
                result: _Result = stopped.value
                return result
            finally:
                self.took_s += perf_counter() - began_s
            thrown = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001  # a cancellation, for the coroutine
                thrown = error
