"""The demo's judge accepts an exact replica and finds every planted fault.

Method: small replicas in both formats, written by pyarrow and by the reference encoder, each with
one fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pytest
from pyarrow import parquet

from logmirror.demo import judge
from logmirror.demo.flights import Flights
from logmirror.errors import CorruptionError
from logmirror.model import TimestampType
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEYS: Final = [b"N1", None, b"N2", b"N1", b"", b"N3", b"N2", b"N1"]
RECEIPTS: Final = {0: [0, 2, 4, 5, 7], 1: [1, 3, 6]}


def small_flights() -> Flights:
    count = len(KEYS)
    return Flights(
        timestamps_ms=pa.array(range(1000, 1000 + count), pa.int64()),
        keys=pa.array(KEYS, pa.binary()),
        values=pa.array([b'{"n":%d}' % n for n in range(count)], pa.binary()),
        months=pa.array([1] * count, pa.int64()),
    )


def exact_replica() -> dict[int, list[Record]]:
    flights = small_flights()
    return {
        partition: [
            Record(
                offset,
                flights.timestamps_ms[index].as_py(),
                TimestampType.CREATE_TIME,
                flights.keys[index].as_py(),
                flights.values[index].as_py(),
                (),
            )
            for offset, index in enumerate(indices)
        ]
        for partition, indices in RECEIPTS.items()
    }


def write_parquet(path: Path, records: list[Record]) -> None:
    columns = {
        "key": pa.array([r.key for r in records], pa.binary()),
        "value": pa.array([r.value for r in records], pa.binary()),
        "offset": pa.array([r.offset for r in records], pa.int64()),
        "timestamp": pa.array([r.timestamp_ms for r in records], pa.timestamp("ms", "UTC")),
    }
    parquet.write_table(pa.table(columns), path)


def write_native(path: Path, records: list[Record]) -> None:
    path.write_bytes(encode_reference(records))


def judged(folder: Path, extension: str, copy: dict[int, list[Record]]) -> int:
    """Write a replica with two objects per partition, and compare it."""
    write = {"parquet": write_parquet, "batches": write_native}[extension]
    for partition, records in copy.items():
        (folder / str(partition)).mkdir(parents=True)
        for name, some in (("0", records[:2]), ("1", records[2:])):
            if some:
                write(folder / str(partition) / f"{name}.{extension}", some)
    return judge.compare(folder, extension, small_flights(), RECEIPTS)


def lose_the_last(copy: dict[int, list[Record]]) -> None:
    copy[0].pop()


def lose_one_in_the_middle(copy: dict[int, list[Record]]) -> None:
    del copy[0][2]


def duplicate_the_last(copy: dict[int, list[Record]]) -> None:
    copy[1].append(copy[1][-1]._replace(offset=3))


def change_a_value(copy: dict[int, list[Record]]) -> None:
    copy[0][3] = copy[0][3]._replace(value=b'{"n":6}')


def change_a_time(copy: dict[int, list[Record]]) -> None:
    copy[0][0] = copy[0][0]._replace(timestamp_ms=1)


def make_a_null_key_empty(copy: dict[int, list[Record]]) -> None:
    copy[1][0] = copy[1][0]._replace(key=b"")


def make_an_empty_key_null(copy: dict[int, list[Record]]) -> None:
    copy[0][2] = copy[0][2]._replace(key=None)


def swap_two(copy: dict[int, list[Record]]) -> None:
    one, two = copy[0][3], copy[0][4]
    copy[0][3], copy[0][4] = two._replace(offset=one.offset), one._replace(offset=two.offset)


def lose_a_partition(copy: dict[int, list[Record]]) -> None:
    del copy[1]


FAULTS: Final = {
    lose_the_last: {"expected": 5, "found": 4},
    lose_one_in_the_middle: {"column": "offset", "offset": 2},
    duplicate_the_last: {"expected": 3, "found": 4},
    change_a_value: {"column": "value", "offset": 3},
    change_a_time: {"column": "timestamp", "offset": 0},
    make_a_null_key_empty: {"column": "key", "offset": 0, "partition": 1},
    make_an_empty_key_null: {"column": "key", "offset": 2, "partition": 0},
    swap_two: {"column": "timestamp", "offset": 3},
    lose_a_partition: {"partition": 1, "expected": 3, "found": 0},
}


@pytest.mark.parametrize("extension", ["parquet", "batches"])
def test_an_exact_replica_is_accepted(tmp_path: Path, extension: str) -> None:
    assert judged(tmp_path, extension, exact_replica()) == len(KEYS)


@pytest.mark.parametrize("extension", ["parquet", "batches"])
@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_each_planted_fault_is_found(
    tmp_path: Path, extension: str, spoil: Callable[[dict[int, list[Record]]], None]
) -> None:
    copy = exact_replica()
    spoil(copy)

    with pytest.raises(CorruptionError) as raised:
        judged(tmp_path, extension, copy)

    assert FAULTS[spoil].items() <= raised.value.facts.items()
