"""Runs of a mount: each order of its requests and the changes of the archive, and drawn ones."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Final, NamedTuple

from kit.runs.archive_history import Writers
from kit.runs.archive_judge import Judge
from kit.runs.archive_mount import Mount

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.runs.archive_history import History

WHAT: Final = ("start", "poll")
COUNTS: Final = (1, 2, 3, 6, 9)
"""How many changes happen at once."""

_WRITES: Final = frozenset({"create", "publish", "delete"})
_TURNS: Final = 200
_SIZES: Final = (1, 200, 1 << 20)


class Case(NamedTuple):
    """When changes happen.

    Attributes:
        what: Whether the broker starts or lists the archive again meanwhile, and is read.
        at: How many changes were made before.
        request: Before which of its requests further ones happen.
        count: How many.
    """

    what: str
    at: int
    request: int
    count: int


def interrupted(history: History, place: str, folder: Path, case: Case, seed: int = 0) -> Judge:
    """Run a case."""
    with Mount(history, place, folder, seed) as mount:
        judge = Judge(mount)
        mount.view.advance(case.at)
        if case.what == "poll":
            judge.start()
            judge.read()
        mount.plan = {case.request: case.count}
        (judge.start if case.what == "start" else judge.poll)()
        judge.read()
        judge.read_all()
        judge.requests = len(mount.asked)
        judge.quiet()
        return judge


def cases(history: History, place: str, folder: Path) -> Iterator[Case]:
    """Yield every change before every request, of each start and each poll."""
    for what, at in itertools.product(WHAT, range(len(history.changes))):
        plain = interrupted(history, place, folder, Case(what, at, 0, 0))
        for request, count in itertools.product(range(1, plain.requests + 1), COUNTS):
            yield Case(what, at, request, count)


def some_cases(history: History, place: str, folder: Path, count: int, seed: str) -> list[Case]:
    """Draw some of them."""
    chooser, found = random.Random(seed), []
    requests: dict[tuple[str, int], int] = {}
    while len(found) < count:
        key = chooser.choice(WHAT), chooser.randrange(len(history.changes))
        if key not in requests:
            plain = interrupted(history, place, folder, Case(*key, 0, 0))
            requests[key] = plain.requests
        request = chooser.randint(1, max(1, requests[key]))
        found.append(Case(*key, request, chooser.choice(COUNTS)))
    return found


def followed(history: History, place: str, folder: Path) -> Judge:
    """Let the archive be listed, and be read, after each single change."""
    with Mount(history, place, folder) as mount:
        judge = Judge(mount)
        judge.start()
        for _ in history.changes:
            mount.view.advance(1)
            judge.poll()
            judge.read()
            if mount.log(0) is None:
                judge.start()
        judge.quiet()
        return judge


def crashed(form: str, every: int, seed: int = 3) -> Iterator[History]:
    """Yield histories in which a mirror or a compaction was killed at each of its changes.

    Another writer takes over, and completes what was begun.

    Args:
        form: The format.
        every: Only each so many changes.
        seed: Of the source.
    """
    for work in ("mirror", "compact", "trim"):
        writers = Writers(seed, form)
        writers.mirror(0.7)
        writes = [n for n, kind in enumerate(_requests(writers, work), 1) if kind in _WRITES]
        for number in writes[::every]:
            writers = Writers(seed, form, outcomes=number % 2 == 1)
            writers.mirror(0.7)
            writers.work(_work(writers, work), {number: writers.dies})
            assert "died" in writers.happened
            writers.mirror(0.8)
            writers.compact()
            writers.mirror()
            yield writers.history()


def _requests(writers: Writers, work: str) -> list[str]:
    writers.work(_work(writers, work), {})
    return writers.requests


def _work(writers: Writers, work: str) -> Callable[[], None]:
    found: Callable[[], None] = getattr(writers, work)
    return found


def wandered(history: History, place: str, folder: Path, seed: int) -> Judge:
    """Draw changes, failures of the store, listings, starts and reads."""
    chance = random.Random(f"mount {seed}")
    with Mount(history, place, folder, seed) as mount:
        judge = Judge(mount)
        mount.view.advance(chance.randrange(len(history.changes)))
        mount.chance = chance
        judge.start()
        for _ in range(_TURNS):
            if mount.view.at == len(history.changes):
                break
            draw = chance.random()
            if draw < 0.35:
                judge.poll()
            elif draw < 0.6:
                judge.read(chance.choice(_SIZES))
            elif draw < 0.8:
                judge.read_some(chance)
            elif draw < 0.87:
                judge.read_all()
            elif draw < 0.9:
                judge.start()
            else:
                mount.view.advance(1)
        judge.quiet()
        return judge
