"""Padding: batches of empty records that fill the offsets below a source's log start."""

from __future__ import annotations

from typing import Final

import numpy as np

from logmirror.errors import InternalError
from logmirror.wire.compression import Codec, compress
from logmirror.wire.kernels_encode import BATCH_HEADER_BYTES
from logmirror.wire.kernels_padding import put_empty_records, put_header
from logmirror.wire.scan import address_of, as_bytes_array

_RECORDS_MAX: Final = 1_000_000
_RECORD_BYTES_MAX: Final = 11


def padding(count: int, *, timestamp_ms: int) -> bytes:
    """Return one gzip batch of `count` records without key, value, headers and producer."""
    if not 0 < count <= _RECORDS_MAX:
        raise InternalError("record count of a padding batch is out of range", count=count)
    records = np.empty(_RECORD_BYTES_MAX * count, np.uint8)
    size = put_empty_records(address_of(records), records.size, count)
    packed = as_bytes_array(compress(Codec.GZIP, records[:size].data))
    batch = np.empty(BATCH_HEADER_BYTES + packed.size, np.uint8)
    batch[BATCH_HEADER_BYTES:] = packed
    put_header(address_of(batch), batch.size, timestamp_ms, Codec.GZIP, count)
    return batch.tobytes()
