"""Decode one compressed batch and write it as NDJSON; print how much memory that took.

With one argument, the size of a value in bytes: prints a batch that holds it. With `measure` and
the encoding, `base64` or `utf8`: reads such a batch and prints one JSON object: `wire_bytes`,
`text_bytes`, and `growth_bytes`, the growth of the peak resident memory.
"""

import json
import resource
import sys

from logmirror.archive.envelope import NdjsonEncoder
from logmirror.model import TimestampType
from logmirror.wire.compression import Codec
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner


class Counting:
    """Discards what is written."""

    def __init__(self):
        self.size = 0

    def write(self, data):
        self.size += len(data)
        return len(data)


def batch(size):
    row = Record(0, 0, TimestampType.CREATE_TIME, None, b"x" * size, ())
    return encode_reference([row], codec=Codec.ZSTD)


def run(data, encoding):
    listed, target = BatchScanner().scan(data, len(data)), Counting()
    encoder = NdjsonEncoder(target, topic="t", partition=0, utf8=encoding == "utf8")
    for columns in RecordDecoder().decode(data, listed, first=0, end=1):
        encoder.append(columns)
    return target.size


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.stdout.buffer.write(batch(int(sys.argv[1])))
    else:
        run(batch(1000), sys.argv[2])  # compiles
        data, before = sys.stdin.buffer.read(), peak_bytes()
        size = run(data, sys.argv[2])
        found = {"wire_bytes": len(data), "text_bytes": size, "growth_bytes": peak_bytes() - before}
        sys.stdout.write(json.dumps(found))
