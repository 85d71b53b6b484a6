"""The demo's records are all rows of the data set, in the order of departure.

Method: compare with Python's own CSV reader and JSON parser.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from kit.judges.flights import NOTHING, departure_ms, flight_rows
from logmirror.demo.flights import load


def test_records_are_the_rows_by_scheduled_departure() -> None:
    rows = flight_rows()
    flights = load()
    at_time: defaultdict[int, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        at_time[departure_ms(row)].append(row)
    times = [time_ms for time_ms in sorted(at_time) for _ in at_time[time_ms]]

    assert flights.timestamps_ms.to_pylist() == times
    assert flights.keys.null_count == sum(row["tailnum"] in NOTHING for row in rows)
    assert flights.until(8) == sum(int(row["month"]) <= 8 for row in rows)
    for index in range(0, flights.count, 500):
        found = json.loads(flights.values[index].as_py())
        assert found in [_typed(row) for row in at_time[times[index]]]
        assert flights.keys[index].as_py() == (
            found["tailnum"].encode() if found["tailnum"] else None
        )


def _typed(row: dict[str, str]) -> dict[str, Any]:
    words = {"carrier", "tailnum", "origin", "dest", "time_hour"}
    return {
        name: None if text in NOTHING else text if name in words else int(text)
        for name, text in row.items()
    }
