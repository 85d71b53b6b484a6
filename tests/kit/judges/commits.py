"""The end of what a bucket holds of a broker's log, by docs/formats/broker-commit.md alone."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEADER: Final = struct.Struct(">8sHIQQ8sQ")
_ENTRY: Final = struct.Struct(">B16sIqqQI")
_RECORDS: Final = 1


class Committed(NamedTuple):
    """Records of a partition in a commit object."""

    topic_id: bytes
    partition: int
    first: int
    next: int
    batches: bytes


def commit_files(log_dir: Path) -> list[Path]:
    """Return the commit objects of a log dir, whose objects are files; oldest first."""
    return sorted((log_dir / ".logmirror/broker/commits").iterdir())


def committed(path: Path) -> Iterator[Committed]:
    """Yield the records in a commit object; none if it was removed since it was listed.

    Its records are in other objects then: read commits before sealed segments.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    magic, version, count, *_ = _HEADER.unpack_from(data)
    assert (magic, version) == (b"LMCOMMIT", 1)
    position = _HEADER.size + count * _ENTRY.size + 4
    for number in range(count):
        kind, topic, partition, first, after, size, _ = _ENTRY.unpack_from(
            data, _HEADER.size + number * _ENTRY.size
        )
        if kind == _RECORDS:
            body = data[position : position + size]
            yield Committed(topic, partition, first, after, body)
        position += size


def values_in_bucket(log_dir: Path, prefix: bytes) -> dict[int, bytes]:
    """Return the offsets of the values that begin so, and the values.

    Raises:
        AssertionError: An offset has two values.
    """
    bodies = [one.batches for path in commit_files(log_dir) for one in committed(path)]
    bodies += [path.read_bytes() for path in log_dir.rglob("*.batches")]
    found: dict[int, bytes] = {}
    for record in (record for body in bodies for record in decode_reference(body)):
        if record.value is not None and record.value.startswith(prefix):
            assert found.setdefault(record.offset, record.value) == record.value, record.offset
    return found


def end_in_bucket(log_dir: Path) -> int:
    """Return the greatest offset behind records of any partition; 0 without records."""
    ends = [one.next for path in commit_files(log_dir) for one in committed(path)]
    ends += [int(path.name[21:41]) + 1 for path in log_dir.rglob("*.batches")]
    return max(ends, default=0)
