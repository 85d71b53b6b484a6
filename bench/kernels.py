"""Measure the kernels on one core, data in memory: MB/s and million records/s, best of many calls.

    python bench/kernels.py [--json] [--seconds S]

Each call gets one response of 2 MB in batches of 500 kB, as a fetch returns it, fresh in the cache.
A record has a key of 16 bytes and a JSON-like value. MB/s counts bytes of record batches on the
wire, also for NDJSON, so that all lines compare; for compressed batches it counts the
decompressed bytes. "CRC" includes the checksums; "decode" ends in columns, "to Arrow" in an Arrow
record batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa

from logmirror.model import ColumnTypes
from logmirror.wire.columns import SCHEMA, ContentDigest
from logmirror.wire.compression import Codec
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.gate import first_refused
from logmirror.wire.kernels_crc32c import crc32c_at
from logmirror.wire.ndjson import ndjson_pieces
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner, address_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit.runs.arrow_batches import encode_batches  # after the path is set

DATA_BYTES = 2_000_000
BATCH_BYTES = 500_000
END = 2**63 - 1
SHAPES = ((100, 0), (100, 2), (1024, 0))
WORDS = ("alpha", "bravo", "charlie", "delta", "order", "payment", "failed", "region", "europe")


def json_value(rng, index, size):
    text = f'{{"id":{index},"user":"user-{rng.integers(100_000):05d}","text":"'
    while len(text) < size - 2:
        text += f"{WORDS[rng.integers(len(WORDS))]} {rng.integers(1 << 32):08x} "
    return (text[: size - 2] + '"}').encode()


def record_rows(count, value_bytes, headers):
    """Return Arrow rows as the mirror decodes them."""
    rng = np.random.default_rng(7)
    pool = [json_value(rng, index, value_bytes) for index in range(1000)]
    pairs = [{"key": "trace-id", "value": b"0123456789abcdef"}, {"key": "ct", "value": b"json"}]
    columns = [
        pa.array([b"key-%012d" % index for index in range(count)]),
        pa.array([pool[index] for index in rng.integers(0, 1000, count)]),
        pa.repeat("orders", count),
        pa.array(np.zeros(count, np.int32)),
        pa.array(np.arange(count)),
        pa.array(1_700_000_000_000 + 3 * np.arange(count)).cast(SCHEMA.field("timestamp").type),
        pa.array(np.zeros(count, np.int32)),
        pa.array([pairs[:headers]] * count, SCHEMA.field("headers").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def best_seconds(call, budget_s):
    """Return the shortest of at least three calls, as many as the budget allows."""
    best, began, calls = float("inf"), time.perf_counter(), 0
    while calls < 3 or time.perf_counter() - began < budget_s:
        start = time.perf_counter()
        call()
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best


class Measured:
    """Collects the lines of the report."""

    def __init__(self, budget_s):
        self.budget_s = budget_s
        self.lines = []

    def add(self, shape, what, size, count, call):
        call()  # the first time touches fresh memory
        seconds = best_seconds(call, self.budget_s)
        self.lines.append(
            {
                "shape": shape,
                "what": what,
                "mb_per_s": round(size / seconds / 1e6),
                "million_records_per_s": round(count / seconds / 1e6, 2),
            }
        )


def drain(chunks, each=None):
    for columns in chunks:
        if each is not None:
            each(columns)


def measure_shape(measured, value_bytes, headers):
    shape = f"{value_bytes} B, {headers} headers"
    rows = record_rows(DATA_BYTES // value_bytes, value_bytes, headers)
    data = np.frombuffer(encode_batches(rows, batch_bytes=BATCH_BYTES), np.uint8)
    size, count = data.size, rows.num_rows
    scanner, decoder, out = BatchScanner(), RecordDecoder(), bytearray(2 << 20)

    def scan():
        return scanner.scan(data, size)

    def decode(each=None):
        drain(decoder.decode(data, scan(), first=0, end=END), each)

    def lines(columns, *, utf8):
        options = {"topic": "orders", "partition": 0, "out": out, "utf8": utf8}
        for _ in ndjson_pieces(columns, 0, columns.rows, **options):
            pass

    def digest(columns):
        ContentDigest().update(columns, 0, columns.rows)

    def add(what, call):
        measured.add(shape, what, size, count, call)

    add("scan, CRC", scan)
    add("scan, CRC, decode", decode)
    add("scan, CRC, decode, to Arrow", lambda: decode(lambda c: c.to_arrow("orders", 0)))
    columns = next(decoder.decode(data, scan(), first=0, end=END))
    add("digest", lambda: digest(columns))
    for kind in ("utf8", "json-parseable"):
        types = ColumnTypes(value=kind)
        add(f"gate, {kind}", lambda types=types: first_refused(columns, types))
    add("NDJSON, base64", lambda: lines(columns, utf8=False))
    add("NDJSON, text", lambda: lines(columns, utf8=True))


def measure_codecs(measured, value_bytes=1024, count=2000):
    """Measure compressed batches of 1000 records."""
    rows = record_rows(count, value_bytes, 0).to_pylist()
    records = [Record(r["offset"], 0, 0, r["key"], r["value"], ()) for r in rows]
    plain = len(encode_reference(records[:1000])) * count // 1000
    scanner, decoder = BatchScanner(), RecordDecoder()
    for codec in list(Codec)[1:]:
        data = b"".join(
            encode_reference(records[at : at + 1000], codec=codec) for at in range(0, count, 1000)
        )

        def decode(data=data):
            drain(decoder.decode(data, scanner.scan(data, len(data)), first=0, end=END))

        shape = f"{value_bytes} B, {codec.name.lower()}"
        measured.add(shape, "scan, CRC, decompress, decode", plain, count, decode)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each line")
    arguments = parser.parse_args()
    measured = Measured(arguments.seconds)
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    measured.add(
        "1 MiB", "CRC-32C alone", noise.size, 0, lambda: crc32c_at(address_of(noise), noise.size)
    )
    for value_bytes, headers in SHAPES:
        measure_shape(measured, value_bytes, headers)
    measure_codecs(measured)
    versions = {
        "python": platform.python_version(),
        "numba": numba.__version__,
        "pyarrow": pa.__version__,
        "machine": platform.machine(),
    }
    if arguments.json:
        print(json.dumps({"versions": versions, "lines": measured.lines}))
        return
    print(" ".join(f"{name} {version}" for name, version in versions.items()))
    for line in measured.lines:
        print(
            f"{line['shape']:20} {line['what']:30} {line['mb_per_s']:8} MB/s "
            f"{line['million_records_per_s']:8.2f} M records/s"
        )


if __name__ == "__main__":
    main()
