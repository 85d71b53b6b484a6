"""The checker: what was observed of a source and of its copy, judged by the names of anomalies.

    A1   lost-write    a record is missing although a later one was copied
    A2   unseen        a record is missing at the end: stale or lost
    A3   duplicate     an offset appears again
    A4   inconsistent  one offset, two contents over time
    A5   aborted-read  a record of an aborted transaction is in the copy
    A12  reorder       a record appears behind a later one
    A13  mutation      key, value, headers, timestamp or timestamp type differ
    A14  phantom       a record at an offset where the source has none
    A15  chain         names do not tile the range: a gap, an overlap, or a strange name
    A16  durability    a position was reported that what is durable does not prove
    A17  translation   a pair of offsets was told that is not of one record
    A19  regress       a reported position went back
    A20  resurrection  an object that was gone is there again
    A21  generations   records of a topic that was made anew joined to the copy of the old one
    A22  stuck         no progress although all faults are over

`compare` and `check_tiles` judge one look at a copy; `History` what was seen of it over time. Each
anomaly is reported once, with its count and its first example.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from logmirror.archive.naming import split_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence


class Row(NamedTuple):
    """One record as a reader saw it: its offset and all that must never change on the way."""

    offset: int
    timestamp_ms: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[bytes, bytes | None], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """One kind of difference between a source and a copy."""

    code: str
    """`A1` and so on, as in the module's table."""

    count: int
    """How often it was found."""

    example: str
    """The first one found."""


def compare(
    truth: Iterable[Row], copy: Iterable[Row], *, may_lack: Collection[int] = ()
) -> list[Anomaly]:
    """Compare what the source holds with what the copy holds.

    Reads both as streams; memory grows with the anomalies and with the holes of the source, not
    with the records.

    Args:
        truth: The source's records, as an independent reader saw them, by ascending offset.
        copy: The copy's records in the order in which the copy holds them.
        may_lack: Offsets of records that the source has lost since, by compaction for instance: a
            copy may have them, unchanged, or not.

    Returns:
        The anomalies, by code; empty means that the copy is exact.

    Raises:
        ValueError: The offsets of `truth` do not ascend: then there is nothing to compare with.
    """
    comparison = _Comparison(iter(truth), may_lack, _Findings())
    for row in copy:
        comparison.step(row)
    return comparison.finish().listed()


class _Comparison:
    """A merge of two streams by offset that remembers what it has passed over."""

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
            self._findings.add("A12", f"{row} behind a later offset")
            self._same(self._missing.pop(row.offset), row)
        elif self._source_had(row.offset):
            self._findings.add("A3", f"{row} again")
        else:
            self._findings.add("A14", f"{row} where the source has none")

    def finish(self) -> _Findings:
        for row in self._missing.values():
            if row.offset not in self._may_lack:
                self._findings.add("A1", f"{row} is missing")
        while self._next is not None:
            if self._next.offset not in self._may_lack:
                self._findings.add("A2", f"{self._next} is not there yet, or lost")
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
            raise ValueError(f"offset {offset} of the source comes after {self._previous}")
        if offset > self._previous + 1:
            self._gap_firsts.append(self._previous + 1)
            self._gap_lasts.append(offset - 1)
        self._previous = offset

    def _source_had(self, offset: int) -> bool:
        """Whether an offset that was passed carried a record."""
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
    """Compare the names of one partition's objects with the range that they must tile.

    Args:
        names: Without folder, in any order.
        start: The first offset that must be covered.
        end: One past the last.

    Returns:
        At most one anomaly, A15; empty means that every offset is covered exactly once.
    """
    findings = _Findings()
    _tile(findings, names, start, end)
    return findings.listed()


def _tile(findings: _Findings, names: Iterable[str], start: int, end: int | None) -> int:
    """Check the names of one look; returns one past the last offset that they cover."""
    expected, extensions = start, set()
    for name in sorted(names):
        parts = split_name(name)
        if parts is None:
            findings.add("A15", f"strange name {name!r}")
            continue
        first, last, extension = parts
        extensions.add(extension)
        if first != expected:
            kind = "overlap" if first < expected else "gap"
            findings.add("A15", f"{kind}: {name} where {expected} must follow")
        expected = max(expected, last + 1)
    if end is not None and expected != end:
        findings.add("A15", f"the objects end before {expected}, not before {end}")
    if len(extensions) > 1:
        findings.add("A15", f"several formats: {sorted(extensions)}")
    return expected


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the source of one partition was, as somebody knows who shares nothing with the copier.

    A test that makes its source knows it; elsewhere it is what another client reads.
    """

    rows: Sequence[Row]
    """Every record that a reader of committed records was ever shown, by ascending offset."""

    start: int = 0
    """The first offset that the copy must account for."""

    end: int | None = None
    """One past the last offset that may be copied; None: whatever comes after the last row."""

    aborted: Mapping[int, Row] = field(default_factory=dict)
    """By offset: what was written in transactions that were aborted."""

    may_lack: Collection[int] = ()
    """Offsets of rows that the source has lost since: compacted, or deleted from its beginning."""

    later: Mapping[int, Row] = field(default_factory=dict)
    """By offset: what a topic holds that was made anew under the same name."""


class History:
    """What was seen of one partition's copy, from its beginning to its end.

    Call `listed`, `read`, `reported`, `mistranslated` and `stuck` as things happen, in the order of
    time; then `judge` once. Memory grows with the records that were read.
    """

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._findings = _Findings()
        self._seen: dict[int, Row] = {}
        self._names: set[str] = set()
        self._gone: set[str] = set()
        self._reports: dict[str, int] = {}
        self._highest: list[tuple[int, int]] = []
        """Time and position, both ascending: the highest report at any time."""

    def listed(self, names: Iterable[str], *, tiles: bool = True) -> None:
        """One look at the objects of the copy, durable ones only.

        Args:
            names: Without folder.
            tiles: Whether they must fit together at this moment; while objects are merged, they
                stand beside their parts.
        """
        found = set(names)
        if tiles:
            _tile(self._findings, found, self._start, None)
        for name in sorted(found & self._gone):
            self._findings.add("A20", f"{name} was gone and is there again")
        self._gone = (self._gone | self._names) - found
        self._names = found

    def read(self, rows: Iterable[Row]) -> None:
        """What some offsets of the copy held at some moment."""
        for row in rows:
            before = self._seen.setdefault(row.offset, row)
            if tuple(before) != tuple(row):
                self._findings.add("A4", f"{before} was read, then {row}")

    def reported(
        self, run: str, position: int, *, at_ms: int, began_ms: int, durable: int | None = None
    ) -> None:
        """A run of the copier told how far the copy is.

        Args:
            run: Its name.
            position: What it told.
            at_ms: When.
            began_ms: When the run began: it must know what was told before.
            durable: How far the copy reached then, counting only what no fault can take away;
                None: nobody looked.
        """
        if durable is not None and position > durable:
            self._findings.add("A16", f"{run} reported {position} where {durable} was durable")
        own = self._reports.get(run, position)
        if position < own:
            self._findings.add("A19", f"{run} reported {own}, then {position}")
        index = bisect_right(self._highest, began_ms, key=lambda told: told[0])
        if index and position < self._highest[index - 1][1]:
            told_ms, told = self._highest[index - 1]
            self._findings.add(
                "A19", f"{told} was reported at {told_ms} ms, then {run} began with {position}"
            )
        self._reports[run] = max(own, position)
        if not self._highest or position > self._highest[-1][1]:
            self._highest.append((at_ms, position))

    def unreadable(self, why: str) -> None:
        """The copy holds something that is no record: its bytes were changed."""
        self._findings.add("A13", why)

    def mistranslated(self, why: str) -> None:
        """A pair of offsets was told by which groups would go on at another record."""
        self._findings.add("A17", why)

    def stuck(self, why: str) -> None:
        """All faults are over, and still the copy does not go on."""
        self._findings.add("A22", why)

    def judge(
        self, truth: Truth, copy: Iterable[Row], *, names: Iterable[str] | None = None
    ) -> list[Anomaly]:
        """Compare the end of the history with its source.

        Args:
            truth: The source.
            copy: The copy's records in the order in which it holds them.
            names: Of the copy's objects, without folder; None: it is no archive.

        Returns:
            The anomalies of the whole history, by code; empty means that nothing was lost, and
            nothing made up.
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
                self._findings.add("A5", f"{row} was never committed")
            elif row == truth.later.get(row.offset) != own.get(row.offset):
                self._findings.add("A21", f"{row} is of the topic that was made later")
            else:
                comparison.step(row)
        return comparison.finish().listed()
