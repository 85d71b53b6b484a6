"""Feed damaged texts to the kernels of `kernels_text` in bounded buffers; run by `test_gate`.

The texts end at an inaccessible page (`hostile_kernels.BoundedBuffer`); so do the offsets of the
values, and the stack of open arrays and objects.

Prints one line of JSON: the number of rounds by outcome.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from hostile_kernels import BoundedBuffer, mutate, next_random
from numba import njit

from logmirror.wire.kernels_address import copy, store_8, store_32
from logmirror.wire.kernels_text import (
    ALL_GOOD,
    DEPTH_MAX,
    NOT_UTF8,
    RESULT_WORDS,
    TOO_DEEP,
    find_not_json,
    find_not_utf8,
)

TEXTS = (
    b'{"id":1,"name":"caf\xc3\xa9","tags":["a","b",null,true,false],"x":-1.5e+10}',
    b'[0,"\\u20ac\\n\\ud83d\\ude00","\xf0\x9f\x98\x80"]',
    b'"' + b"x" * 90 + b'\\"' + b"y" * 30 + b'"',
    b"plain words, much longer than one word of memory, " * 3,
    "ελληνικά, русский, 中文, 😀".encode() * 2,
    b"[" * (DEPTH_MAX + 20),
    b"[{}]",
    b"-0.25E-7",
)


@njit
def rounds(  # noqa: PLR0913, PLR0917  # a compiled loop takes plain words
    count, seed, originals, sizes, area_end, offsets, valid, stack, result, ended
):
    """Damage a text, cut it in two, and look at both parts; `ended` counts how it went."""
    random = np.array([np.uint64(seed)])
    for k in range(count):
        which = next_random(random) % len(sizes)
        size = sizes[which]
        base = area_end - size
        copy(base, originals[which], size)
        if k % 8:
            mutate(base, size, random)
        cut = next_random(random) % (size + 1) if k % 2 else 0
        store_32(offsets, 0)
        store_32(offsets + 4, cut)
        store_32(offsets + 8, size)
        store_8(valid, k % 2)
        store_8(valid + 1, 1)
        ended[0 if find_not_utf8(offsets, base, 0, 2, result) == NOT_UTF8 else 1] += 1
        status = find_not_json(offsets, base, valid, 0, 2, stack, result)
        ended[2 if status == ALL_GOOD else 3 if status == TOO_DEEP else 4] += 1


def main(count: int) -> None:
    kept = [np.frombuffer(text, np.uint8) for text in TEXTS]
    data, offsets, valid = BoundedBuffer(max(map(len, TEXTS))), BoundedBuffer(12), BoundedBuffer(2)
    stack, result = BoundedBuffer(DEPTH_MAX), BoundedBuffer(8 * RESULT_WORDS)
    ended = np.zeros(5, np.int64)
    rounds(
        *(count, 88172645463325252),
        *(np.array([one.ctypes.data for one in kept]), np.array([one.size for one in kept])),
        *(data.end, offsets.address, valid.address, stack.address, result.address, ended),
    )
    names = ("not utf8", "utf8", "json", "too deep", "not json")
    everything = (data, offsets, valid, stack, result)
    report = dict(zip(names, ended.tolist(), strict=True))
    report["canaries"] = all(area.untouched_before() for area in everything)
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]))
