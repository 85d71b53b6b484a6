"""How many connections a client may have, and how long a failed login takes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

_FORGET_MS: Final = 60_000
_MAX_ADDRESSES: Final = 10_000
_MAX_DOUBLINGS: Final = 16


def client_address(peername: tuple[str, int]) -> str:
    """Return a client's IP address; an IPv4 client of an IPv6 listener has that of IPv4."""
    host = peername[0]
    return host.removeprefix("::ffff:") if "." in host else host


class Place(Protocol):
    """A connection that takes a place."""

    @property
    def must_log_in(self) -> bool:
        """Whether its client is not authenticated yet, and must be."""


class Places:
    """The places for connections.

    Args:
        limit: For all connections; those that are not authenticated yet have half of them.
        limit_per_address: For those of one client address; 0: no further limit.
    """

    def __init__(self, limit: int, limit_per_address: int) -> None:
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._of_address: Counter[str] = Counter()

    def refusal(self, address: str, open_ones: Collection[Place], *, must_log_in: bool) -> str:
        """Return the reason why one more connection of an address is refused; else empty."""
        if len(open_ones) >= self._limit:
            return "too many connections"
        if 0 < self._limit_per_address <= self._of_address[address]:
            return "too many connections of this address"
        limit = max(1, self._limit // 2)
        if must_log_in and len(open_ones) >= limit <= sum(one.must_log_in for one in open_ones):
            return "too many connections that are not authenticated"
        return ""

    def take(self, address: str) -> None:
        """Count a connection."""
        self._of_address[address] += 1

    def free(self, address: str) -> None:
        """Count a connection no longer."""
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class FailedLogins:
    """How often logins have failed lately, by client address."""

    def __init__(self, first_ms: int, max_ms: int) -> None:
        self._first_ms = first_ms
        self._max_ms = max_ms
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def delay_ms(self, address: str, now_ms: float) -> int:
        """Count a failure; returns how long to delay its response."""
        count, last_ms = self._failures.pop(address, (0, now_ms))
        count = 0 if now_ms - last_ms > _FORGET_MS else count
        self._failures[address] = count + 1, now_ms
        if len(self._failures) > _MAX_ADDRESSES:
            self._failures.popitem(last=False)
        return min(self._first_ms << min(count, _MAX_DOUBLINGS), self._max_ms)
