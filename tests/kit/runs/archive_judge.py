"""Readers of a mounted archive, which compare everything with what the source held.

- Each record is the source's at its offset, with its key, value, headers and timestamp. None is
  skipped or repeated, except those of aborted transactions, where the reader or the format hides
  them.
- High watermark and log start never move back. The log start is never above what was deleted from
  the archive, and the high watermark never above what is in it.
- OFFSET_OUT_OF_RANGE is for deleted offsets only. A storage error is retried; it must be over once
  the archive was listed and nothing fails or changes any more.
- What was in the archive when a listing began that did not fail is below the high watermark.
- A lookup by timestamp finds the first record of the log that is as new.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.broker.error_codes import ErrorCode
from logmirror.errors import LogmirrorError
from logmirror.testing.checker import Row
from logmirror.wire.batch_header import parse_header
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    import random

    from kit.runs.archive_history import Extent
    from kit.runs.archive_mount import Mount, Response

_SOME_BYTES: Final = (1, 200, 1 << 20)
_TRIES: Final = 100
_NOT_FOUND: Final = -1


class Reader:
    """A consumer of one partition, which continues at its position.

    Args:
        judge: What judges its responses.
        number: The partition.
        committed: Whether it reads with `read_committed`.
        position: Where it begins; None: at the log start.
    """

    def __init__(
        self, judge: Judge, number: int, *, committed: bool, position: int | None = None
    ) -> None:
        self._judge, self.number, self.committed = judge, number, committed
        self.position = position

    def read(self, max_bytes: int) -> None:
        """Read up to the end, or to an error."""
        judge, mount = self._judge, self._judge.mount
        for _ in range(_TRIES):
            log = mount.log(self.number)
            if log is None:
                return
            if self.position is None:
                self.position = log.log_start
            extent = mount.extents[self.number]
            found = mount.fetch(self.number, self.position, max_bytes, committed=self.committed)
            if not self._take(found, extent):
                return
        judge.says(f"{self} makes no progress")

    def _take(self, found: Response, before: Extent | None) -> bool:
        """Judge a response; returns whether there is more to read."""
        judge, position = self._judge, self.position
        assert position is not None
        code = found.fetched.error
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            if before is not None and position >= before.start:
                judge.says(f"{self}: out of range, in {before}")
            self.position = None
            return True
        if code:
            judge.failed(self.number, code, f"{self}")
            return False
        judge.offsets(self.number)
        watermark = found.fetched.high_watermark
        stable = judge.stable(self.number, watermark)
        if self.committed and not stable <= found.fetched.last_stable <= watermark:
            judge.says(f"{self}: last stable offset {found.fetched.last_stable}, not {stable}")
        end = stable if self.committed else watermark
        if not found.data:
            # A gap before the last stable offset is passed with the records behind it.
            if any(self._wanted(position, end)) or position < end == watermark:
                judge.says(f"{self}: no records, up to {end}")
            return False
        following = self._records(found)
        if following > watermark:
            judge.says(f"{self}: records up to {following}, beyond {watermark}")
        # What lies behind the last stable offset is served to those that begin there.
        undecided = judge.undecided(self.number, watermark) if self.committed else set()
        if passed := undecided & set(range(position, following)):
            judge.says(f"{self}: {passed} are not decided")
        self.position = following
        return following < watermark

    def _wanted(self, position: int, end: int) -> list[Row]:
        """Return the records from a position to an offset."""
        with_aborted = self._judge.has_aborted and not self.committed
        source = self._judge.mount.history.source[self.number]
        return list(source.shown(position, end, with_aborted=with_aborted))

    def has_come_to(self, end: int) -> bool:
        """Whether it has read all records before an offset."""
        return self.position is not None and not self._wanted(self.position, end)

    def _records(self, found: Response) -> int:
        """Judge the records; returns the offset behind the last batch."""
        judge, position = self._judge, self.position
        assert position is not None
        at, end = 0, position
        while at < len(found.data):
            header = parse_header(found.data, at)
            if header.last_offset < position or header.leader_epoch:
                judge.says(f"{self}: a batch {header}")
            at, end = at + header.size_bytes, header.last_offset + 1
        try:
            records = decode_reference(found.data, aborted=found.fetched.aborted or ())
        except LogmirrorError as error:
            judge.says(f"{self}: {error}")
            return end
        rows = [Row(*record) for record in records if record.offset >= position]
        if rows != (wanted := self._wanted(position, end)):
            judge.says(f"{self}: {rows}, not {wanted}")
        judge.records += len(rows)
        return end

    def __repr__(self) -> str:
        level = "committed" if self.committed else "uncommitted"
        return f"{level} reader of {self.number} at {self.position}"


class Judge:
    """The readers of a mount, and what is wrong.

    Args:
        mount: The mount.

    Attributes:
        problems: What is wrong.
        records: How many records were compared.
        errors: How many responses were storage errors.
        looked: The same of lookups by timestamp.
        requests: How many requests there were, where that is counted.
    """

    def __init__(self, mount: Mount) -> None:
        self.mount = mount
        self.problems: list[str] = []
        self.records = self.errors = self.looked = self.requests = 0
        numbers = range(len(mount.history.source))
        self.numbers = numbers
        self.has_aborted = mount.history.form == "native"
        self._by_markers = self.has_aborted and not mount.history.outcomes
        self._strict, self._failed = set[int](), set[int]()
        self._known = dict.fromkeys(numbers, (0, 0))
        self._deleted = dict.fromkeys(numbers, 0)
        self._readers = [
            Reader(self, number, committed=committed)
            for number in numbers
            for committed in (False, True)
        ]

    def says(self, problem: str) -> None:
        """Note what is wrong."""
        mount = self.mount
        self.problems.append(f"{problem}; after {mount.view.at} changes, {mount.asked}")

    def failed(self, number: int, code: int, what: str) -> None:
        """Judge an error."""
        self.errors += 1
        if code != ErrorCode.KAFKA_STORAGE_ERROR or number in self._strict:
            self.says(f"{what}: {ErrorCode(code).name}")
        self._failed.add(number)

    def stable(self, number: int, end: int) -> int:
        """Return the last stable offset of a partition that ends at an offset."""
        return self.mount.history.source[number].stable(end) if self._by_markers else end

    def undecided(self, number: int, end: int) -> set[int]:
        """Return the records of transactions that are not decided before an offset."""
        source = self.mount.history.source[number]
        return source.undecided(end) if self._by_markers else set()

    def offsets(self, number: int) -> None:
        """Judge log start and high watermark."""
        log, extent = self.mount.log(number), self.mount.extents[number]
        if extent is not None:
            self._deleted[number] = max(self._deleted[number], extent.start)
        if log is None:
            return
        start, end = self._known[number]
        if log.log_start < start or log.high_watermark < end:
            self.says(f"{number}: {log.log_start} to {log.high_watermark}, after {start} to {end}")
        if extent is not None and log.log_start > self._deleted[number]:
            self.says(f"{number}: log start {log.log_start}, not {self._deleted[number]}")
        if extent is not None and log.high_watermark > extent.end:
            self.says(f"{number}: high watermark {log.high_watermark}, beyond {extent.end}")
        self._known[number] = log.log_start, log.high_watermark

    def start(self) -> None:
        """Start the broker, and judge what its listing shows."""
        before = self.mount.extents
        self.mount.start()
        self._listed(before)

    def poll(self) -> None:
        """Let the archive be listed again, and judge what that shows."""
        before = self.mount.extents
        self.mount.poll()
        self._listed(before)

    def _listed(self, before: tuple[Extent | None, ...]) -> None:
        for number in self.numbers:
            self.offsets(number)
            log, extent = self.mount.log(number), before[number]
            if self.mount.failed or extent is None or self.mount.extents[number] is None:
                continue
            if log is None:
                self.says(f"{number}: not mounted")
            elif log.failure is not None:
                if self.mount.moved <= 1:
                    self.says(f"{number}: offline: {log.failure}")
            elif log.high_watermark < extent.end:
                self.says(f"{number}: high watermark {log.high_watermark}, not {extent.end}")

    def read(self, max_bytes: int = 1 << 20) -> None:
        """Let all consumers continue."""
        for reader in self._readers:
            reader.read(max_bytes)

    def read_all(self, max_bytes: int = 1 << 20) -> None:
        """Let new consumers read from the log start on, and look up some timestamps."""
        for number in self.numbers:
            for committed in (True, False):
                Reader(self, number, committed=committed).read(max_bytes)
                self._look_up(number, committed=committed)

    def read_some(self, chance: random.Random) -> None:
        """Let a new consumer read from any offset on."""
        number = chance.choice(self.numbers)
        extent = self.mount.extents[number]
        log = self.mount.log(number)
        if log is None or extent is None:
            return
        position = (
            chance.randrange(extent.start, log.high_watermark + 1)
            if (extent.start <= log.high_watermark)
            else None
        )
        reader = Reader(self, number, committed=chance.random() < 0.5, position=position)
        reader.read(chance.choice(_SOME_BYTES))

    def _look_up(self, number: int, *, committed: bool) -> None:
        log = self.mount.log(number)
        if log is None:
            return
        times = self._times(number, log.log_start, log.high_watermark)
        wanted = sorted({ms for _, ms in times})
        for time_ms in (*wanted[:: max(1, len(wanted) // 3)], 2**60):
            code, offset = self.mount.offset_at(number, time_ms, committed=committed)
            if code:
                self.failed(number, code, f"a lookup in {number}")
                return
            first = next((at for at, ms in times if ms >= time_ms), _NOT_FOUND)
            if committed and first >= log.last_stable_offset:
                first = _NOT_FOUND
            if offset != first:
                self.says(f"{number}: {offset} is the first of {time_ms}, not {first}")
            self.looked += 1

    def _times(self, number: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return offsets and timestamps of what a partition holds, in their order."""
        source = self.mount.history.source[number]
        shown = source.shown(start, end, with_aborted=self.has_aborted)
        times = {row.offset: row.timestamp_ms for row in shown}
        if self.has_aborted:
            times |= {at: ms for at, ms in source.markers.items() if start <= at < end}
        return sorted(times.items())

    def quiet(self) -> None:
        """Nothing fails or changes any more: an error is over when the archive was listed again."""
        self.mount.chance, self.mount.plan = None, {}
        if None in self.mount.extents:
            return
        self._failed.clear()
        for _ in range(len(self.numbers) + 1):
            self.poll()
            self.read()
            self.read_all()
            if not self._failed - self._strict:
                break
            self._strict |= self._failed
        self.end()

    def end(self) -> None:
        """Judge that everything that is in the archive is served."""
        for number in self.numbers:
            log, extent = self.mount.log(number), self.mount.extents[number]
            assert log is not None
            assert extent is not None
            if log.log_start > extent.start or log.high_watermark != extent.end:
                self.says(f"{number}: {log.log_start} to {log.high_watermark}, not {extent}")
        for reader in self._readers:
            extent = self.mount.extents[reader.number]
            assert extent is not None
            end = self.stable(reader.number, extent.end) if reader.committed else extent.end
            if not reader.has_come_to(end):
                self.says(f"{reader} has not come to {end}")
