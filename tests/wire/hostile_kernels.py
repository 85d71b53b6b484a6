"""Feed a million damaged batches to the kernels in bounded buffers; run by `test_kernels_memory`.

Every buffer that a kernel reads or writes ends at an inaccessible page, and begins after another
one or after canary bytes. An access one byte beyond is a segmentation fault, which ends only this
process.

Prints one line of JSON: the number of rounds by outcome.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
from numba import njit

from logmirror.model import TimestampType
from logmirror.wire import kernels_columns as c
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.kernels_address import SLACK, copy, load_i64, load_u8, store_8, store_64
from logmirror.wire.kernels_columns import COMPRESSED, DONE, FULL
from logmirror.wire.kernels_decode import (
    END,
    FIRST,
    PREVIOUS,
    PROGRESS_WORDS,
    decode_batches,
    decode_payload,
)
from logmirror.wire.kernels_ndjson import RESULT_WORDS, TEXTS, put_lines
from logmirror.wire.kernels_patch import patch_producer
from logmirror.wire.kernels_scan import COLUMNS, STATE_WORDS, scan_batches
from logmirror.wire.records import Record, encode_marker, encode_reference

sys.path.insert(0, str(Path(__file__).parents[1]))
from kit.runs.arrow_kernels import encode_rows  # after the path is set

ROWS_MAX, HEADERS_MAX, BYTES_MAX = 16, 16, 600
TABLE_ROWS = 3
OUT_BYTES = 4096
CANARY = 0xA5


class BoundedBuffer:
    """`size` bytes that end at an inaccessible page; canary bytes before them."""

    kept: ClassVar[list[mmap.mmap]] = []

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        pages = -(-size // page) + 1
        area = mmap.mmap(-1, (pages + 2) * page)
        self.kept.append(area)
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for edge in (start, start + (pages + 1) * page):
            if protect(ctypes.c_void_p(edge), ctypes.c_size_t(page), 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")
        self.size = size
        self.end = start + (pages + 1) * page
        self.address = self.end - size
        self._canaries = (ctypes.c_uint8 * page).from_address(self.address - page)
        ctypes.memset(self.address - page, CANARY, page)

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))

    def untouched_before(self) -> bool:
        return bytes(self._canaries).count(CANARY) == len(self._canaries)


def checked_columns() -> tuple[np.ndarray, list[BoundedBuffer]]:
    """A context whose every array is as large as documented, and not a byte larger."""
    rows, headers, data = ROWS_MAX, HEADERS_MAX, BYTES_MAX + SLACK
    sizes = [8 * rows, 8 * rows, 4 * rows]
    sizes += [4 * (rows + 1), data, rows] * 2
    sizes += [4 * (rows + 1), 4 * (headers + 1), data, 4 * (headers + 1), data, headers]
    areas = [BoundedBuffer(size) for size in sizes]
    context = np.zeros(c.CONTEXT_WORDS, np.int64)
    context[c.ROWS_MAX // 8 : c.OFFSETS // 8] = rows, headers, BYTES_MAX
    context[c.OFFSETS // 8 :] = [area.address for area in areas]
    return context, areas


@njit
def next_random(state):
    """xorshift64: the same rounds in every run."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64(x >> np.uint64(1))


@njit
def mutate(area, size, state):
    """One to six edits: a random byte, a special byte, a varint made longer, a copied stretch."""
    for _ in range(1 + next_random(state) % 6):
        at = area + next_random(state) % size
        kind = next_random(state) % 6
        if kind == 0:
            store_8(at, next_random(state))
        elif kind == 1:
            store_8(at, 0x7F + next_random(state) % 2)
        elif kind == 2:
            store_8(at, 255)
        elif kind == 3:
            store_8(at, load_u8(at) ^ (1 << (next_random(state) % 8)))
        elif kind == 4:
            store_8(at, load_u8(at) | 128)
        else:
            store_8(at, load_u8(area + next_random(state) % size))


@njit
def decode(  # noqa: PLR0913, PLR0917  # a compiled loop takes plain words
    base, size, table, count, context, progress, chunks
):
    """All chunks of one response, as `decode.RecordDecoder` asks for them."""
    for _ in range(chunks):
        for word in range(7):
            store_64(context + 8 * word, 0)
        status = decode_batches(base, size, table, 8 * TABLE_ROWS, count, context, progress)
        if status == COMPRESSED:
            # The bytes stand in for a payload that a codec made of them.
            row = load_i64(progress)
            position = load_i64(table + 8 * row)
            payload_bytes = load_i64(table + 8 * (TABLE_ROWS + row)) - 61
            payload = base + position + 61
            status = decode_payload(base + position, payload, payload_bytes, context, progress)
        if status < 0:
            return status
        if status == FULL and load_i64(context) == 0:
            return FULL
        if status == DONE and load_i64(progress) >= count:
            return DONE
    return FULL


@njit
def rounds(  # noqa: PLR0913, PLR0917  # a compiled loop takes plain words
    count,
    seed,
    originals,
    sizes,
    area_end,
    table,
    state,
    aborted,
    context,
    progress,
    out,
    texts,
    result,
    ended,
):
    """Damage, scan, decode, write out again; `ended` counts how it went."""
    random = np.array([np.uint64(seed)])
    for k in range(count):
        which = next_random(random) % len(sizes)
        size = sizes[which]
        base = area_end - size
        copy(base, originals[which], size)
        mutate(base, size, random)
        if next_random(random) % 8 == 0:  # the response is cut off
            cut = next_random(random) % size
            copy_down(base, area_end, cut)
            base, size = area_end - cut, cut
        for word in range(STATE_WORDS):
            store_64(state + 8 * word, 0)
        store_64(state + 16, -1)
        status = scan_batches(base, size, k % 16 == 0, table, TABLE_ROWS, state, aborted)
        listed = load_i64(state + 8)
        ended[0 if status == DONE else 1 if status > 0 else 2] += 1
        for word in range(PROGRESS_WORDS):
            store_64(progress + 8 * word, 0)
        store_64(progress + PREVIOUS, -1)
        store_64(progress + FIRST, 0)
        store_64(progress + END, 0x7FFFFFFFFFFFFFFF)
        status = decode(base, size, table, listed, context, progress, 64)
        ended[3 if status == DONE else 4 if status > 0 else 5] += 1
        if load_i64(context) > 0:
            ended[6] += 1
            room = next_random(random) % OUT_BYTES
            put_lines(
                out + OUT_BYTES - room, room, context, 0, load_i64(context), texts, k % 2, result
            )
            room = next_random(random) % OUT_BYTES
            encode_rows(out + OUT_BYTES - room, room, context, load_i64(context), 100)
        patch_producer(base, size, 7, 1, 5)


@njit
def copy_down(base, area_end, cut):
    """Move the first `cut` bytes at base to the end of the area, byte by byte from behind."""
    for i in range(cut):
        store_8(area_end - 1 - i, load_u8(base + cut - 1 - i))


def originals() -> list[bytes]:
    """Batches of every shape, small enough that an edit often hits something that matters."""
    rows = [
        Record(3, 7, TimestampType.CREATE_TIME, b"k", b"v" * 40, ((b"h", b"x"), (b"", None))),
        Record(4, 9, TimestampType.CREATE_TIME, None, b"", ()),
        Record(9, 2**40, TimestampType.CREATE_TIME, b"", None, ((b"h" * 9, b"y" * 140),)),
    ]
    plain = encode_reference(rows)
    aborted = encode_reference(
        [row._replace(offset=row.offset + 10) for row in rows], producer_id=7, transactional=True
    )
    marker = encode_marker(MarkerType.ABORT, offset=20, producer_id=7)
    tiny = b"".join(
        encode_reference([Record(30 + i, 0, TimestampType.CREATE_TIME, None, None, ())])
        for i in range(4)
    )
    # An uncompressed payload under a codec's name: `decode` hands it to the kernel as it is.
    unpacked = encode_reference(rows, attribute_bits=4)
    return [plain, aborted + marker, plain + aborted, tiny, unpacked, plain + marker, marker]


def main(count: int) -> None:
    context, areas = checked_columns()
    data = originals()
    texts = np.array(
        [(np.frombuffer(text or b"\0", np.uint8).ctypes.data, len(text)) for text in TEXTS],
        np.int64,
    )
    kept = [np.frombuffer(one, np.uint8) for one in data]
    source = BoundedBuffer(max(map(len, data)))
    table, state = BoundedBuffer(8 * len(COLUMNS) * TABLE_ROWS), BoundedBuffer(8 * STATE_WORDS)
    words = np.array([1, 1, 10, 0, 7, 0], np.int64)
    aborted = BoundedBuffer(words.nbytes)
    aborted.fill(words.tobytes())
    progress, result = BoundedBuffer(8 * PROGRESS_WORDS), BoundedBuffer(8 * RESULT_WORDS)
    held = BoundedBuffer(context.nbytes)
    held.fill(context.tobytes())
    out = BoundedBuffer(OUT_BYTES)
    ended = np.zeros(7, np.int64)
    rounds(
        *(count, 88172645463325252),
        *(np.array([one.ctypes.data for one in kept]), np.array([one.size for one in kept])),
        *(source.end, table.address, state.address, aborted.address, held.address),
        *(progress.address, out.address, texts.ctypes.data, result.address, ended),
    )
    everything = [*areas, source, table, state, aborted, progress, result, held, out]
    report = {
        "rounds": count,
        "scan": dict(zip(("done", "full", "refused"), ended[:3].tolist(), strict=True)),
        "decode": dict(zip(("done", "full", "refused"), ended[3:6].tolist(), strict=True)),
        "with rows": int(ended[6]),
        "canaries": all(area.untouched_before() for area in everything),
    }
    sys.stdout.write(json.dumps(report))
    if len(sys.argv) > 2:  # the fence itself is tested: this must kill us
        load_beyond(source.end)


@njit
def load_beyond(address):
    return load_u8(address)


if __name__ == "__main__":
    main(int(sys.argv[1]))
