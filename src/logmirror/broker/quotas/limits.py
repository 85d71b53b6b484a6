"""Which quota applies to a client, and how long the client must wait (KIP-13, KIP-124, KIP-219).

Each quota is a token bucket that may be overdrawn. It fills with the quota's rate, up to
`BURST_S` of it. A request is charged when it is known what it costs; while the bucket is below
zero, the client waits. So a client that never waits longer than it is asked to stays below

    rate * (interval + BURST_S) + one request

in every interval, for requests of up to `MAX_DELAY_S` of the rate. Apache Kafka compares the
average of the last 10 s with the quota instead, which allows a burst of ten seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from logmirror.broker.quotas.entities import DEFAULT, MAX_NAME, Entity, Quota

if TYPE_CHECKING:
    from collections.abc import Iterable

BURST_S: Final = 1
MAX_DELAY_S: Final = 300
MAX_BUCKETS: Final = 10_000
"""Limit for the clients whose use is known; the one that was idle the longest is forgotten."""

MAX_ENTITIES: Final = 10_000
"""Limit for the entities that have quotas."""

_MS_PER_PERCENT: Final = 10
"""Milliseconds of one thread per second, in a percent."""


class Bucket:
    """What a client may still use. May be negative."""

    __slots__ = ("_at_ms", "_left", "_rate")

    def __init__(self, rate: float, now_ms: float) -> None:
        self._rate = rate
        self._left = rate * BURST_S
        self._at_ms = now_ms

    def charge(self, amount: float, rate: float, now_ms: float) -> int:
        """Charge a request.

        Args:
            amount: What it used; at least 0.
            rate: The quota per second, which may have changed since.
            now_ms: A clock that never steps backwards.

        Returns:
            For how many milliseconds the client must wait; 0 if it need not.
        """
        left = self._left + self._rate * max(0.0, now_ms - self._at_ms) / 1000
        left = min(left, rate * BURST_S) - amount
        self._left = max(left, -rate * MAX_DELAY_S)
        self._rate, self._at_ms = rate, now_ms
        if self._left >= 0:
            return 0
        return min(math.ceil(-self._left / rate * 1000), MAX_DELAY_S * 1000)


class ClientQuotas:
    """The quotas of a broker, and what its clients have used of them. Not safe for threads.

    Args:
        stored: Entity, key and value of each quota.

    Attributes:
        has_requests: Whether any quota concerns requests.
        has_connections: Whether any quota concerns connections.
    """

    def __init__(self, stored: Iterable[tuple[Entity, str, float]] = ()) -> None:
        self._rates: dict[Quota, dict[Entity, float]] = {quota: {} for quota in Quota}
        self._buckets: OrderedDict[tuple[Quota, Entity], Bucket] = OrderedDict()
        self.has_requests = self.has_connections = False
        self.change([(who, Quota(key), value) for who, key, value in stored])

    def change(self, changes: Iterable[tuple[Entity, Quota, float | None]]) -> None:
        """Set quotas, and remove those with value None. Applies from the next request on."""
        for who, quota, value in changes:
            if value is None:
                self._rates[quota].pop(who, None)
            else:
                self._rates[quota][who] = value
        for quota, rates in self._rates.items():
            if not rates:
                for key in [key for key in self._buckets if key[0] == quota]:
                    del self._buckets[key]
        self.has_connections = bool(self._rates[Quota.CONNECTION])
        self.has_requests = any(
            rates for quota, rates in self._rates.items() if quota != Quota.CONNECTION
        )

    def all(self) -> dict[Entity, dict[str, float]]:
        """Return all quotas by entity and key."""
        found: dict[Entity, dict[str, float]] = {}
        for quota, rates in self._rates.items():
            for who, value in rates.items():
                found.setdefault(who, {})[quota.value] = value
        return found

    def rate(self, quota: Quota, user: str, client_id: str) -> tuple[Entity, float] | None:
        """Return the quota of a client: with whom it shares the quota, and the value.

        The first that exists of Kafka's eight levels, from (user, client ID) to the default client
        ID. A quota of a user is shared by its client IDs, one of a client ID by its users. The
        default of a type is a quota for each name.
        """
        rates = self._rates[quota]
        if not rates:
            return None
        for of_user in (user, DEFAULT, None):
            for of_client in (client_id, DEFAULT, None):
                value = rates.get(Entity(of_user, of_client))
                if value is not None:
                    shared_by = Entity(
                        None if of_user is None else user[:MAX_NAME],
                        None if of_client is None else client_id[:MAX_NAME],
                    )
                    return shared_by, value
        return None

    def charge(self, quota: Quota, user: str, client_id: str, amount: float, now_ms: float) -> int:
        """Charge a request of a client.

        Args:
            quota: What was used: bytes, or milliseconds of the event loop.
            user: The user's name; `ANONYMOUS` without authentication.
            client_id: The client ID of the request.
            amount: How much was used.
            now_ms: A clock that never steps backwards.

        Returns:
            For how many milliseconds the client must wait; 0 if it need not.
        """
        found = self.rate(quota, user, client_id)
        if found is None:
            return 0
        who, rate = found
        if quota == Quota.REQUEST:
            rate *= _MS_PER_PERCENT
        return self._bucket(quota, who, rate, now_ms).charge(amount, rate, now_ms)

    def fetch_limit(self, user: str, client_id: str) -> int | None:
        """Return the limit for the records of a Fetch response, in bytes: those of a second."""
        found = self.rate(Quota.FETCH, user, client_id)
        return None if found is None else math.ceil(found[1] * BURST_S)

    def may_connect(self, address: str, now_ms: float) -> bool:
        """Count a new connection of an address, if it may have one."""
        rates = self._rates[Quota.CONNECTION]
        rate = rates.get(Entity(ip=address)) or rates.get(Entity(ip=DEFAULT))
        if rate is None:
            return True
        bucket = self._bucket(Quota.CONNECTION, Entity(ip=address), rate, now_ms)
        if bucket.charge(0, rate, now_ms):
            return False
        bucket.charge(1, rate, now_ms)
        return True

    def _bucket(self, quota: Quota, who: Entity, rate: float, now_ms: float) -> Bucket:
        bucket = self._buckets.get((quota, who))
        if bucket is None:
            bucket = self._buckets[quota, who] = Bucket(rate, now_ms)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end((quota, who))
        return bucket
