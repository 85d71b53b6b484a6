"""The judge of `placed_logs`: compares a log with what is known of its partition.

- Every acknowledged record is there at its offset, unless it was deleted, or a pass of the cleaner
  has removed it and had to: a newer one has its key, or its transaction was aborted.
- Nothing is there that was never appended, or that a pass has removed for good.
- Every offset from the log start to the log end is in a batch.
- Last stable offset, aborted transactions and producers are what the records and markers say.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kit.runs.placed_known import (
    BATCH,
    COORDINATOR_EPOCH,
    PLAIN,
    TRANSACTIONAL,
    Entry,
    Found,
    Known,
    Transactions,
)
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.broker.log.partition_log import PartitionLog


class Judge:
    """What is wrong with a log.

    Args:
        known: What is known of it.
        log: The log.
        where: For the messages.
        found: What its files hold; None: only the state in memory is judged.
    """

    def __init__(
        self, known: Known, log: PartitionLog, where: str, found: Found | None = None
    ) -> None:
        self.problems: list[str] = []
        self._known, self._log, self._where = known, log, where
        self._found = found or Found({}, [])

    def _says(self, problem: str) -> None:
        self.problems.append(f"{self._where}: {problem}")

    def judge(self, *, is_new: bool) -> list[str]:
        """Judge records and state; what a start holds must stay from then on."""
        known, log, entries = self._known, self._log, self._found.entries
        self._judge_offsets()
        there = {offset: entry for offset, entry in entries.items() if offset >= log.log_start}
        for offset, entry in there.items():
            if entry not in known.appended.get(offset, ()):
                self._says(f"{offset} was never appended: {entry!r}")
        if back := {offset: where for offset, where in known.removed.items() if offset in there}:
            self._says(f"compacted records came back: {back}")
        self._judge_acked()
        if is_new and not self.problems:
            history = known.history(log.log_end)
            known.deleted = max(known.deleted, log.log_start)
            known.acked = history | there
            known.appended = {offset: {entry} for offset, entry in known.acked.items()}
            self.note_removed()
        self.judge_state()
        if is_new:
            for producer in (PLAIN, TRANSACTIONAL):
                state = log.producers.get(producer)
                known.sequences[producer] = state.last_sequence + 1 if state is not None else 0
        return self.problems

    def note_removed(self) -> None:
        """What is missing now must not come back."""
        log = self._log
        wanted = {offset for offset in self._known.acked if log.log_start <= offset < log.log_end}
        self._known.removed |= dict.fromkeys(wanted - self._found.entries.keys(), self._where)

    def _judge_offsets(self) -> None:
        known, found = self._known, self._found
        start, end = self._log.log_start, self._log.log_end
        if not found.covered and all(offset < known.deleted for offset in known.acked):
            # The first file of a log is lost, and nothing was acknowledged: it begins behind that.
            known.deleted = start
            known.appended = {at: some for at, some in known.appended.items() if at >= start}
        elif not known.deleted <= start <= max(known.deleted, known.deleting):
            self._says(f"log start {start}, not {known.deleted}")
        if [one for one in found.covered if one >= start] != list(range(start, end)):
            self._says(f"{found.covered}, not {start} to {end}")

    def _judge_acked(self) -> None:
        known, log, entries = self._known, self._log, self._found.entries
        history = known.history(log.log_end)
        hidden = Transactions(history, log.log_end).hidden
        newest = _newest(entries, hidden)
        for offset, entry in known.acked.items():
            now = entries.get(offset)
            if offset < log.log_start or now == entry:
                continue
            is_removable = offset < known.compacting and not entry.is_marker
            is_old = entry.key is not None and newest.get(entry.key, -1) > offset
            if now is not None or not is_removable or not (is_old or offset in hidden):
                self._says(f"{offset} is {now!r}, not {entry!r}")

    def judge_compacted(self, upto: int) -> list[str]:
        """Judge what a pass that has ended has left before an offset: of each key, the newest."""
        known, log, entries = self._known, self._log, self._found.entries
        history = {
            offset: entry
            for offset, entry in known.history(upto).items()
            if offset >= log.log_start and not entry.is_marker
        }
        hidden = Transactions(known.history(log.log_end), log.log_end).hidden
        newest = _newest(history, hidden)
        wanted = {
            offset: entry
            for offset, entry in history.items()
            if offset not in hidden and (entry.key is None or newest[entry.key] == offset)
        }
        left = {
            offset: entry
            for offset, entry in entries.items()
            if log.log_start <= offset < upto and not entry.is_marker
        }
        if left != wanted:
            self._says(f"compacted to {sorted(left)}, not to {sorted(wanted)}, before {upto}")
        known.removed |= dict.fromkeys(history.keys() - left.keys(), f"{self._where}, by a pass")
        return self.problems

    def judge_state(self) -> list[str]:
        """Judge transactions and producers."""
        log = self._log
        history = self._known.history(log.log_end)
        mine = Transactions(history, log.high_watermark)
        first = min(mine.undecided, default=log.high_watermark)
        stable = min(log.high_watermark, max(first, log.log_start))
        if log.last_stable_offset != stable:
            self._says(f"last stable offset {log.last_stable_offset}, not {stable}")
        listed = log.producers.transactions.aborted_between(log.log_start, log.log_end)
        aborted = [(one.producer_id, one.first_offset, one.last_offset) for one in listed]
        wanted = [one for one in mine.aborted if one[2] >= log.log_start]
        if aborted != wanted:
            self._says(f"aborted transactions {aborted}, not {wanted}")
        ongoing = dict(log.producers.transactions.ongoing())
        if ongoing != mine.open:
            self._says(f"transactions in progress {ongoing}, not {mine.open}")
        for producer in (PLAIN, TRANSACTIONAL):
            self._judge_producer(producer, history)
        return self.problems

    def judge_consumed(self) -> list[str]:
        """Judge what a consumer of committed records is shown: all that the files hold of them."""
        log = self._log
        hidden = Transactions(self._known.history(log.log_end), log.high_watermark).hidden
        shown = {
            offset: entry.value
            for offset, entry in self._found.entries.items()
            if log.log_start <= offset < log.last_stable_offset
            and not (entry.is_marker or offset in hidden)
        }
        if (consumed := _consumed(log)) != shown:
            self._says(f"consumed are {sorted(consumed)}, not {sorted(shown)}")
        return self.problems

    def _judge_producer(self, producer: int, history: Mapping[int, Entry]) -> None:
        """A producer's last batches are those of the log, and its coordinator that of a marker."""
        mine = [
            (offset, one) for offset, one in sorted(history.items()) if one.producer == producer
        ]
        marked = any(entry.is_marker for _, entry in mine)
        batches = [
            (entry.sequence, offset)
            for offset, entry in mine
            if not entry.is_marker and entry.sequence % BATCH == 0
        ]
        wanted = (COORDINATOR_EPOCH if marked else -1, batches[-5:]) if mine else None
        state = self._log.producers.get(producer)
        found = None
        if state is not None:
            kept = [(one.first_sequence, one.base_offset) for one in state.batches]
            found = state.coordinator_epoch, kept
        if found != wanted:
            self._says(f"producer {producer}: {found}, not {wanted}")


def _consumed(log: PartitionLog) -> dict[int, bytes]:
    """Read all committed records with their list of aborted transactions, as a Fetch does."""
    found, offset = dict[int, bytes](), log.log_start
    while offset < log.last_stable_offset:
        try:
            ranges, listed = log.read_committed(offset, 400, at_least_one=True)
        except ColdSegmentError as cold:
            log._cache.loaded(cold.segment)  # noqa: SLF001  # what the fetch handler does
            continue
        data = b"".join(os.pread(one.file.fd, one.size_bytes, one.position) for one in ranges)
        aborted = [(one.producer_id, one.first_offset) for one in listed]
        shown = decode_reference(data, aborted=aborted)
        found |= {one.offset: one.value or b"" for one in shown if one.offset >= log.log_start}
        offset = Found.of([data]).covered[-1] + 1
    return found


def _newest(entries: Mapping[int, Entry], hidden: set[int]) -> dict[bytes, int]:
    """Return the offset of the newest record of each key that was not aborted."""
    found = dict[bytes, int]()
    for offset, entry in sorted(entries.items()):
        if entry.key is not None and offset not in hidden:
            found[entry.key] = offset
    return found
