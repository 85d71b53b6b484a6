"""The latest record of each key, in bounded memory: the rows of a snapshot of a compacted topic.

Records are added in the order of the log, in any number. They are collected in runs of a fixed
size; each run is sorted by key, reduced to the latest record of each key, and written to an
unlinked temporary file. Finally the runs and the rows of the previous snapshot are merged as
streams:

1. Every stream is sorted by key, with each key once. Keys are compared as bytes, unsigned.
2. Of several records of a key, the one with the highest offset is kept.
3. A tombstone (a null value) is kept in a run, because it removes the key from the previous
   snapshot. It is not written to a snapshot.

All work is on Arrow arrays, in chunks of rows; there is no Python step per row.
"""

from __future__ import annotations

import tempfile
from typing import IO, TYPE_CHECKING, Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.errors import CorruptionError, UsageError
from logmirror.wire.columns import NO_ROWS, SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

RUN_BYTES: Final = 64 << 20
"""Records are collected up to this size before they are sorted and written to a file."""

RUNS_MAX: Final = 32
"""Maximum number of runs. When it is reached, the runs are merged into one. This costs one more
pass over their records and limits the memory of a merge to a chunk for each run."""

CHUNK_BYTES: Final = 1 << 20
"""A run is read back in chunks of about this size."""

_SPILL: Final = pa.ipc.IpcWriteOptions(compression="lz4")


class LatestByKey:
    """Collects records and returns the latest of each key. Use as a context manager.

    Args:
        folder: Folder of the temporary files; None: the machine's temporary folder.
        run_bytes: Size of the records collected in memory.
    """

    def __init__(self, folder: Path | None = None, *, run_bytes: int = RUN_BYTES) -> None:
        self._folder, self._run_bytes = folder, run_bytes
        self._waiting: list[Any] = []
        self._waiting_bytes = 0
        self._runs: list[IO[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting = []
        for run in self._runs:
            run.close()
        self._runs = []

    def add(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Add a record batch of `wire.columns.SCHEMA`; its memory may be reused.

        Raises:
            UsageError: A record has no key. Facts: `offset`.
            OSError: There is no space for the temporary files.
        """
        keys = batch.column("key")
        if keys.null_count:
            row = pc.index(keys.is_null(), True).as_py()
            raise UsageError(
                "a record without a key cannot be in a snapshot of keys",
                hint="`compaction: log` is for topics whose records all have keys; without it, "
                "the mirror keeps every record",
                offset=batch.column("offset")[row].as_py(),
            )
        copy = pa.ipc.read_record_batch(batch.serialize(), SCHEMA)
        self._waiting.append(copy)
        self._waiting_bytes += copy.nbytes
        if self._waiting_bytes >= self._run_bytes:
            self._put_aside([iter([self._collected()])])
            if len(self._runs) == RUNS_MAX:
                runs, self._runs = self._runs, []
                self._put_aside([_read(run) for run in runs])
                for run in runs:
                    run.close()

    def merged(self, before: Iterator[Any], *, tombstones: bool = False) -> Iterator[Any]:
        """Yield the rows of the new snapshot as record batches, sorted by key. Call once.

        Args:
            before: The rows of the previous snapshot, sorted by key.
            tombstones: Yield tombstones too.
        """
        streams = [before, *(_read(run) for run in self._runs)]
        if self._waiting:
            streams.append(iter([self._collected()]))
        for batch in merge(streams):
            values = batch.column("value")
            is_mixed = values.null_count and not tombstones
            kept = batch.filter(values.is_valid()) if is_mixed else batch
            if len(kept):
                yield kept

    def _collected(self) -> Any:  # noqa: ANN401  # pyarrow has no types
        batch = latest(pa.concat_batches(self._waiting))
        self._waiting, self._waiting_bytes = [], 0
        return batch

    def _put_aside(self, streams: Sequence[Iterator[Any]]) -> None:
        run = tempfile.TemporaryFile(dir=self._folder, prefix="logmirror-run-")  # noqa: SIM115  # closed by `__exit__`
        self._runs.append(run)
        with pa.ipc.new_stream(run, SCHEMA, options=_SPILL) as out:
            for batch in merge(streams):
                rows = max(len(batch) * CHUNK_BYTES // max(batch.nbytes, 1), 1)
                for start in range(0, len(batch), rows):
                    out.write_batch(batch.slice(start, rows))


def latest(batch: Any) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Return the record with the highest offset of each key, sorted by key."""
    order = pc.sort_indices(
        batch.select(["key", "offset"]), [("key", "ascending"), ("offset", "ascending")]
    )
    keys = batch.column("key").take(order)
    is_last = np.ones(len(batch), np.bool_)
    is_last[:-1] = pc.not_equal(keys.slice(0, max(len(keys) - 1, 0)), keys.slice(1)).to_numpy(
        zero_copy_only=False
    )
    return batch.take(pa.array(order.to_numpy()[is_last]))


def merge(streams: Iterable[Iterator[Any]]) -> Iterator[Any]:
    """Merge streams of batches, each sorted by key without duplicates, into one such stream."""
    heads = [head for head in map(_Head, streams) if head.fill()]
    while len(heads) > 1:
        # All rows with keys up to the lowest of the last keys are in these chunks.
        bound = min(head.last_key for head in heads)
        parts = [part for head in heads if len(part := head.take(bound))]
        yield latest(pa.concat_batches(parts)) if len(parts) > 1 else parts[0]
        heads = [head for head in heads if head.fill()]
    for head in heads:
        yield from head.rest()


def align(left: Iterator[Any], right: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
    """Split two streams, each sorted by key without duplicates, into pairs of the same key range.

    Yields:
        Pairs of record batches, one of which may be empty. A key of both streams is in both
        batches of one pair.
    """
    heads = (_Head(left), _Head(right))
    while any(filled := [head.fill() for head in heads]):
        both = list(zip(heads, filled, strict=True))
        bound = min(head.last_key for head, has_rows in both if has_rows)
        one, other = (head.take(bound) if has_rows else NO_ROWS for head, has_rows in both)
        yield one, other


def check_sorted(batch: Any, after: bytes | None, *, name: str) -> bytes | None:  # noqa: ANN401  # pyarrow has no types
    """Check that keys ascend without duplicates and that no value is null.

    Args:
        batch: The next rows of a snapshot.
        after: The last key before them; None: these are the first rows.
        name: The object's name, for errors.

    Returns:
        The last key; pass it as `after` with the next rows.

    Raises:
        CorruptionError: A row violates this. Facts: `name`, `offset` of the row.
    """
    keys, values = batch.column("key"), batch.column("value")
    if not len(keys):
        return after
    is_bad = np.zeros(len(keys), np.bool_)
    if keys.null_count or values.null_count:
        is_bad |= pc.or_(keys.is_null(), values.is_null()).to_numpy(zero_copy_only=False)
    else:
        steps = pc.less_equal(keys.slice(1), keys.slice(0, len(keys) - 1))
        is_bad[1:] = steps.to_numpy(zero_copy_only=False)
        is_bad[0] = after is not None and keys[0].as_py() <= after
    if is_bad.any():
        raise CorruptionError(
            "the rows of the snapshot are not one for each key, sorted by key",
            name=name,
            offset=batch.column("offset")[int(np.argmax(is_bad))].as_py(),
        )
    last: bytes = keys[-1].as_py()
    return last


class _Head:
    """A stream and its current chunk."""

    def __init__(self, stream: Iterator[Any]) -> None:
        self._stream = stream
        self._rows: Any = None
        self.last_key = b""

    def fill(self) -> bool:
        """Make sure that the chunk has at least one row; False at the end of the stream."""
        while self._rows is None or not len(self._rows):
            self._rows = next(self._stream, None)
            if self._rows is None:
                return False
        self.last_key = self._rows.column("key")[-1].as_py()
        return True

    def take(self, bound: bytes) -> Any:  # noqa: ANN401  # pyarrow has no types
        """Remove and return the rows whose keys are at most `bound`."""
        if self.last_key <= bound:
            taken, self._rows = self._rows, None
            return taken
        keys = self._rows.column("key")
        low, high = 0, len(keys) - 1  # the last key is above the bound
        while low < high:
            middle = (low + high) // 2
            if keys[middle].as_py() <= bound:
                low = middle + 1
            else:
                high = middle
        taken, self._rows = self._rows.slice(0, low), self._rows.slice(low)
        return taken

    def rest(self) -> Iterator[Any]:
        """Yield the chunk and the rest of the stream."""
        yield self._rows
        yield from self._stream


def _read(run: IO[bytes]) -> Iterator[Any]:
    run.seek(0)
    yield from pa.ipc.open_stream(run)
