"""The checker: compares a replica with its source, and reports anomalies.

    A1   lost-write    a record is missing, although a later one was copied
    A2   unseen        a record is missing at the end: not copied yet, or lost
    A3   duplicate     an offset is duplicated
    A4   inconsistent  an offset had two different contents over time
    A5   aborted-read  a record of an aborted transaction is in the replica
    A12  reorder       a record is behind one with a higher offset
    A13  mutation      key, value, headers, timestamp or timestamp type differ
    A14  phantom       a record at an offset where the source has none
    A15  chain         object names overlap, leave a gap, or are not object names
    A16  durability    a position was reported that is beyond what is durable
    A17  translation   an offset sync maps two different records to each other
    A19  regress       a reported position decreased
    A20  resurrection  a deleted object reappeared
    A21  generations   records of a recreated topic follow those of the deleted one
    A22  stuck         no progress, although all faults are over

`compare` and `check_tiles` check one state of a replica; `History` checks all that was observed
over time. Each kind of anomaly is reported once, with its count and its first example.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from logmirror.archive.naming import split_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


class Row(NamedTuple):
    """One record: its offset, and everything that replication must preserve."""

    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One kind of anomaly."""

    code: str
    """`A1`, `A2`, ...: see the table of the module."""

    count: int
    """Number of occurrences."""

    example: str
    """The first occurrence."""


def compare(
    truth: Iterable[Row], copy: Iterable[Row], *, may_lack: Collection[int] = ()
) -> list[Anomaly]:
    """Compare the records of a replica with those of its source.

    Reads both as streams. Memory grows with the number of anomalies and of offset gaps, not with
    the number of records.

    Args:
        truth: The records of the source, from an independent reader, in ascending offset order.
        copy: The records of the replica, in its own order.
        may_lack: Offsets of records that the source has removed since, for example by compaction.
            The replica can have them, unchanged, or not.

    Returns:
        The anomalies in the order of their codes; empty if the replica is exact.

    Raises:
        ValueError: The offsets of `truth` do not ascend.
    """
    comparison = _Comparison(iter(truth), may_lack, _Findings())
    for row in copy:
        comparison.step(row)
    return comparison.finish().listed()


class _Comparison:
    """A merge of two streams by offset. Keeps the records that are missing so far."""

    def __init__(
        self, truth: Iterator[Row], may_lack: Collection[int], findings: _Findings
    ) -> None:
        self._truth, self._may_lack = truth, may_lack
        self._missing: dict[int, Row] = {}
        self._gap_firsts: list[int] = []
        self._gap_lasts: list[int] = []
        self._previous = -1
        self._findings = findings
        self._next: Row | None = None
        self._advance()

    def step(self, row: Row) -> None:
        while self._next is not None and self._next.offset < row.offset:
            self._missing[self._next.offset] = self._next
            self._advance()
        if self._next is not None and self._next.offset == row.offset:
            self._same(self._next, row)
            self._advance()
        elif row.offset in self._missing:
            self._findings.add("A12", f"{row} is behind a higher offset")
            self._same(self._missing.pop(row.offset), row)
        elif self._source_had(row.offset):
            self._findings.add("A3", f"{row} is a duplicate")
        else:
            self._findings.add("A14", f"{row}, but the source has no record there")

    def finish(self) -> _Findings:
        for row in self._missing.values():
            if row.offset not in self._may_lack:
                self._findings.add("A1", f"{row} is missing")
        while self._next is not None:
            if self._next.offset not in self._may_lack:
                self._findings.add("A2", f"{self._next} is missing at the end")
            self._advance()
        return self._findings

    def _same(self, expected: Row, found: Row) -> None:
        if tuple(expected) != tuple(found):
            self._findings.add("A13", f"expected {expected}, found {found}")

    def _advance(self) -> None:
        self._next = next(self._truth, None)
        if self._next is None:
            return
        offset = self._next.offset
        if offset <= self._previous:
            raise ValueError(f"the source has offset {offset} after {self._previous}")
        if offset > self._previous + 1:
            self._gap_firsts.append(self._previous + 1)
            self._gap_lasts.append(offset - 1)
        self._previous = offset

    def _source_had(self, offset: int) -> bool:
        """Return whether the source has a record at an offset that was passed."""
        index = bisect_right(self._gap_firsts, offset) - 1
        in_gap = index >= 0 and offset <= self._gap_lasts[index]
        return 0 <= offset <= self._previous and not in_gap


class _Findings:
    """Counts by code, with the first example of each."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, str] = {}

    def add(self, code: str, example: str) -> None:
        self._counts[code] = self._counts.get(code, 0) + 1
        self._examples.setdefault(code, example)

    def listed(self) -> list[Anomaly]:
        return [
            Anomaly(code=code, count=self._counts[code], example=self._examples[code])
            for code in sorted(self._counts, key=lambda code: int(code[1:]))
        ]


def check_tiles(names: Iterable[str], start: int, end: int) -> list[Anomaly]:
    """Check that the objects of a partition cover a range of offsets exactly once, by their names.

    Args:
        names: Names without folder, in any order.
        start: First offset of the range.
        end: One past the last offset of the range.

    Returns:
        At most one anomaly, A15; empty if every offset is covered exactly once.
    """
    findings = _Findings()
    _tile(findings, names, start, end)
    return findings.listed()


def _tile(findings: _Findings, names: Iterable[str], start: int, end: int | None) -> int:
    """Check the names of one listing; returns one past the last offset that they cover."""
    expected, extensions = start, set()
    for name in sorted(names):
        parts = split_name(name)
        if parts is None:
            findings.add("A15", f"not an object name: {name!r}")
            continue
        first, last, extension = parts
        extensions.add(extension)
        if first != expected:
            kind = "overlap" if first < expected else "gap"
            findings.add("A15", f"{kind}: {name}, expected first offset {expected}")
        expected = max(expected, last + 1)
    if end is not None and expected != end:
        findings.add("A15", f"the objects end at {expected}, expected {end}")
    if len(extensions) > 1:
        findings.add("A15", f"several formats: {sorted(extensions)}")
    return expected


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The expected records of one partition, from a source that shares no code with the mirror.

    A test that produced the records knows them; otherwise another client reads them.
    """

    rows: Sequence[Row]
    """All committed records that ever were in the partition, in ascending offset order."""

    start: int = 0
    """The first offset that the replica must cover."""

    end: int | None = None
    """One past the last offset that can be copied; None: not checked."""

    aborted: Mapping[int, Row] = field(default_factory=dict)
    """Records of aborted transactions, by offset."""

    may_lack: Collection[int] = ()
    """Offsets of rows that the source has removed since, by compaction or deletion."""

    later: Mapping[int, Row] = field(default_factory=dict)
    """Records of the recreated topic, by offset."""


class History:
    """All observations of the replica of one partition.

    Call `listed`, `read`, `reported`, `mistranslated` and `stuck` in the order of time, then
    `judge` once. Memory grows with the number of records.

    Args:
        start: The first offset that the replica must cover.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._findings = _Findings()
        self._seen: dict[int, Row] = {}
        self._names: set[str] = set()
        self._gone: set[str] = set()
        self._reports: dict[str, int] = {}
        self._highest: list[tuple[int, int]] = []
        """Time and position of each report that was higher than all before, both ascending."""

    def listed(self, names: Iterable[str], *, tiles: bool = True) -> None:
        """Record a listing of the durable objects.

        Args:
            names: Names without folder.
            tiles: Whether to check that they cover their range exactly once. A merged object
                exists beside its parts for a time.
        """
        found = set(names)
        if tiles:
            _tile(self._findings, found, self._start, None)
        for name in sorted(found & self._gone):
            self._findings.add("A20", f"{name} was deleted and reappeared")
        self._gone = (self._gone | self._names) - found
        self._names = found

    def read(self, rows: Iterable[Row]) -> None:
        """Record records that were read from the replica."""
        for row in rows:
            before = self._seen.setdefault(row.offset, row)
            if tuple(before) != tuple(row):
                self._findings.add("A4", f"{before}, later {row}")

    def reported(
        self, run: str, position: int, *, at_ms: int, began_ms: int, durable: int | None = None
    ) -> None:
        """Record a position that a mirror reported.

        Args:
            run: Name of the run of the mirror.
            position: The reported position.
            at_ms: Time of the report, in milliseconds.
            began_ms: Start time of the run. Its positions must not be lower than those reported
                before it started.
            durable: End of the durable replica at that time; None: not observed.
        """
        if durable is not None and position > durable:
            self._findings.add("A16", f"{run} reported {position}, but only {durable} was durable")
        own = self._reports.get(run, position)
        if position < own:
            self._findings.add("A19", f"{run} reported {own}, then {position}")
        index = bisect_right(self._highest, began_ms, key=lambda report: report[0])
        if index and position < self._highest[index - 1][1]:
            before_ms, before = self._highest[index - 1]
            self._findings.add(
                "A19", f"{before} was reported at {before_ms} ms, then {run} reported {position}"
            )
        self._reports[run] = max(own, position)
        if not self._highest or position > self._highest[-1][1]:
            self._highest.append((at_ms, position))

    def unreadable(self, why: str) -> None:
        """Record that the replica cannot be read: its bytes were changed."""
        self._findings.add("A13", why)

    def mistranslated(self, why: str) -> None:
        """Record an offset sync by which consumer groups would resume at another record."""
        self._findings.add("A17", why)

    def stuck(self, why: str) -> None:
        """Record that the mirror makes no progress, although all faults are over."""
        self._findings.add("A22", why)

    def judge(
        self, truth: Truth, copy: Iterable[Row], *, names: Iterable[str] | None = None
    ) -> list[Anomaly]:
        """Compare the final state of the replica with the source.

        Args:
            truth: The expected records.
            copy: The records of the replica, in its own order.
            names: Names of the objects, without folder; None for a cluster.

        Returns:
            The anomalies of the whole history, in the order of their codes; empty if there is none.
        """
        if names is not None:
            found = list(names)
            self.listed(found, tiles=False)
            _tile(self._findings, found, truth.start, truth.end)
        comparison = _Comparison(iter(truth.rows), truth.may_lack, self._findings)
        own = {row.offset: row for row in truth.rows} if truth.later else {}
        for row in copy:
            self.read([row])
            if row == truth.aborted.get(row.offset):
                self._findings.add("A5", f"{row} was aborted")
            elif row == truth.later.get(row.offset) != own.get(row.offset):
                self._findings.add("A21", f"{row} belongs to the recreated topic")
            else:
                comparison.step(row)
        return comparison.finish().listed()
