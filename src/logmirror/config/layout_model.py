"""The layout of archives in the configuration file: format of the objects, and when one ends.

A mirror has these settings, or the file's one destination for all mirrors.
"""

from __future__ import annotations

from logmirror.config.base_model import Model
from logmirror.config.scalars import (  # noqa: TC001  # pydantic evaluates the annotations
    Compaction,
    Compression,
    Encoding,
    Format,
    Limit,
    Snapshots,
    TimeOfDay,
)


class DailyModel(Model):
    """A time of day at which all pending records are written."""

    at_utc: TimeOfDay
    """Time of day in UTC, `HH:MM` or `HH:MM:SS`."""


class FlushModel(Model):
    """When an object ends. The first limit that is reached ends it.

    A very large number, up to 18446744073709551615, disables a limit.
    """

    max_time_ms: Limit
    """Longest time, in milliseconds, that a record is pending before it is written."""

    max_bytes: Limit
    """Size of the records (keys, values, headers) in one object, in bytes."""

    max_offsets: Limit
    """Number of offsets that one object covers. If the last of them has no record, the object ends
    where this offset gap ends."""

    daily: DailyModel | None = None
    """Also write once a day at a fixed time, regardless of the limits."""


class ArchiveLayoutModel(Model):
    """The format of the objects, and which records they hold."""

    format: Format = "parquet"
    """Format of the objects. `parquet`: the columns of Spark's Kafka source. `native`: Kafka's
    record batches as the source served them. `ndjson`: one JSON object per record."""

    compression: Compression = "zstd-1"
    """Compression of Parquet objects; the other formats have no such option. It is accepted and
    ignored with `ndjson`, as in mirror-v3, and refused with `native`."""

    encoding: Encoding = "base64"
    """How `ndjson` writes keys and values. `base64`: every byte is preserved. `utf8`: readable
    text; a record that is not UTF-8 stops the mirror."""

    compaction: Compaction | None = None
    """`log`: an object holds the latest record of each key, complete and sorted by key, instead of
    all records; a tombstone removes its key. Only for `format: parquet`."""

    snapshots: Snapshots | None = None
    """How many objects of `compaction: log` are kept: `keep-all`, the default, or the newest ones,
    such as `keep 3`."""
