"""Feed damaged batches to the rebatch kernels in bounded buffers; run by `test_rebatch`.

Memory is bounded as in `hostile_kernels`: an access one byte beyond ends this process. The packed
bytes stand in for decompressed ones, and truncation for compression.

Prints one line of JSON: the number of rounds by outcome.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from hostile_kernels import BoundedBuffer, mutate, next_random, originals
from numba import njit

from logmirror.model import TimestampType
from logmirror.wire import kernels_rebatch as k
from logmirror.wire.kernels_address import SLACK, copy, load_i64, store_64
from logmirror.wire.kernels_columns import COMPRESSED, DONE, FULL
from logmirror.wire.kernels_patch import patch_listed
from logmirror.wire.kernels_scan import COLUMNS, STATE_WORDS, scan_batches
from logmirror.wire.records import Record, encode_reference

TABLE_ROWS = 8
LIST_ROWS = 3
OUT_BYTES = 900 + SLACK

# The kernels' words, as a compiled loop wants them.
FIRST, END, MAX_BATCH, PIECES, OUT, ROOM = k.FIRST, k.END, k.MAX_BATCH, k.PIECES, k.OUT, k.ROOM
MERGE_BELOW, MERGE_COMPRESSED_BELOW = k.MERGE_BELOW, k.MERGE_COMPRESSED_BELOW
CAPACITY, ROW, PREVIOUS, LISTED = k.CAPACITY, k.ROW, k.PREVIOUS, k.LISTED
OPEN, FILL, COUNT, SAVED_FILL, CODEC = k.OPEN, k.FILL, k.COUNT, k.SAVED_FILL, k.CODEC
WORDS, SEAL, NO_ROOM, NEED_BYTES = k.STATE_WORDS, k.SEAL, k.NO_ROOM, k.NEED_BYTES
rebatch, seal = k.rebatch, k.seal


@njit
def set_up(state, pieces, out_end, random):
    """A run of drawn limits, with an OUT of a drawn size that ends where its memory does."""
    for word in range(WORDS):
        store_64(state + 8 * word, 0)
    store_64(state + PREVIOUS, -1)
    store_64(state + END, 0x7FFFFFFFFFFFFFFF)
    if next_random(random) % 4 == 0:
        store_64(state + FIRST, next_random(random) % 40)
        store_64(state + END, next_random(random) % 40)
    store_64(state + MAX_BATCH, 1 + next_random(random) % 500)
    store_64(state + MERGE_BELOW, next_random(random) % 400)
    store_64(state + MERGE_COMPRESSED_BELOW, next_random(random) % 400)
    store_64(state + PIECES, pieces)
    store_64(state + CAPACITY, 1 + next_random(random) % LIST_ROWS)
    room = SLACK + next_random(random) % (OUT_BYTES - SLACK)
    store_64(state + OUT, out_end - room)
    store_64(state + ROOM, room)


@njit
def go(base, size, table, listed, state, random, counted):  # noqa: PLR0913, PLR0917  # plain words
    """One run to its end, as `rebatch.Rebatcher` drives it; DONE, helpless (NO_ROOM) or refused."""
    payload_row = -1
    while True:
        payload = payload_bytes = 0
        if load_i64(state + ROW) == payload_row:
            cell = table + 8 * payload_row
            payload = base + load_i64(cell) + 61
            payload_bytes = load_i64(cell + 8 * TABLE_ROWS) - 61
        status = rebatch(base, size, table, 8 * TABLE_ROWS, listed, state, payload, payload_bytes)
        for piece in range(load_i64(state + LISTED)):
            counted[load_i64(load_i64(state + PIECES) + 48 * piece + 16)] += 1
        patch_listed(base, size, load_i64(state + PIECES), load_i64(state + LISTED))
        store_64(state + LISTED, 0)
        if status == COMPRESSED:
            payload_row = load_i64(state + ROW)
        elif status == SEAL:
            records = load_i64(state + FILL) - load_i64(state + OPEN) - 61
            seal(state, next_random(random) % (records + 1), load_i64(state + CODEC))
        elif status == NO_ROOM:
            begin, out = load_i64(state + OPEN), load_i64(state + OUT)
            if begin == 0 and load_i64(state + NEED_BYTES) > load_i64(state + ROOM):
                return NO_ROOM
            move(state, begin, out)
        elif status != FULL:
            return status


@njit
def move(state, begin, out):
    """What OUT's pieces held is given up: the open one goes to the front."""
    if load_i64(state + COUNT) > 0:
        for at in range(load_i64(state + FILL) - begin):
            copy(out + at, out + begin + at, 1)
    store_64(state + OPEN, 0)
    store_64(state + FILL, load_i64(state + FILL) - begin)
    store_64(state + SAVED_FILL, load_i64(state + SAVED_FILL) - begin)


@njit
def rounds(  # noqa: PLR0913, PLR0917  # a compiled loop takes plain words
    count, seed, sources, sizes, area_end, table, scan, aborted, state, pieces, out_end, counted
):
    """Damage, scan, rebatch; `counted`: pieces new and in the source, runs by how they ended."""
    random = np.array([np.uint64(seed)])
    for _ in range(count):
        which = next_random(random) % len(sizes)
        size = sizes[which]
        base = area_end - size
        copy(base, sources[which], size)
        mutate(base, size, random)
        for word in range(STATE_WORDS):
            store_64(scan + 8 * word, 0)
        store_64(scan + 16, -1)
        scan_batches(base, size, 0, table, TABLE_ROWS, scan, aborted)
        set_up(state, pieces, out_end, random)
        if next_random(random) % 4 == 0:  # damaged again behind the scanner's back
            mutate(base, size, random)
        status = go(base, size, table, load_i64(scan + 8), state, random, counted)
        counted[2 if status == DONE else 3 if status == NO_ROOM else 4] += 1


def more() -> list[bytes]:
    """What `originals` lacks: neighbours with a codec's name, large records, log-append time."""

    def rows(first: int, count: int, size: int) -> list[Record]:
        return [
            Record(first + i, 5 * i, TimestampType.CREATE_TIME, b"k", b"v" * size, ((b"h", None),))
            for i in range(count)
        ]

    def packed(attribute_bits: int) -> bytes:
        return b"".join(
            encode_reference(rows(at, 2, 9), attribute_bits=attribute_bits) for at in range(0, 8, 2)
        )

    return [
        packed(0),
        packed(3),
        packed(8),
        packed(0) + encode_reference(rows(8, 3, 200), last_offset=12) + packed(3)[:0],
        encode_reference(rows(0, 2, 300), attribute_bits=2, last_offset=3),
    ]


def main(count: int) -> None:
    kept = [np.frombuffer(one, np.uint8) for one in originals() + more()]
    source = BoundedBuffer(max(one.size for one in kept))
    table, scan = BoundedBuffer(8 * len(COLUMNS) * TABLE_ROWS), BoundedBuffer(8 * STATE_WORDS)
    words = np.array([1, 1, 10, 0, 7, 0], np.int64)
    aborted = BoundedBuffer(words.nbytes)
    aborted.fill(words.tobytes())
    state, out = BoundedBuffer(8 * WORDS), BoundedBuffer(OUT_BYTES)
    pieces = BoundedBuffer(8 * k.PIECE_WORDS * LIST_ROWS)
    counted = np.zeros(5, np.int64)
    rounds(
        *(count, 88172645463325252),
        *(np.array([one.ctypes.data for one in kept]), np.array([one.size for one in kept])),
        *(source.end, table.address, scan.address, aborted.address, state.address),
        *(pieces.address, out.end, counted),
    )
    areas = (source, table, scan, aborted, state, pieces, out)
    report = {
        "rounds": count,
        "pieces": dict(zip(("new", "source"), counted[:2].tolist(), strict=True)),
        "ended": dict(zip(("done", "helpless", "refused"), counted[2:].tolist(), strict=True)),
        "canaries": all(area.untouched_before() for area in areas),
    }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
