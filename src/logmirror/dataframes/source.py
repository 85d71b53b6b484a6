"""Archives as Spark DataFrames: a PySpark Data Source for people's own queries.

    from logmirror.dataframes import LogmirrorArchive

    spark.dataSource.register(LogmirrorArchive)
    spark.read.format("logmirror").option("root", "/archive").option("destination", "orders").load()

Columns and types are those of Spark's Kafka source. What counts as the archive is decided once for
each query, where it is planned; each task then reads some neighbouring objects and hands on Arrow
batches. Described in `docs/dataframes.md`. Beside `engine` the only package that
imports pyspark, and a composition root: it opens stores.

Spark imports this module in processes that only plan, so what reads is imported by readers.
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
"""Those of Spark's Kafka source with `includeHeaders`."""

_PIECES_MAX: Final = 10_000
"""Tasks of one query, about: a larger archive gets larger pieces."""


class LogmirrorArchive(DataSource):
    """`format("logmirror")`: archives that mirrors write, in folders and S3, of every format."""

    @classmethod
    def name(cls) -> str:
        """The name for `format`."""
        return "logmirror"

    def schema(self) -> StructType:
        """All columns; `.schema(...)` with some of them reads only those."""
        return SCHEMA

    def reader(self, schema: StructType) -> _Reader:
        """For `spark.read`."""
        with _told():
            return _Reader(Request.of(self.options), schema)

    def streamReader(self, schema: StructType) -> _StreamReader:  # noqa: N802  # Spark's name
        """For `spark.readStream`."""
        with _told():
            return _StreamReader(Request.of(self.options), schema)


class _Columns:
    """Record batches as Spark wants them: the columns that were asked for, in its types."""

    def __init__(self, schema: StructType) -> None:
        known = {field.name: field.dataType for field in SCHEMA}
        for field in schema:
            if known.get(field.name) != field.dataType:
                raise UsageError(
                    "not a column of an archive",
                    hint="`.schema(...)` may leave columns out, and nothing else",
                    column=f"{field.name} {field.dataType.simpleString()}",
                    known=SCHEMA.simpleString(),
                )
        self._schema = schema

    def convert(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches of `wire.columns.SCHEMA`, or of what it was read from, in Spark's types."""
        import pyarrow as pa  # noqa: PLC0415  # planning needs none
        from pyspark.sql.pandas.types import to_arrow_schema  # noqa: PLC0415  # as above

        wanted = to_arrow_schema(self._schema, timezone="UTC")
        for batch in batches:
            try:
                columns = [batch.column(field.name).cast(field.type) for field in wanted]
            except pa.ArrowInvalid as error:
                raise UsageError(
                    "a timestamp does not fit Spark's type, which holds microseconds",
                    hint="leave the column out: `.schema('key binary, value binary, ...')`",
                    partition=batch.column("partition")[0].as_py(),
                    first=batch.column("offset")[0].as_py(),
                    reason=str(error)[:200],
                ) from error
            yield pa.RecordBatch.from_arrays(columns, schema=wanted)


class _Prune:
    """`pushFilters` of a reader: what filters say of partitions and offsets.

    Spark refuses a reader with a method of its own unless `spark.sql.python.filterPushdown.enabled`
    is set, lest its filters be lost. Here none can be: all are left to Spark, and objects that
    hold no row for them are not read. So where it is not set, we pass for one without.
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
        """Take a filter into account that says which partitions or offsets can be wanted."""
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
        """Look at the archive and cut it into pieces."""
        with _told():
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
                "a snapshot holds the latest records by key, and has no range of offsets",
                hint="leave `startingOffset` and `endingOffset` out; a filter on the column works",
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
    """A streaming query's reader; its positions are the query's own, in Spark's checkpoint.

    An offset of the stream is the next offset of each partition, by the partition's number.
    """

    def __init__(self, request: Request, schema: StructType) -> None:
        if request.end is not None:
            raise UsageError("a stream has no `endingOffset`", hint="use `spark.read`")
        self._request, self._columns = request, _Columns(schema)
        self._cap: dict[str, int] | None = None
        self._stable: dict[str, LastStableOffset] = {}

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  # Spark's name
        """Where a query without a checkpoint begins."""
        with _told():
            view = _View(self._request)
            held = {str(n): view.list_partition(n) for n in view.partitions}
            return {n: max(self._request.first, one.first) for n, one in held.items()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # as above
        """As `maxBytesPerTrigger` says."""
        found = self._request.trigger_bytes
        return ReadAllAvailable() if found is None else ReadMaxBytes(found)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # as above
        """Take what is there now as the end."""
        with _told():
            view = _View(self._request)
            self._cap = {str(n): view.list_partition(n).next_offset for n in view.partitions}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802  # as above
        """How far the next batch goes: to the end, or as many whole objects as the limit allows."""
        with _told():
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
        """The end of a partition; of a native one before the first transaction without an end.

        Its records may yet count, and a stream never comes back to them.
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
        """Cut what lies between two offsets of the stream into pieces."""
        from logmirror.archive.pieces import cut  # noqa: PLC0415  # see the module

        with _told():
            view, found = _View(self._request), []
            for number, last in end.items():
                first = max(start.get(number, 0), self._request.first)
                if first >= last:
                    continue
                held = view.list_partition(int(number))
                if held.next_offset < last:
                    raise PositionError(
                        "the archive ends before the query's position",
                        hint="objects are missing, or the checkpoint is that of another archive",
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
    """Offsets that a batch may end at, ascending, each with the bytes of one object more."""
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
        """The objects of a partition that count."""
        from logmirror.archive.pieces import list_partition  # noqa: PLC0415  # see the module

        return list_partition(self.store, self.destination, partition)

    @functools.cached_property
    def _topic(self) -> str:
        from logmirror.archive.pieces import find_topic  # noqa: PLC0415  # see the module

        topic = self._request.topic or find_topic(self.store, self.destination, self.partitions)
        if not topic:
            raise UsageError(
                "nothing says whose records these are: native objects do not, and no claim is kept",
                hint="say it: `.option('topic', ...)`",
                destination=self.destination,
            )
        return topic

    def topic_of(self, held: PartitionObjects) -> str:
        """The topic of a partition's records; empty where its objects say it."""
        from logmirror.archive.naming import NATIVE  # noqa: PLC0415  # see the module

        is_native = held.extension == NATIVE and bool(held.objects)
        return self._topic if is_native else self._request.topic


@functools.cache
def _store(location: StoreLocation, _process: int) -> BlobStore:
    return open_store(location, "dataframes")  # a forked worker must not share its parent's sockets


def _rows(request: Request, columns: _Columns, piece: Piece | None) -> Iterator[Any]:
    if piece is None:  # what Spark makes of no pieces at all
        return
    from logmirror.archive.piece_rows import PieceRows  # noqa: PLC0415  # see the module

    with _told():
        rows = PieceRows(
            _store(request.location, os.getpid()),
            piece,
            utf8=request.utf8,
            verify=request.verify,
            committed=request.committed,
        )
        yield from columns.convert(rows.read())


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Spark shows tracebacks as text: let the hint be in them."""
    try:
        yield
    except LogmirrorError as error:
        if error.hint and not getattr(error, "__notes__", None):
            error.add_note(f"hint: {error.hint}")
        raise


def _offsets(one: Filter, values: Sequence[int]) -> tuple[int, int | None]:
    """The offsets from .. up to that a filter on the column leaves."""
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
