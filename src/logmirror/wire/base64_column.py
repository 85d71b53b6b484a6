"""Columns of base64 texts -> columns of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from logmirror.wire.kernels_base64 import decode_texts


def decode_column(texts: Any) -> tuple[Any, int | None]:  # noqa: ANN401  # pyarrow has no types
    """Decode base64 with padding (RFC 4648, standard alphabet); nulls stay null.

    Args:
        texts: An Arrow array of type string that is valid as Arrow.

    Returns:
        An array of type binary, and the first row with a text that is not canonical, or None.
    """
    rows = len(texts)
    if not rows:
        return pa.nulls(0, pa.binary()), None
    valid = texts.is_valid().to_numpy(zero_copy_only=False).astype(np.uint8)
    _, offsets, data = texts.buffers()
    edges = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + rows + 1]
    text = np.frombuffer(data or b"\0", np.uint8)
    made = np.empty(int(edges[-1] - edges[0]) // 4 * 3 + 1, np.uint8)
    made_edges = np.empty(rows + 1, np.int32)
    bad = decode_texts(
        edges.ctypes.data,
        text.ctypes.data,
        valid.ctypes.data,
        rows,
        made_edges.ctypes.data,
        made.ctypes.data,
    )
    if bad < rows:
        return None, bad
    validity = pa.py_buffer(np.packbits(valid, bitorder="little")) if texts.null_count else None
    buffers = [validity, pa.py_buffer(made_edges), pa.py_buffer(made)]
    return pa.Array.from_buffers(pa.binary(), rows, buffers), None
