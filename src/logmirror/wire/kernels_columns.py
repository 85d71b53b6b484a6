"""Where kernels find the columns of decoded records: the context, an int64 array of 25 words.

The constants are byte offsets into the context. Words 0-6 are fill levels, which a kernel reads at
its start and writes back at its end; 7-9 are capacities; the rest are addresses.

Arrays behind the addresses, for `rows` records with `headers` headers in all:

    offsets, timestamps           int64[rows]
    timestamp types               int32[rows]
    key, value, header offsets    int32[rows + 1], the last entry closes the last row
    header key, value offsets     int32[headers + 1], alike
    key, value, header value valid   uint8[rows], uint8[headers]; 0: null, and then empty
    data                          uint8[BYTES_MAX + SLACK]

USED_BYTES sums the bodies of the records held. A record's key, value and headers cannot be larger
than its body, so `USED_BYTES <= BYTES_MAX` keeps all four data arrays within their bounds at once.
"""

from __future__ import annotations

from typing import Final

ROWS: Final = 0
KEY_BYTES: Final = 8
VALUE_BYTES: Final = 16
HEADERS: Final = 24
HEADER_KEY_BYTES: Final = 32
HEADER_VALUE_BYTES: Final = 40
USED_BYTES: Final = 48

ROWS_MAX: Final = 56
HEADERS_MAX: Final = 64
BYTES_MAX: Final = 72

OFFSETS: Final = 80
TIMESTAMPS: Final = 88
TIMESTAMP_TYPES: Final = 96
KEY_OFFSETS: Final = 104
KEY_DATA: Final = 112
KEY_VALID: Final = 120
VALUE_OFFSETS: Final = 128
VALUE_DATA: Final = 136
VALUE_VALID: Final = 144
HEADER_OFFSETS: Final = 152
HEADER_KEY_OFFSETS: Final = 160
HEADER_KEY_DATA: Final = 168
HEADER_VALUE_OFFSETS: Final = 176
HEADER_VALUE_DATA: Final = 184
HEADER_VALUE_VALID: Final = 192

CONTEXT_WORDS: Final = 25

# How a kernel ends. Positive: nothing is wrong, the caller has something to do.
DONE: Final = 0
FULL: Final = 1
COMPRESSED: Final = 2
BAD_LENGTH: Final = -1
BAD_MAGIC: Final = -2
BAD_CRC: Final = -3
BAD_COUNT: Final = -4
BAD_LAST_OFFSET_DELTA: Final = -5
BAD_BASE_OFFSET: Final = -6
BAD_CODEC: Final = -7
BAD_MARKER: Final = -8
BAD_RECORD: Final = -9
BAD_OFFSET_DELTA: Final = -10
OLD_MAGIC: Final = -11

WHY: Final = {
    BAD_LENGTH: "length",
    BAD_MAGIC: "magic",
    BAD_CRC: "crc",
    BAD_COUNT: "count",
    BAD_LAST_OFFSET_DELTA: "last-offset-delta",
    BAD_BASE_OFFSET: "base-offset",
    BAD_CODEC: "codec",
    BAD_MARKER: "marker",
    BAD_RECORD: "record",
    BAD_OFFSET_DELTA: "offset-delta",
}
"""The fact `why` of the error that a status becomes."""
