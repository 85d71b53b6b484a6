"""The digest of each record of decoded columns, by which equal records are found.

Digests of one process can be compared with each other: they are under a secret that it draws, so
no client can make two records with one digest.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror.wire import kernels_rows as kernels
from logmirror.wire.scan import address_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from logmirror.wire.columns import Columns

_SECRET: Final = np.frombuffer(secrets.token_bytes(16), np.int64)


class RowDigests(NamedTuple):
    """Shape (rows, 2) each."""

    records: npt.NDArray[np.int64]
    """Of timestamp, key, value and headers."""

    keys: npt.NDArray[np.int64]


def row_digests(columns: Columns) -> RowDigests:
    """Return the digests of all rows."""
    rows = columns.rows
    found = RowDigests(np.empty((rows, 2), np.int64), np.empty((rows, 2), np.int64))
    state = np.zeros(kernels.STATE_WORDS, np.int64)
    state[kernels.ROWS // 8] = rows
    state[kernels.TIMESTAMPS // 8] = address_of(columns.timestamps_ms)
    state[kernels.HEADER_EDGES // 8] = address_of(columns.header_offsets)
    for place, name in (
        (kernels.KEYS, "key"),
        (kernels.VALUES, "value"),
        (kernels.HEADER_KEYS, "header_key"),
        (kernels.HEADER_VALUES, "header_value"),
    ):
        valid = getattr(columns, f"{name}_valid", None)
        state[place // 8 : place // 8 + 3] = (
            address_of(getattr(columns, f"{name}_offsets")),
            address_of(getattr(columns, f"{name}_data")),
            0 if valid is None else address_of(valid),
        )
    state[kernels.SECRET // 8 : kernels.SECRET // 8 + 2] = _SECRET
    kernels.digest_rows(address_of(state), address_of(found.records), address_of(found.keys))
    return found
