"""Plans of runs of two brokers on one bucket: every crash point, with every fault near it.

A crash point is a request of an owner, before it is stored or after it is, and before its response
arrives. A fault is near it if it is at the request itself, at one before it, or at one of the other
owner. The other owner takes over while the first is paused at the point, or after the crash.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kit.runs.bucket_brokers import PARTITIONS, Owner
from kit.runs.bucket_calls import LOST, REFUSED, SHORT
from kit.runs.bucket_clients import WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    _Faults = Callable[[int, str], Iterator[Mapping[tuple[int, int], str]]]

Work = tuple[tuple[Any, ...], ...]
FIRST: Final = 1
SECOND: Final = 2

HISTORY: Final[Work] = (
    ("append", 0),
    ("append", 1),
    ("seal", 0),
    ("rest",),
    ("append", 0),
    ("seal", 0),
    ("rest",),
    ("append", 0),
    ("seal", 0),
    ("rest",),
    ("append", 0),
    ("append", 1, 3),
    ("rest",),
)
WORK: Final[Work] = (
    ("append", 0),
    ("send", 1, 2, True),
    ("rest",),
    ("merge",),
    ("send", 2, 2, True),
    ("seal", 0),
    ("send", 2, 1, False),
    ("rest",),
    ("delete", 0, 1),
    ("send", 1, 1, False),
    ("seal", 1),
    ("append", 1, 1),
    ("rest",),
    ("compact", 0, 2),
    ("snapshot",),
    ("end_transaction", 2, True, False),
    ("send", 1, 1, True),
    ("rest",),
)
"""In the plans the second owner receives from the same producers as the first one."""


SHORT_KINDS: Final = frozenset({"commit read", "bundle read", "producers read"})
"""Reads that the product checks itself. Of objects of segments the store checks the length."""


class Decision(NamedTuple):
    """What happens to a request: a kind of fault or nothing, and a crash `before` or `after` it."""

    fault: str = ""
    crash: str = ""


class Director(Protocol):
    """Decides who runs, and what happens to requests."""

    def chosen(self, live: list[Owner], counts: Mapping[int, int]) -> Owner:
        """Return the owner that runs up to its next request."""

    def decided(self, owner: int, number: int, kind: str) -> Decision:
        """Return what happens to a request of an owner."""


_STEPS: Final = 20
_WEIGHTS: Final = {
    "append": 6,
    "send": 8,
    "end_transaction": 3,
    "late": 1,
    "rest": 3,
    "seal": 6,
    "merge": 2,
    "delete": 1,
    "compact": 2,
    "snapshot": 1,
}
"""How often owners do something in runs by a seed."""

_LOST_RATE: Final = 0.3
"""How often the connection breaks before the response to an idempotent producer."""

_TRANSACTIONAL: Final = [at for at, (_, is_one) in enumerate(WRITERS) if is_one]
_READ_FAULTS: Final = 10
"""By so much reads fail less often than writes: each ends a start."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a run. Requests are numbered by owner, from 0.

    Attributes:
        pause: The request of the first owner before which the second one takes over; None: it does
            when the first has ended.
        back: The request of the second owner before which the first one continues; None: it does
            when the second has ended.
        crash: Owner, request, and `before` or `after` it.
        kind: The crash is at the first request of this kind from that one on; empty: of any kind. A
            fault before it adds requests.
        faults: Kinds of faults by owner and request.
    """

    pause: int | None = None
    back: int | None = None
    crash: tuple[int, int, str] | None = None
    kind: str = ""
    faults: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def chosen(self, live: list[Owner], counts: Mapping[int, int]) -> Owner:
        """See `Director.chosen`."""
        if len(live) == 1 or self.pause is None or counts[FIRST] < self.pause:
            return live[0]
        is_back = self.back is not None and counts[SECOND] >= self.back
        return live[0] if is_back or counts[FIRST] > self.pause else live[1]

    def decided(self, owner: int, number: int, kind: str) -> Decision:
        """See `Director.decided`."""
        crash = ""
        if self.crash is not None and self.kind in {"", kind}:
            crasher, first, where = self.crash
            crash = where if owner == crasher and number >= first else ""
        fault = self.faults.get((owner, number), "")
        return Decision("" if fault == SHORT and kind not in SHORT_KINDS else fault, crash)


class Drawn:
    """Draws everything.

    Args:
        seed: The seed.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._streak = self.chance.choice([0, 0.8, 0.98])
        self._crash_rate = self.chance.choice([0, 0.005, 0.02])
        self._fault_rate = self.chance.choice([0, 0.05, 0.2])
        self._last: Owner | None = None

    def work(self) -> Work:
        """Return what an owner does."""
        kinds = self.chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=_STEPS)
        return tuple((kind, *self._arguments(kind)) for kind in kinds)

    def _arguments(self, kind: str) -> tuple[int, ...]:
        number = self.chance.randrange(PARTITIONS)
        if kind in {"append", "delete", "compact"}:
            return number, self.chance.randint(1, 3)
        is_lost = self.chance.random() < _LOST_RATE
        if kind == "send":
            return self.chance.randrange(len(WRITERS)), self.chance.randint(1, 3), is_lost
        if kind == "end_transaction":
            return self.chance.choice(_TRANSACTIONAL), self.chance.random() < 0.5, is_lost
        return (number,) if kind in {"seal", "late"} else ()

    def chosen(self, live: list[Owner], counts: Mapping[int, int]) -> Owner:
        """See `Director.chosen`."""
        del counts
        if self._last not in live or self.chance.random() >= self._streak:
            self._last = self.chance.choice(live)
        assert self._last is not None
        return self._last

    def decided(self, owner: int, number: int, kind: str) -> Decision:
        """See `Director.decided`."""
        del owner, number
        crash = fault = ""
        rate = self._fault_rate / (_READ_FAULTS if kind.endswith((" read", " listing")) else 1)
        if self.chance.random() < self._crash_rate:
            crash = self.chance.choice(["before", "after"])
        elif self.chance.random() < rate:
            fault = self.chance.choice([REFUSED, LOST])
        return Decision(fault, crash)


_SURE: Final = 24
"""So many requests the second owner makes in any case."""


class Enumeration:
    """All plans.

    Args:
        first: The kinds of the first owner's requests, in order, if nothing happens.
        second: Those of the second one, which takes over after it.
    """

    def __init__(self, first: Sequence[str], second: Sequence[str]) -> None:
        self._first, self._second = first, second
        self._shorts = [at for at, kind in enumerate(second) if kind in SHORT_KINDS]
        self._short, self._other = cycle(self._shorts), cycle(range(_SURE))
        self._count = 0

    def _one_of_each(self, kinds: Sequence[str]) -> list[int]:
        return [at for at, kind in enumerate(kinds) if kind not in kinds[:at]]

    def thin(self) -> Iterator[Plan]:
        """Yield one point of each kind, with one fault for each way to reach it."""
        yield from self._plans(self._one_of_each(self._first), self._few)

    def coarse(self) -> Iterator[Plan]:
        """Yield every point, with each fault once; and every point of the second owner."""
        yield from self._plans(range(len(self._first)), self._each)
        pauses = self._one_of_each(self._first)
        for at in range(len(self._second)):
            pause = pauses[at % len(pauses)]
            yield Plan(pause=pause, back=at)
            for where in ("before", "after"):
                yield Plan(pause=pause, crash=(SECOND, at, where))

    def whole(self) -> Iterator[Plan]:
        """Yield every point, with each fault at each request near it."""
        yield from self._plans(range(len(self._first)), self._all)
        for at in range(len(self._first)):
            for back in range(len(self._second)):
                yield Plan(pause=at, back=back)
        for at in self._one_of_each(self._first):
            for later in range(len(self._second)):
                for where in ("before", "after"):
                    yield Plan(pause=at, crash=(SECOND, later, where))

    def _plans(self, points: Sequence[int], faults: _Faults) -> Iterator[Plan]:
        for at in points:
            kind = self._first[at]
            for where in ("before", "after"):
                for some in faults(at, where):
                    yield Plan(crash=(FIRST, at, where), kind=kind, faults=some)
            for some in faults(at, "paused"):
                yield Plan(pause=at, faults=some)
            for some in faults(at, "late"):
                yield Plan(pause=at, crash=(FIRST, at, "after"), faults=some)

    def _places(self, at: int, where: str) -> list[tuple[int, int]]:
        """Return the first owner's requests near a point, at which a fault does not avoid it.

        Segments of which one cannot be fetched are not merged.
        """
        own = {"before": [at - 1], "after": [at - 1], "paused": [at], "late": []}[where]
        is_avoided = where != "paused" and self._first[at - 1] == "object read"
        return [(FIRST, one) for one in own if one >= 0 and not is_avoided]

    def _next(self, count: int) -> int:
        self._count += 1
        return self._count % count

    def _few(self, at: int, where: str) -> Iterator[Mapping[tuple[int, int], str]]:
        """Yield no fault if the owner ends there, and one kind of fault if it does not end late."""
        kind = {"before": REFUSED, "after": LOST}.get(where, (REFUSED, LOST)[self._next(2)])
        if where != "paused":
            yield {}
        if where != "late":
            yield {[*self._places(at, where), (SECOND, next(self._other))][0]: kind}

    def _each(self, at: int, where: str) -> Iterator[Mapping[tuple[int, int], str]]:
        """Yield no fault, then each kind once: where the owner is paused, or at others in turn."""
        yield {}
        for kind in (REFUSED, LOST):
            places = [*self._places(at, where), (SECOND, next(self._other))]
            yield {places[0 if where == "paused" else self._next(len(places))]: kind}
        if where in {"before", "after"}:
            yield {(SECOND, next(self._short)): SHORT}

    def _all(self, at: int, where: str) -> Iterator[Mapping[tuple[int, int], str]]:
        """Yield no fault, then each kind at each request near the point.

        Of the second owner's requests every third one, another third for each point.
        """
        yield {}
        places = [*self._places(at, where), *[(FIRST, at + 1)] * (where == "paused")]
        places += [(SECOND, one) for one in range(self._next(3), len(self._second), 3)]
        for place in places:
            yield {place: REFUSED}
            yield {place: LOST}
        for one in self._shorts:
            yield {(SECOND, one): SHORT}
