"""What mirrors and compactions do to an archive: each change of the store, one after the other.

The writers are the product's: the driver loop of a mirror, with its executors, and `compact`. They
run in this thread, over a store in memory. Before any of their requests they can be killed, or the
request fails, or its response is lost, or a second writer does its work meanwhile. Readers change
nothing in an archive, so the changes are the same whatever a mount does between them.
"""

from __future__ import annotations

import contextlib
import random
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple
from unittest import mock

from kit.fakes.scripted import ScriptedClient, SteppingClock, archive_spec, service
from kit.runs.archive_source import partitions
from logmirror.archive.compact import Limits, compact
from logmirror.archive.merge import Archive
from logmirror.archive.naming import split_name
from logmirror.errors import LogmirrorError, OutcomeUnknownError, UnavailableError
from logmirror.simulation.reading import covering
from logmirror.testing import MemoryStore
from logmirror.to_archive.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kit.runs.archive_source import Partition

FORMATS: Final = ("native", "parquet", "ndjson")
EXTENSIONS: Final = {"native": "batches", "parquet": "parquet", "ndjson": "ndjson"}
TOPIC: Final = "t"
FOLDER: Final = "d"
_LONG_MS: Final = 8 * 24 * 3600 * 1000
"""Longer than claims of Parquet objects are kept in a directory."""


class Died(BaseException):
    """As `kill -9`."""


class Change(NamedTuple):
    """An object was created, or deleted (None)."""

    name: str
    data: bytes | None


class Extent(NamedTuple):
    """What a partition of an archive covers; the judge's own reading of names."""

    start: int
    end: int


class History(NamedTuple):
    """Changes of an archive, and what its source held.

    Attributes:
        form: The format.
        changes: In order.
        source: The partitions.
        extents: What each partition covers after so many changes; None: nothing, or no chain.
        happened: The names of what was done.
        outcomes: Whether claims hold the outcomes of open transactions. Older ones do not.
    """

    form: str
    changes: list[Change]
    source: list[Partition]
    extents: list[tuple[Extent | None, ...]]
    happened: list[str]
    outcomes: bool

    @property
    def extension(self) -> str:
        return EXTENSIONS[self.form]


class _Recorded(MemoryStore):
    """A store that keeps its changes.

    Attributes:
        changes: All of them.
        is_lost: Whether the response to the next write is lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []
        self.is_lost = False

    def _add(self, name: str, data: bytes) -> None:
        super()._add(name, data)
        self.changes.append(Change(name, data))
        if self.is_lost:
            self.is_lost = False
            raise OutcomeUnknownError("the response was lost", name=name)

    def delete(self, name: str) -> None:
        """See `BlobStore.delete`."""
        super().delete(name)
        self.changes.append(Change(name, None))


class Writers:
    """The writers of one archive.

    Args:
        seed: Of the source.
        form: The format.
        batches: The size of the source's first partition.
        max_offsets: `max-offsets` of the mirror.
        outcomes: Whether claims hold the outcomes of open transactions.
        compacted: The source has offset gaps in any case.

    Attributes:
        requests: Kinds of the requests of the last work that was not nested.
        happened: What was done.
    """

    def __init__(  # noqa: PLR0913  # what the histories differ in
        self,
        seed: int,
        form: str,
        *,
        batches: int = 14,
        max_offsets: int = 4,
        outcomes: bool = True,
        compacted: bool = False,
    ) -> None:
        self.source = partitions(seed, batches=batches, compacted=compacted)
        self._outcomes = outcomes
        self.form, self.requests, self.happened = form, list[str](), list[str]()
        self._spec = archive_spec(
            format=form, location=archive_spec().location, max_offsets=max_offsets
        )
        has_gaps = any(set(range(p.log.log_start, p.end)) - p.rows.keys() for p in self.source)
        configs = {"cleanup.policy": "compact"} if has_gaps else {}
        logs = [one.log for one in self.source]
        self._client = partial(ScriptedClient, logs, topic=TOPIC, configs=configs)
        self._store = _Recorded()
        self._clock = SteppingClock()
        self._runs = 0
        self._faults: dict[int, Callable[[], None]] = {}
        self._store.before = self._request

    def _request(self, operation: str, name: str) -> None:
        faults, self.requests = self._faults, [*self.requests, operation]
        fault = faults.pop(len(self.requests), None)
        if fault is not None:
            self.happened.append(f"{operation} {name}")
            fault()

    def work(self, what: Callable[[], None], faults: dict[int, Callable[[], None]]) -> None:
        """Do some work.

        Args:
            what: The work.
            faults: What happens before some of its requests, by number from 1 on.
        """
        self.requests, self._faults = [], dict(faults)
        try:
            what()
        except (Died, LogmirrorError) as error:
            self.happened.append(repr(error)[:80])
        self._store.is_lost, self._faults = False, {}

    def nested(self, what: Callable[[], None]) -> None:
        """Do some work of another writer before a request; the one that sent it waits."""
        before = self.requests, self._faults
        self.requests, self._faults = [], {}
        try:
            what()
        except LogmirrorError as error:
            self.happened.append(repr(error)[:80])
        finally:
            self.requests, self._faults = before

    # -- what happens before a request ------------------------------------------------------------

    def dies(self) -> None:
        """Kill the writer."""
        self.happened.append("died")
        raise Died

    def refused(self) -> None:
        """Let the request fail."""
        self.happened.append("refused")
        raise UnavailableError("the store is not reachable")

    def lost(self) -> None:
        """Lose the response of the next write."""
        self.happened.append("lost")
        self._store.is_lost = True

    # -- work -------------------------------------------------------------------------------------

    def mirror(self, part: float = 1.0, *, anywhere: bool = False) -> None:
        """Copy what is there of the source, of which a part is released."""
        for one in self.source:
            one.release(part, anywhere=anywhere)
        self._runs += 1
        self.happened.append(f"mirror {part}")
        older = mock.patch.object(Transfer, "_take_decided", return_value=())
        made_by = contextlib.nullcontext() if self._outcomes else older
        with (
            made_by,
            service(
                self._client(),
                self._store,
                spec=self._spec,
                clock=self._clock,
                names=(FOLDER,),
                chain_start="earliest",
            ) as (made, _),
        ):
            made.run(until_now=True)

    def compact(self, target_bytes: int = 1 << 20) -> None:
        """Merge the objects of each partition."""
        self.happened.append("compact")
        for number in range(len(self.source)):
            archive = Archive(
                store=self._store,
                folder=f"{FOLDER}/{number}",
                topic=TOPIC,
                extension=EXTENSIONS[self.form],
                compression="zstd-1",
                utf8=False,
            )
            limits = Limits(target_bytes=target_bytes, min_objects=2)
            compact(archive, limits, start=None, writer_id="c", clock=self._clock)

    def trim(self, count: int = 2) -> None:
        """Delete the first objects, and all within them, as a person does; never the last one."""
        self.happened.append("trim")
        for number in range(len(self.source)):
            folder = f"{FOLDER}/{number}"
            names = list(self._store.names(folder))
            chosen = covering(names)[:-1][:count]
            limit = max((_range(name)[1] for name in chosen), default=-1)
            for name in names:
                if _range(name)[1] <= limit:
                    self._store.delete(f"{folder}/{name}")

    def wait(self) -> None:
        """Let claims become old."""
        self._clock.wall_ms += _LONG_MS

    def drawn(self, chooser: random.Random, part: float) -> Callable[[], None]:
        """Return some work."""
        return chooser.choice(
            (
                *(partial(self.mirror, part),) * 3,
                *(partial(self.compact, chooser.choice((600, 1 << 20))),) * 3,
                self.trim,
            )
        )

    def faults(self, chooser: random.Random, part: float) -> dict[int, Callable[[], None]]:
        """Return what happens before requests of some work."""
        found = {}
        for _ in range(chooser.choice((0, 1, 1, 2))):
            other = partial(self.nested, self.drawn(chooser, part))
            fault = chooser.choice((self.dies, self.refused, self.lost, other, other))
            found[chooser.randint(1, chooser.choice((10, 40, 80)))] = fault
        return found

    def history(self) -> History:
        """Return what was done."""
        changes = self._store.changes
        extents, names = [self._extents(set())], set[str]()
        for change in changes:
            (names.discard if change.data is None else names.add)(change.name)
            extents.append(self._extents(names))
        return History(self.form, changes, self.source, extents, self.happened, self._outcomes)

    def _extents(self, names: set[str]) -> tuple[Extent | None, ...]:
        folders = (f"{FOLDER}/{number}/" for number in range(len(self.source)))
        return tuple(
            extent(name.removeprefix(start) for name in names if name.startswith(start))
            for start in folders
        )


def extent(names: Iterable[str]) -> Extent | None:
    """Return what names cover; None if they are no chain."""
    ranges = [_range(name) for name in covering(names)]
    chained = all(a[1] + 1 == b[0] for a, b in pairwise(ranges))
    return Extent(ranges[0][0], ranges[-1][1] + 1) if ranges and chained else None


def _range(name: str) -> tuple[int, int]:
    parts = split_name(name)
    assert parts is not None
    return parts[:2]


def short(form: str, seed: int = 1) -> History:
    """Return a history without faults: objects, a merge, more objects, a merge, and a trim."""
    writers = Writers(seed, form, outcomes=seed % 2 == 1)
    for part in (0.4, 0.7):
        writers.mirror(part)
        writers.compact()
    writers.mirror()
    writers.trim(1)
    writers.compact()
    return writers.history()


def cleaned(seed: int) -> tuple[History, int]:
    """Return a history in which the source's log cleaner removes markers between two copies.

    With it, the number of those that no copy has.
    """
    writers, removed = Writers(seed, "native", batches=30, compacted=True), 0
    for part in (0.2, 0.4, 0.6, 0.8):
        writers.mirror(part, anywhere=True)
        removed += sum(one.clean() for one in writers.source)
        if seed % 2:
            writers.compact()
    writers.mirror()
    writers.compact()
    return writers.history(), removed


def drawn(seed: int) -> History:
    """Return a history in which writers fail, are killed, and work at the same time."""
    chooser = random.Random(f"history {seed}")
    form, max_offsets = chooser.choice(FORMATS), chooser.choice((2, 5))
    outcomes = random.Random(f"outcomes {seed}").random() < 0.5
    writers = Writers(seed, form, batches=20, max_offsets=max_offsets, outcomes=outcomes)
    part = 0.0
    for _ in range(chooser.randint(3, 7)):
        part = min(1.0, part + chooser.random() * 0.4)
        if chooser.random() < 0.2:
            writers.wait()
        writers.work(writers.drawn(chooser, part), writers.faults(chooser, part))
    writers.mirror()
    return writers.history()
