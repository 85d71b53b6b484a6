"""Archives as Spark DataFrames: a PySpark Data Source for users' own queries.

    from logmirror.dataframes import LogmirrorArchive

    spark.dataSource.register(LogmirrorArchive)
    spark.read.format("logmirror").option("root", "/archive").option("destination", "orders").load()

Columns and types are those of Spark's Kafka source. The planner decides once per query which
objects to read; each task then reads some adjacent objects and returns Arrow batches. Described in
`docs/dataframes.md`. Besides `engine`, this is the only package that imports pyspark. It is a
composition root: it opens stores.

Spark imports this module in processes that only plan, so modules that read are imported by readers.
"""

from __future__ import annotations

import contextlib
import functools
import os
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadMaxBytes,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from logmirror.dataframes.options import Request
from logmirror.errors import LogmirrorError, PositionError, UsageError
from logmirror.stores.opening import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pyspark.sql.datasource import Filter
    from pyspark.sql.streaming.datasource import ReadLimit

    from logmirror.archive.piece_rows import LastStableOffset
    from logmirror.archive.pieces import PartitionObjects, Piece
    from logmirror.locations import StoreLocation
    from logmirror.stores.base import BlobStore

SCHEMA: Final = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("timestampType", IntegerType()),
        StructField(
            "headers",
            ArrayType(
                StructType([StructField("key", StringType()), StructField("value", BinaryType())])
            ),
        ),
    ]
)
"""The columns of Spark's Kafka source with `includeHeaders`."""

_PIECES_MAX: Final = 10_000
"""Approximate limit on the tasks of one query: a larger archive is read in larger pieces."""


class LogmirrorArchive(DataSource):
    """The data source `logmirror`: reads archives of every format from folders and S3.

        spark.dataSource.register(LogmirrorArchive)
        spark.read.format("logmirror").option("root", "/archive").load()

    Works with `spark.read` and `spark.readStream`. Registration is needed once per session.

    Columns, as of Spark's Kafka source with `includeHeaders`:

    - `key`, `value`: binary; null and empty are distinct
    - `topic`: string
    - `partition`: int
    - `offset`: bigint
    - `timestamp`: timestamp, milliseconds
    - `timestampType`: int; 0 create time, 1 log-append time
    - `headers`: array of (`key` string, `value` binary); empty, never null

    `.schema(...)` may select some of these columns.

    Options; case, dashes and underscores in their names are ignored:

    - `root` (or `load(path)`): absolute path, the same on all executors, or `s3://bucket/prefix`.
      Required.
    - `destination` (or `name`): the folder below `root`. Default: the only one.
    - `partitions`: `all` (default), or numbers and ranges such as `0,2-3`.
    - `startingOffset`: first offset to read, of every partition. Default: 0.
    - `endingOffset`: first offset not to read; not for streams. Default: the end.
    - `topic`: topic of native objects if no claim is kept. Default: from claims.
    - `encoding`: `base64` (default) or `utf8`, of keys and values in NDJSON.
    - `isolationLevel`: `read_committed` (default) or `read_uncommitted`, for native objects.
    - `verify`: `true` (default) or `false`; compare with the digest in claim or footer.
    - `maxPartitionBytes`: approximate size in bytes of the objects per task. Default: 128 MiB.
    - `maxBytesPerTrigger`: streams: approximate size in bytes of the objects per batch. Default: no
      limit.
    - S3: `region`, `endpoint`, `pathStyle`, `caFile`, `checksums`, `accessKeyId`,
      `secretAccessKey`, `sessionToken`, `profile`, `roleArn`, `stsEndpoint`. Defaults as for the
      AWS tools.

    Errors, as exceptions of `logmirror.errors` inside Spark's own exceptions:

    - `UsageError`: an option is unknown, missing or invalid; the destination or a partition does
      not exist; a timestamp does not fit Spark's type; a newer version wrote an object; access is
      denied.
    - `CorruptionError`: an object is damaged, or the chain has a gap or an overlap. Rows of the
      failed task are not valid.
    - `PositionError`: streams: the archive ends before the position in the checkpoint.
    - `UnavailableError`: the store did not respond, or a snapshot was pruned after planning.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "logmirror"

    def schema(self) -> StructType:
        """Return all columns; `.schema(...)` selects some of them."""
        return SCHEMA

    def reader(self, schema: StructType) -> _Reader:
        """Return the reader for `spark.read`."""
        with _with_hint():
            return _Reader(Request.of(self.options), schema)

    def streamReader(self, schema: StructType) -> _StreamReader:  # noqa: N802  # Spark's name
        """Return the reader for `spark.readStream`."""
        with _with_hint():
            return _StreamReader(Request.of(self.options), schema)


class _Columns:
    """Converts record batches to the requested columns, in Spark's types."""

    def __init__(self, schema: StructType) -> None:
        known = {field.name: field.dataType for field in SCHEMA}
        for field in schema:
            if known.get(field.name) != field.dataType:
                raise UsageError(
                    "not a column of an archive",
                    hint="`.schema(...)` can omit columns; it cannot change or add any",
                    column=f"{field.name} {field.dataType.simpleString()}",
                    known=SCHEMA.simpleString(),
                )
        self._schema = schema

    def convert(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches of `wire.columns.SCHEMA` with the requested columns, in Spark's types."""
        import pyarrow as pa  # noqa: PLC0415  # planning needs none
        from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415  # as above

        wanted = to_arrow_schema(self._schema, timezone="UTC")
        for batch in batches:
            try:
                columns = [batch.column(field.name).cast(field.type) for field in wanted]
            except pa.ArrowInvalid as error:
                raise UsageError(
                    "a timestamp does not fit Spark's type, which holds microseconds",
                    hint="omit the column: `.schema('key binary, value binary, ...')`",
                    partition=batch.column("partition")[0].as_py(),
                    first=batch.column("offset")[0].as_py(),
                    reason=str(error)[:200],
                ) from error
            yield pa.RecordBatch.from_arrays(columns, schema=wanted)


class _Prune:
    """`pushFilters` of a reader: uses filters on partitions and offsets to skip objects.

    Spark rejects a reader that overrides `pushFilters` unless
    `spark.sql.python.filterPushdown.enabled` is set, because filters could be lost. Here Spark
    applies all filters itself; objects without matching rows are only skipped. So this callable
    looks like the inherited method, and a session without the setting accepts the reader.
    """

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        for one in filters:
            self._reader.narrow(one)
        return filters


class _Reader(DataSourceReader):
    """A query's reader."""

    def __init__(self, request: Request, schema: StructType) -> None:
        self._request = request
        self._columns = _Columns(schema)
        self._only: frozenset[int] | None = None
        self._first, self._end = request.first, request.end
        self.pushFilters = _Prune(self)  # type: ignore[method-assign]  # see there

    def narrow(self, one: Filter) -> None:
        """Restrict partitions and offsets by a filter, if it applies to them."""
        column, *inner = getattr(one, "attribute", ("",))
        value: Any = getattr(one, "value", None)
        values: tuple[Any, ...] = value if isinstance(one, In) else (value,)
        if inner or not values or not all(type(found) is int for found in values):
            return
        if column == "partition" and isinstance(one, (EqualTo, In)):
            found = frozenset(values)
            self._only = found if self._only is None else self._only & found
        elif column == "offset":
            first, end = _offsets(one, values)
            self._first = max(self._first, first)
            if end is not None:
                self._end = end if self._end is None else min(self._end, end)

    def partitions(self) -> list[InputPartition]:
        """List the archive and divide it into pieces."""
        with _with_hint():
            return [InputPartition(piece) for piece in self._pieces()]

    def _pieces(self) -> Iterator[Piece]:
        from logmirror.archive.pieces import cut  # noqa: PLC0415  # see the module

        request = self._request
        view = _View(request)
        held = [
            view.list_partition(n) for n in view.partitions if self._only is None or n in self._only
        ]
        is_limited = request.first or request.end is not None
        if is_limited and any(one.is_snapshot for one in held):
            raise UsageError(
                "a snapshot holds the latest record of each key, not a range of offsets",
                hint="omit `startingOffset` and `endingOffset`; a filter on the column works",
                destination=view.destination,
            )
        total = sum(sum(one.sizes_bytes) for one in held)
        piece_bytes = max(request.piece_bytes, total // _PIECES_MAX)
        for one in held:
            yield from cut(
                one,
                topic=view.topic_of(one),
                piece_bytes=piece_bytes,
                first=self._first,
                end=self._end,
            )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read a piece, in a task."""
        return _rows(self._request, self._columns, partition.value)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming query's reader. The query's positions are in Spark's checkpoint.

    A position of the stream is the next offset of each partition, by partition number.
    """

    def __init__(self, request: Request, schema: StructType) -> None:
        if request.end is not None:
            raise UsageError("a stream has no `endingOffset`", hint="use `spark.read`")
        self._request, self._columns = request, _Columns(schema)
        self._cap: dict[str, int] | None = None
        self._stable: dict[str, LastStableOffset] = {}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  # Spark's name
        """Return the first position of a query without a checkpoint."""
        with _with_hint():
            view = _View(self._request)
            held = {str(n): view.list_partition(n) for n in view.partitions}
            return {n: max(self._request.first, one.first) for n, one in held.items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # as above
        """Return the limit of `maxBytesPerTrigger`."""
        found = self._request.trigger_bytes
        return ReadAllAvailable() if found is None else ReadMaxBytes(found)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # as above
        """Fix the current end of the archive as the end of the query."""
        with _with_hint():
            view = _View(self._request)
            self._cap = {str(n): view.list_partition(n).next_offset for n in view.partitions}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802  # as above
        """Return the end of the next batch: the end, or as many objects as the limit allows."""
        with _with_hint():
            view = _View(self._request)
            held = {str(n): view.list_partition(n) for n in view.partitions}
            reached, steps = dict(start), {}
            for number, one in held.items():
                end = self._end_of(view, number, one, start.get(number, 0))
                if self._cap is not None:
                    end = min(end, self._cap.get(number, 0))
                steps[number] = _steps(one, start.get(number, 0), end)
            left = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
            while any(steps.values()) and (left is None or left > 0):
                for number in [number for number, rest in steps.items() if rest]:
                    if left is None:
                        reached[number], steps[number] = steps[number][-1][0], []
                    elif left > 0:
                        reached[number], size_bytes = steps[number].pop(0)
                        left -= size_bytes
            return reached

    def _end_of(self, view: _View, number: str, held: PartitionObjects, start: int) -> int:
        """Return the end of a partition; for a native one, its last stable offset.

        Records of open transactions may still be committed, and a stream does not read them again.
        """
        from logmirror.archive.naming import NATIVE  # noqa: PLC0415  # see the module
        from logmirror.archive.piece_rows import LastStableOffset  # noqa: PLC0415  # see the module

        if held.is_snapshot:
            raise UsageError(
                "a stream cannot read snapshots, which replace each other",
                hint="use `spark.read`, which reads the newest",
                destination=view.destination,
            )
        if held.extension != NATIVE or not self._request.committed:
            return held.next_offset
        if number not in self._stable:
            self._stable[number] = LastStableOffset(view.store, held.folder, start)
        return self._stable[number].advance(held.objects)

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Divide the range between two positions of the stream into pieces."""
        from logmirror.archive.pieces import cut  # noqa: PLC0415  # see the module

        with _with_hint():
            view, found = _View(self._request), []
            for number, last in end.items():
                first = max(start.get(number, 0), self._request.first)
                if first >= last:
                    continue
                held = view.list_partition(int(number))
                if held.next_offset < last:
                    raise PositionError(
                        "the archive ends before the query's position",
                        hint="objects are missing, or the checkpoint belongs to another archive",
                        partition=number,
                        position=last,
                        found=held.next_offset,
                    )
                topic, size = view.topic_of(held), self._request.piece_bytes
                pieces = cut(held, topic=topic, piece_bytes=size, first=first, end=last)
                found += [InputPartition(piece) for piece in pieces]
            return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read a piece, in a task."""
        return _rows(self._request, self._columns, partition.value)


def _steps(held: PartitionObjects, start: int, end: int) -> list[tuple[int, int]]:
    """Return the possible ends of a batch, ascending, each with the size of its last object."""
    return [
        (min(obj.last + 1, end), size_bytes)
        for obj, size_bytes in zip(held.objects, held.sizes_bytes, strict=True)
        if obj.last >= start and max(obj.first, start) < end
    ]


class _View:
    """An archive as one plan sees it."""

    def __init__(self, request: Request) -> None:
        from logmirror.archive.pieces import (  # noqa: PLC0415  # see the module
            find_destination,
            find_partitions,
        )

        self._request = request
        self.store = _store(request.location, os.getpid())
        self.destination = find_destination(self.store, request.destination)
        self.partitions = find_partitions(self.store, self.destination, request.partitions)

    def list_partition(self, partition: int) -> PartitionObjects:
        """Return the objects of a partition that count."""
        from logmirror.archive.pieces import list_partition  # noqa: PLC0415  # see the module

        return list_partition(self.store, self.destination, partition)

    @functools.cached_property
    def _topic(self) -> str:
        from logmirror.archive.pieces import find_topic  # noqa: PLC0415  # see the module

        topic = self._request.topic or find_topic(self.store, self.destination, self.partitions)
        if not topic:
            raise UsageError(
                "the topic is unknown: native objects do not contain it, and no claim is kept",
                hint="set it: `.option('topic', ...)`",
                destination=self.destination,
            )
        return topic

    def topic_of(self, held: PartitionObjects) -> str:
        """Return the topic of a partition's records; empty if its objects contain it."""
        from logmirror.archive.naming import NATIVE  # noqa: PLC0415  # see the module

        is_native = held.extension == NATIVE and bool(held.objects)
        return self._topic if is_native else self._request.topic


@functools.cache
def _store(location: StoreLocation, _process: int) -> BlobStore:
    return open_store(location, "dataframes")  # a forked worker must not share its parent's sockets


def _rows(request: Request, columns: _Columns, piece: Piece | None) -> Iterator[Any]:
    if piece is None:  # Spark calls it once if there are no pieces
        return
    from logmirror.archive.piece_rows import PieceRows  # noqa: PLC0415  # see the module

    with _with_hint():
        rows = PieceRows(
            _store(request.location, os.getpid()),
            piece,
            utf8=request.utf8,
            verify=request.verify,
            committed=request.committed,
        )
        yield from columns.convert(rows.read())


@contextlib.contextmanager
def _with_hint() -> Iterator[None]:
    """Add the hint of an error to its traceback, which Spark shows as text."""
    try:
        yield
    except LogmirrorError as error:
        if error.hint and not getattr(error, "__notes__", None):
            error.add_note(f"hint: {error.hint}")
        raise


def _offsets(one: Filter, values: Sequence[int]) -> tuple[int, int | None]:
    """Return the first offset that a filter on the column matches, and one past the last."""
    if isinstance(one, (EqualTo, In)):
        return min(values), max(values) + 1
    if isinstance(one, GreaterThan):
        return values[0] + 1, None
    if isinstance(one, GreaterThanOrEqual):
        return values[0], None
    if isinstance(one, LessThan):
        return 0, values[0]
    if isinstance(one, LessThanOrEqual):
        return 0, values[0] + 1
    return 0, None
