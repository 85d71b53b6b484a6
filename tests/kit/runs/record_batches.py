"""Record batches for tests: strategies for any legal run, and for runs one edit away from legal."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from logmirror.model import TimestampType
from logmirror.wire.batch_header import crc32c_reference
from logmirror.wire.compression import Codec
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.wire.columns import Columns

OFFSET_END = 2**63 - 1

relaxed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
"""For properties whose examples are whole batches: a busy machine is no failure."""

runs = st.binary(max_size=20) | st.sampled_from(
    [b"", b"\0", b"x" * 31, b"y" * 32, b"z" * 127, b"a" * 128, b"b" * 129, b"c" * 3000]
)
nullable_runs = st.none() | runs
timestamps = st.sampled_from([-(2**63), -1, 0, 1_700_000_000_000, 2**63 - 1]) | st.integers(
    -5, 2_000_000_000_000
)
header_keys = st.text(max_size=8).map(str.encode)
headers = st.lists(st.tuples(header_keys, nullable_runs), max_size=4).map(tuple)


@st.composite
def records(draw: st.DrawFn, *, base_offset: int = 0, max_size: int = 6) -> list[Record]:
    """Records from `base_offset` or a little later on, with gaps as compaction leaves them."""
    offset, rows = base_offset, []
    for _ in range(draw(st.integers(0, max_size))):
        offset += draw(st.sampled_from([0, 0, 0, 1, 1000]))
        content = (draw(timestamps), TimestampType.CREATE_TIME)
        rows.append(
            Record(offset, *content, draw(nullable_runs), draw(nullable_runs), draw(headers))
        )
        offset += 1
    return rows


@st.composite
def batches(draw: st.DrawFn, *, base_offset: int = 0) -> tuple[bytes, list[Record], int]:
    """One legal data batch, what a reader sees in it, and the next offset."""
    rows = draw(records(base_offset=base_offset))
    last = (rows[-1].offset if rows else base_offset) + draw(st.sampled_from([0, 0, 1, 50]))
    log_append = draw(st.booleans())
    max_timestamp = draw(timestamps)
    data = encode_reference(
        rows,
        base_offset=base_offset,
        last_offset=last,
        codec=draw(st.sampled_from(Codec)) if rows else Codec.NONE,
        base_timestamp_ms=draw(timestamps),
        max_timestamp_ms=max_timestamp,
        timestamp_type=TimestampType(log_append),
        producer_id=draw(st.sampled_from([-1, 0, 7, 2**63 - 1])),
        leader_epoch=draw(st.integers(-1, 2**31 - 1)),
        attribute_bits=draw(st.sampled_from([0, 0, 1 << 6, 1 << 7, 1 << 14])),
    )
    if log_append:
        kind = TimestampType.LOG_APPEND_TIME
        rows = [row._replace(timestamp_ms=max_timestamp, timestamp_type=kind) for row in rows]
    return data, rows, last + 1


@st.composite
def runs_of_batches(draw: st.DrawFn) -> tuple[bytes, list[Record]]:
    """Several legal data batches back to back, and what a reader sees in them."""
    offset, data, rows = draw(st.sampled_from([0, 5, 2**40, 2**62])), b"", []
    for _ in range(draw(st.integers(0, 4))):
        more, seen, offset = draw(batches(base_offset=offset))
        offset += draw(st.sampled_from([0, 0, 3]))
        data, rows = data + more, rows + seen
    return data, rows


@st.composite
def spoiled_batches(draw: st.DrawFn) -> bytes:
    """One edit away from a legal run; in most cases the checksums are made right again.

    Random bytes never get past the first check; an edit behind a good checksum reaches them all.
    """
    data = bytearray(draw(runs_of_batches().filter(lambda run: len(run[0]) > 0))[0])
    at = draw(st.integers(0, len(data) - 1) | st.integers(0, min(len(data) - 1, 80)))
    edit = draw(st.sampled_from(["set", "flip", "insert", "delete", "cut"]))
    if edit == "set":
        data[at] = draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
    elif edit == "flip":
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif edit == "insert":
        data[at:at] = draw(st.binary(min_size=1, max_size=3))
    elif edit == "delete":
        del data[at]
    else:
        del data[at:]
    return with_right_checksums(bytes(data)) if draw(st.integers(0, 3)) else bytes(data)


def with_right_checksums(data: bytes) -> bytes:
    """Give every batch that can still be delimited the checksum of its bytes."""
    spoiled, position = bytearray(data), 0
    while position + 61 <= len(spoiled):
        (length,) = struct.unpack_from(">i", spoiled, position + 8)
        end = position + 12 + length
        if length < 49 or end > len(spoiled):
            break
        crc = crc32c_reference(bytes(spoiled[position + 21 : end]))
        struct.pack_into(">I", spoiled, position + 17, crc)
        position = end
    return bytes(spoiled)


def rows_of(columns: Columns) -> list[Record]:
    """What columns hold, record by record, read from the raw arrays."""
    edges, rows = columns.header_offsets, []
    for row in range(columns.rows):
        pairs = tuple(
            (
                _run(columns.header_key_data, columns.header_key_offsets, index) or b"",
                _run(
                    columns.header_value_data,
                    columns.header_value_offsets,
                    index,
                    columns.header_value_valid,
                ),
            )
            for index in range(edges[row], edges[row + 1])
        )
        rows.append(
            Record(
                int(columns.offsets[row]),
                int(columns.timestamps_ms[row]),
                TimestampType(int(columns.timestamp_types[row])),
                _run(columns.key_data, columns.key_offsets, row, columns.key_valid),
                _run(columns.value_data, columns.value_offsets, row, columns.value_valid),
                pairs,
            )
        )
    return rows


def _run(data, offsets, index, valid=None) -> bytes | None:
    if valid is not None and not valid[index]:
        assert offsets[index] == offsets[index + 1], "null owns no bytes"
        return None
    return data[offsets[index] : offsets[index + 1]].tobytes()


def decode_all(  # noqa: PLR0913  # each names one thing that tests vary
    data: bytes,
    *,
    aborted: Sequence[tuple[int, int]] = (),
    check_crc: bool = True,
    first: int = 0,
    end: int = OFFSET_END,
    decoder: RecordDecoder | None = None,
    each: Callable[[Columns], object] | None = None,
) -> list[Record]:
    """Scan and decode with the kernels; `each` is called with every chunk."""
    listed = BatchScanner().scan(data, len(data), aborted=aborted, check_crc=check_crc)
    rows = []
    for columns in (decoder or RecordDecoder(1 << 16)).decode(data, listed, first=first, end=end):
        rows += rows_of(columns)
        if each is not None:
            each(columns)
    return rows
