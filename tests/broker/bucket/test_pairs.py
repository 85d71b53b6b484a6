"""Goal: no crash of a bucket's owner, no fault and no takeover loses a record or misleads a reader.

Method: `kit.runs.bucket_plans` enumerates crash points, faults near them, and who takes over;
`kit.runs.bucket_pairs` runs each plan with nearly all of two brokers, and readers at every turn.
What really happened in the runs is counted.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest

from kit.runs.bucket_calls import EXISTS, LOST, REFUSED, SHORT
from kit.runs.bucket_pairs import World, history, kinds_of
from kit.runs.bucket_plans import FIRST, SECOND, SHORT_KINDS, Enumeration, Plan
from kit.tiers import IS_THIN, NIGHTLY, sized

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kit.runs.bucket_pairs import Bucket

pytestmark = pytest.mark.slow
HOW: Final = ("crashed before", "crashed after", "paused", "late")
"""The first owner crashed before or after a request, and the other one took over; or it was paused
there, the other one took over, and it continued, or crashed after this request."""

KINDS: Final = (
    *("fence create", "commit create", "cut create", "row create", "snapshot create"),
    *("merge create", "bundle create", "producers create"),
    *("segment upload", "merged upload", "compacted upload", "index upload"),
    *("segment delete", "merged source delete", "commit delete", "bundle delete"),
    *("producers delete", "index delete"),
    *("commit listing", "bundle listing", "object listing", "producers listing"),
    *("commit read", "bundle read", "producers read", "object read"),
)
RACES: Final = frozenset(
    {"fence create", "commit create", "cut create", "row create", "snapshot create"}
    | {"merge create", "segment upload", "producers create", "index upload"}
)
"""What both owners create under one name."""

_RACES_OF_ALL: Final = RACES - {"segment upload", "index upload"}
"""Those that one point of each kind has."""


class Counted:
    """What really happened in runs.

    Attributes:
        points: How often the first owner was at a request of some kind, by `HOW`.
        pairs: The same, with each kind of fault that a run had.
        faults: How often a request of some kind met some fault.
        races: Requests that found what another owner had created.
        clients: What happened to idempotent producers.
    """

    def __init__(self) -> None:
        self.points: Counter[tuple[str, str]] = Counter()
        self.pairs: Counter[tuple[str, str, str]] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()
        self.races: Counter[str] = Counter()
        self.clients: Counter[str] = Counter()

    def add(self, plan: Plan, bucket: Bucket) -> None:
        """Count a run."""
        happened = bucket.happened
        self.clients += bucket.clients.happened
        faults = {(one.kind, one.what) for one in happened if one.what in {REFUSED, LOST, SHORT}}
        exists = {(one.kind, EXISTS) for one in happened if one.what == EXISTS}
        self.faults.update(faults | exists)
        if not plan.faults:
            self.races.update(kind for kind, _ in exists)
        if (point := _point(plan, bucket)) is not None:
            self.points[point] += 1
            self.pairs.update((*point, what) for _, what in faults)


def _point(plan: Plan, bucket: Bucket) -> tuple[str, str] | None:
    """Return where the first owner was, and how it came to be replaced there."""
    happened = bucket.happened
    crashes = [one for one in happened if one.owner == FIRST and one.what.startswith("crashed")]
    if plan.pause is None:
        return (crashes[0].kind, crashes[0].what) if crashes else None
    at = next((n for n, one in enumerate(happened) if one[:2] == (FIRST, plan.pause)), None)
    other = next(
        (n for n, one in enumerate(happened) if one[::2] == (SECOND, "fence create")), None
    )
    if at is None or other is None or other > at:
        return None
    return happened[at].kind, "late" if crashes else "paused"


def judged(plans: Iterable[Plan], folder: Path) -> Counted:
    """Run all plans, and return what happened."""
    before, counted = history(folder / "history"), Counted()
    for number, plan in enumerate(plans):
        world = World(folder / str(number), plan, before)
        assert world.run() == [], plan
        counted.add(plan, world.bucket)
        if number % 50 == 0:
            gc.collect()  # open files, which cycles hold
    return counted


def enumeration(folder: Path) -> Enumeration:
    world = World(folder / "plain", Plan(), history(folder / "before"))
    assert world.run() == []
    first, second = kinds_of(world.bucket, FIRST), kinds_of(world.bucket, SECOND)
    assert set(first) == set(KINDS)
    return Enumeration(first, second)


def test_the_same_plan_is_the_same_run(folder):
    """Requests are numbered, so nothing may depend on the machine's clock."""
    runs = []
    for number in range(4):
        before = history(folder / f"history-{number}")
        plan = Plan(pause=30, faults={(FIRST, 20): LOST, (SECOND, 3): REFUSED})
        world = World(folder / str(number), plan, before)
        assert world.run() == []
        runs.append((before.happened, world.bucket.happened))
    assert all(run == runs[0] for run in runs)


@pytest.mark.thinned
@pytest.mark.timeout(sized(600, 600, 7_200))
def test_every_crash_point_meets_every_fault_with_two_owners(folder):
    plans = enumeration(folder)
    counted = judged(sized(plans.thin, plans.coarse, plans.whole)(), folder)
    points = itertools.product(KINDS, HOW)
    assert [point for point in points if not counted.points[point]] == []
    assert [pair for pair in _wanted() if not counted.pairs[pair]] == []
    assert sized(_RACES_OF_ALL, RACES, RACES) - counted.races.keys() == set()
    assert min(counted.clients[one] for one in ("duplicate of another owner", "committed")) > 0
    if not IS_THIN:
        faults = [
            *itertools.product(KINDS, (REFUSED, LOST)),
            *itertools.product(SHORT_KINDS, (SHORT,)),
        ]
        assert [fault for fault in faults if not counted.faults[fault]] == []


def _wanted() -> list[tuple[str, str, str]]:
    """Return the pairs that must occur."""
    if IS_THIN:
        thin = ("crashed before", REFUSED), ("crashed after", LOST)
        return [(kind, *pair) for kind in KINDS for pair in thin]
    found = [*itertools.product(KINDS, HOW, (REFUSED, LOST))]
    if NIGHTLY:
        found += itertools.product(KINDS, HOW[:2], (SHORT,))
    return found
