"""What readers of a bucket's owners see during a run, and the rules for it.

- W1 A record is readable on its owner when its producer gets a response.
- W2 High watermark, durable end and log start of an owner never go back.
- W3 Durable end and log start never go back from one owner to the next one either, and a durable
  end is never beyond the records in the bucket.
- W4 What was read at an offset is the same ever after on that owner, and on all owners if it was
  durable, as its owner said; unless a compaction has removed it.
- W5 An owner that was not replaced serves every offset from its log start to its high watermark,
  whatever fails.
- W6 The log start is at most what was requested.
- W7 If records are flushed before they are acknowledged, none beyond the durable end is readable.

Regressions and changes are found by the checker (`logmirror.testing.checker`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.testing.checker import History, Row, Truth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class _Partition:
    """What was seen of one partition."""

    def __init__(self) -> None:
        self.durables, self.starts, self.watermarks = History(), History(), History()
        self.values: dict[int, History] = {}
        """What each owner has served."""

        self.requested = 0
        """The highest log start that was requested."""


class Watch:
    """Compares what readers see.

    Args:
        stored_end: Returns the end of a partition's records in the bucket; None: it is not known.
        may_differ: Whether a compaction has begun to remove a record.
    """

    def __init__(
        self,
        stored_end: Callable[[int], int | None] = lambda _: None,
        may_differ: Callable[[int, int], bool] = lambda *_: False,
    ) -> None:
        self._stored_end, self._may_differ = stored_end, may_differ
        self._partitions: dict[int, _Partition] = {}
        self.problems: list[str] = []
        self.now = self.reads = 0

    def copy_to(self, other: Watch) -> None:
        """Let another watch begin with the requested log starts of this one."""
        for number, known in self._partitions.items():
            other._of(number).requested = known.requested

    def _of(self, number: int) -> _Partition:
        return self._partitions.setdefault(number, _Partition())

    def tick(self) -> int:
        """Begin a turn; returns its number."""
        self.now += 1
        return self.now

    def requested(self, number: int, start: int) -> None:
        """Note a log start that is requested."""
        known = self._of(number)
        known.requested = max(known.requested, start)

    def acked(self, owner: int, number: int, offset: int, value: bytes, found: object) -> None:
        """Note a response to a producer, and what was read just then (W1)."""
        if found != value:
            where = f"partition {number}, owner {owner}"
            self.problems.append(f"{where}: {offset} was acknowledged, and is read as {found!r}")

    def reported(  # noqa: PLR0913  # what an owner says
        self,
        owner: int,
        number: int,
        *,
        began: int,
        start: int,
        watermark: int,
        durable: int,
        is_flushed: bool = True,
    ) -> None:
        """Note what an owner says (W2, W3, W6, W7).

        Args:
            owner: The owner.
            number: The partition.
            began: The turn at which the owner began to take the bucket over.
            start: Its log start.
            watermark: Its high watermark.
            durable: Its durable end.
            is_flushed: Whether records are flushed before they are acknowledged.
        """
        known, run, stored = self._of(number), f"owner {owner}", self._stored_end(number)
        known.watermarks.reported(run, watermark, at_ms=self.now, began_ms=-1)
        known.durables.reported(run, durable, at_ms=self.now, began_ms=began, durable=stored)
        known.starts.reported(run, start, at_ms=self.now, began_ms=began)
        where = f"partition {number}, {run}"
        if start > known.requested:
            self.problems.append(f"{where}: log start {start}, requested was {known.requested}")
        if is_flushed and watermark > durable:
            self.problems.append(f"{where}: readable up to {watermark}, durable up to {durable}")

    def read(self, owner: int, number: int, records: Mapping[int, bytes], *, durable: int) -> None:
        """Note what a reader got from an owner (W4).

        Args:
            owner: The owner.
            number: The partition.
            records: Values by offset.
            durable: The end of what is durable, as the owner says.
        """
        known = self._of(number)
        self.reads += 1
        rows = [
            Row(offset, 0, 0, None, value)
            for offset, value in records.items()
            if not self._may_differ(number, offset)
        ]
        known.values.setdefault(owner, History()).read(rows)
        known.values.setdefault(-1, History()).read([one for one in rows if one.offset < durable])

    def served(
        self, owner: int, number: int, bounds: range, records: Mapping[int, bytes] | None, why: str
    ) -> None:
        """Note a read of everything of an owner that was not replaced (W5).

        Args:
            owner: The owner.
            number: The partition.
            bounds: From its log start to its high watermark.
            records: What was read; None: an error.
            why: The error.
        """
        found = None if records is None else sorted(records)
        if found != list(bounds):
            self.problems.append(
                f"partition {number}, owner {owner}: {why or found}, not {list(bounds)}"
            )

    def judge(
        self, number: int, truth: Mapping[int, bytes], copy: Mapping[int, bytes], start: int
    ) -> list[str]:
        """Return everything that is wrong with a partition.

        Args:
            number: The partition.
            truth: What must be there at the end.
            copy: What is there, in the order in which it was read.
            start: The log start.
        """
        known = self._of(number)
        empty = Truth(rows=())
        found = [
            *known.durables.judge(empty, ()),
            *known.starts.judge(empty, ()),
            *known.watermarks.judge(empty, ()),
        ]
        for history in known.values.values():
            found += history.judge(empty, ())
        rows = [Row(at, 0, 0, None, truth[at]) for at in sorted(truth) if at >= start]
        found += History(start).judge(
            Truth(rows=rows, start=start), [Row(at, 0, 0, None, one) for at, one in copy.items()]
        )
        return [f"partition {number}: {one.code}: {one.example}" for one in found]
