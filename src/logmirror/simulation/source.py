"""The application at the source: it produces records, and keeps the expected result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.model import TimestampType
from logmirror.simulation.topics import Topics
from logmirror.testing.checker import Row, Truth
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.clock import Chooser
    from logmirror.simulation.log import Log
    from logmirror.simulation.schedule import Schedule

TOPIC: Final = "orders"
NUMBER: Final = b"n"
"""Header with the number of a record, to identify it in a replica with new offsets."""

_KEYS: Final = (None, b"", b"a", b"b", b"c")
_HEADERS: Final = (
    (),
    ((b"h", None),),
    ((b"h", b""), (b"h", b"1")),
    ((b"b", b"2"), (b"a", b"\xff")),
)
_TRANSACTION: Final = 4000
"""Producer ID of the application's transactions."""


class Application:
    """Writes to one partition, and keeps what a consumer must see.

    Args:
        schedule: The scheduler.
        chooser: Draws the records and operations.
        compacts: Whether the topic's `cleanup.policy` is `compact`.
        stamps: Whether some batches have LogAppendTime.
        numbers: Whether each record has a header with its number.
        keyed: Whether each record has a key, as compacted topics require.
    """

    def __init__(  # noqa: PLR0913  # the settings of one run
        self,
        schedule: Schedule,
        chooser: Chooser,
        *,
        compacts: bool,
        stamps: bool,
        numbers: bool = False,
        keyed: bool = False,
    ) -> None:
        self._schedule, self._chooser = schedule, chooser
        self.compacts, self._stamps, self._numbers = compacts, stamps, numbers
        self._keys = _KEYS[1:] if keyed else _KEYS
        self.topics = Topics(schedule, chooser, 1)
        self.topics.create(TOPIC)
        self.offsets: dict[int, int] = {}
        """Source offset of each record, by number."""

        self._rows: dict[int, Row] = {}
        self._aborted: dict[int, Row] = {}
        self._gone: set[int] = set()
        self._generations: list[tuple[dict[int, Row], Truth]] = []
        self._regrown_at: int | None = None
        """Where the second history begins; None: there is none."""

        self._number = 0
        self._in_transaction = False

    @property
    def log(self) -> Log:
        """The log of the current topic."""
        return self.topics.logs[TOPIC]

    @property
    def topic_id(self) -> bytes:
        """The ID of the current topic."""
        return self.topics.ids[TOPIC]

    def act(self) -> None:
        """Write a batch, inside or outside a transaction, or end the transaction."""
        draw = self._chooser.random()
        if self._in_transaction and draw < 0.5:  # noqa: PLR2004  # probability
            self._end_transaction()
        elif draw < 0.2:  # noqa: PLR2004  # probability
            self._in_transaction = True
            self._write(_TRANSACTION)
        else:
            self._write(-1)

    def finish(self) -> None:
        """End the open transaction, and write a last batch."""
        if self._in_transaction:
            self._end_transaction()
        self._write(-1)

    def _write(self, producer_id: int) -> None:
        chooser, log = self._chooser, self.log
        kind = TimestampType.CREATE_TIME
        if self._stamps and producer_id < 0 and chooser.random() < 0.2:  # noqa: PLR2004  # probability
            kind = TimestampType.LOG_APPEND_TIME
        now_ms = self._schedule.now_ms()
        records = []
        for n in range(chooser.randint(1, 5)):
            self._number += 1
            self.offsets[self._number] = log.end + n
            value = chooser.choice((b"%d" % self._number, b"", None, b"x" * chooser.randrange(90)))
            headers = chooser.choice(_HEADERS)
            if self._numbers:
                headers = (*headers, (NUMBER, b"%d" % self._number))
            records.append(
                Record(
                    log.end + n,
                    now_ms if kind is TimestampType.LOG_APPEND_TIME else now_ms - n % 2,
                    kind,
                    chooser.choice(self._keys),
                    None if value is None else b"%d:%b" % (self._number, value),
                    headers,
                )
            )
        log.write(records, producer_id=producer_id, timestamp_type=kind)
        self._rows |= {record.offset: Row(*record) for record in records}

    def _end_transaction(self) -> None:
        self._in_transaction = False
        is_aborted = self._chooser.random() < 0.5  # noqa: PLR2004  # probability
        marker = MarkerType.ABORT if is_aborted else MarkerType.COMMIT
        now_ms = self._schedule.now_ms()
        first = self.log.end_transaction(_TRANSACTION, marker, now_ms)
        if is_aborted:
            for entry in self.log.entries:
                if entry.producer_id == _TRANSACTION and entry.base >= first:
                    for record in entry.records:
                        self._aborted[record.offset] = self._rows.pop(record.offset)

    # -- changes to the log --------------------------------------------------------------------

    def clean(self) -> None:
        """Run the log cleaner, if the topic is compacted."""
        if self.compacts:
            self._gone |= self.log.compact(self.log.last_stable_offset - 3)

    def delete_before(self, offset: int) -> None:
        """Delete records below an offset that was copied; not in a recreated topic."""
        if self._generations:
            return
        self.log.delete_before(min(offset, self.log.last_stable_offset))
        self._gone |= {at for at in self._rows if at < self.log.start}

    def change_leader(self) -> None:
        """Increase the leader epoch; the log stays."""
        self.log.elect()

    def recreate(self) -> None:
        """Delete and recreate the topic. Only the first call has an effect."""
        if self._generations:
            return
        self._generations.append((dict(self._rows), self.truth()))
        self.topics.replace(TOPIC)
        self._in_transaction = False
        self._rows, self._aborted, self._gone = {}, {}, set()

    def regrow(self, position: int, *, has_epochs: bool) -> None:
        """Lose the last records below a position, and write others until the log is longer.

        Only the first call has an effect, and only on a topic that was not recreated.

        Args:
            position: The end of the replica.
            has_epochs: Whether the new leader has a new leader epoch.
        """
        quiet = self.log.quiet_offsets()
        lost = [offset for offset in quiet if offset < position] or quiet[:1]
        if self._generations or not lost:
            return
        self._generations.append((dict(self._rows), self.truth()))
        end, cut = self.log.end, lost[-1]
        self._regrown_at, self._in_transaction = cut, False
        self.log.truncate(cut)
        if has_epochs:
            self.log.elect()
        for rows in (self._rows, self._aborted):
            for offset in [offset for offset in rows if offset >= cut]:
                del rows[offset]
        self._gone = {offset for offset in self._gone if offset < cut}
        while self.log.end <= end:
            self.act()

    @property
    def has_two_histories(self) -> bool:
        """Whether the topic was recreated, or has lost records and received others."""
        return bool(self._generations)

    def is_of_lost_history(self, copied: Sequence[Row]) -> bool:
        """Whether a replica has records of a deleted topic, or records that the source has lost."""
        if not self._generations:
            return False
        written, cut = self._generations[0][0], self._regrown_at
        shown = copied[:1] if cut is None else [row for row in copied if row.offset >= cut]
        return any(row == written.get(row.offset) for row in shown)

    def truth(self, copied: Sequence[Row] = ()) -> Truth:
        """Return what the replica must have; with two histories, what it can have at most.

        Args:
            copied: The records of the replica. They decide which of two histories the replica is
                compared with.
        """
        old = self._generations[0] if self._generations else None
        if old and self.is_of_lost_history(copied):
            written, first = old
            return Truth(
                rows=first.rows,
                aborted=first.aborted,
                may_lack=written.keys(),  # the mirror may have stopped anywhere in it
                later=dict(self._rows),
            )
        end = self.log.last_stable_offset
        rows = [self._rows[at] for at in sorted(self._rows) if at < end]
        return Truth(
            rows=rows,
            end=None if old else end,
            aborted=dict(self._aborted),
            may_lack={row.offset for row in rows} if old else frozenset(self._gone),
        )
