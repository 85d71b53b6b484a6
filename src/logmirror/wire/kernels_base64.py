"""Base64 with padding (RFC 4648, standard alphabet) -> bytes. Only canonical texts are accepted."""

from __future__ import annotations

from typing import Final

import numpy as np

from logmirror.wire.kernels_address import inlined, kernel, load_i32, load_u8, store_8, store_32

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_NONE: Final = 64
_PADDING: Final = 61  # =

_SEXTETS: Final = np.full(256, _NONE, np.int64)
_SEXTETS[np.frombuffer(_ALPHABET, np.uint8)] = np.arange(64)


@inlined
def _decode_text(position: int, end: int, out: int) -> int:
    """Decode one text; returns the number of bytes, -1 if the text is not canonical."""
    begin = out
    if (end - position) & 3:
        return -1
    while position < end:
        a, b = _SEXTETS[load_u8(position)], _SEXTETS[load_u8(position + 1)]
        c, d = _SEXTETS[load_u8(position + 2)], _SEXTETS[load_u8(position + 3)]
        position += 4
        if (a | b | c | d) < _NONE:
            store_8(out, (a << 2) | (b >> 4))
            store_8(out + 1, (b << 4) | (c >> 2))
            store_8(out + 2, (c << 6) | d)
            out += 3
            continue
        # Padding ends the text, and the bits before it that mean nothing are 0.
        if position != end or (a | b) >= _NONE or load_u8(position - 1) != _PADDING:
            return -1
        store_8(out, (a << 2) | (b >> 4))
        if load_u8(position - 2) == _PADDING:
            return -1 if b & 15 else out + 1 - begin
        if c >= _NONE or c & 3:
            return -1
        store_8(out + 1, (b << 4) | (c >> 2))
        return out + 2 - begin
    return out - begin


@kernel("int64(int64,int64,int64,int64,int64,int64)")
def decode_texts(  # noqa: PLR0913, PLR0917  # addresses: what is read, and where it goes
    edges: int, text: int, valid: int, rows: int, out_edges: int, out: int
) -> int:
    """Decode texts; returns `rows`, or the first row that no encoder writes.

    Args:
        edges: Address of int32[rows + 1], ascending, into `text`.
        text: Address of the characters.
        valid: Address of uint8[rows]; 0: null, which makes no bytes whatever its slot holds.
        rows: How many.
        out_edges: Address of int32[rows + 1], filled: where each row's bytes begin and end.
        out: Address of 3 bytes for each 4 characters.
    """
    filled = 0
    store_32(out_edges, 0)
    for row in range(rows):
        if load_u8(valid + row):
            begin, end = load_i32(edges + 4 * row), load_i32(edges + 4 * row + 4)
            size = _decode_text(text + begin, text + end, out + filled)
            if size < 0:
                return row
            filled += size
        store_32(out_edges + 4 * row + 4, filled)
    return rows
