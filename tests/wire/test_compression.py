"""Every codec is decompressed exactly or refused; a bomb never exceeds the limit.

Method: input from several libraries, with both snappy framings and from streaming encoders. Each is
truncated, extended, and decompressed with a limit one byte too low. Bombs are built per codec and
decompressed while the memory of interpreter and process is measured.
"""

import contextlib
import gzip
import resource
import struct
import time
import tracemalloc
import zlib

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import relaxed
from logmirror.errors import CorruptionError
from logmirror.wire.compression import Codec, Decompressor, compress, decompress

TEXT = b"".join(b"line %d of a text that repeats itself\n" % i for i in range(6000))
MIB = 1 << 20


def xerial(data, block_bytes=32 * 1024):
    out = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
    for at in range(0, len(data), block_bytes):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + block_bytes]))
        out += struct.pack(">i", len(block)) + block
    return out


def xerial_block(block, claim=None):
    return struct.pack(">i", len(block) if claim is None else claim) + block


def zstd_streamed(data, **options):
    encoder = zstandard.ZstdCompressor(**options).compressobj()
    return encoder.compress(data) + encoder.flush()


ENCODED = {
    "gzip, ours": (Codec.GZIP, compress(Codec.GZIP, TEXT)),
    "gzip, zlib": (Codec.GZIP, gzip.compress(TEXT)),
    "gzip, two members": (Codec.GZIP, gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])),
    "snappy, raw": (Codec.SNAPPY, compress(Codec.SNAPPY, TEXT)),
    "snappy, xerial": (Codec.SNAPPY, xerial(TEXT)),
    "snappy, xerial in small blocks": (Codec.SNAPPY, xerial(TEXT, 700)),
    "lz4": (Codec.LZ4, compress(Codec.LZ4, TEXT)),
    "lz4, checksums, independent blocks": (
        Codec.LZ4,
        lz4.frame.compress(
            TEXT, block_linked=False, content_checksum=True, block_checksum=True, store_size=False
        ),
    ),
    "zstd, size known": (Codec.ZSTD, compress(Codec.ZSTD, TEXT)),
    "zstd, streamed": (Codec.ZSTD, zstd_streamed(TEXT)),
    "zstd, checksum": (Codec.ZSTD, zstd_streamed(TEXT, write_checksum=True)),
    "zstd, two frames": (Codec.ZSTD, zstd_streamed(TEXT[:99]) + compress(Codec.ZSTD, TEXT[99:])),
}
encodings = pytest.mark.parametrize(("codec", "data"), ENCODED.values(), ids=ENCODED)


@encodings
@pytest.mark.mirror_v3("KAF-04")
def test_every_encoding_is_undone_at_exactly_the_cap(codec, data):
    assert bytes(decompress(codec, data, max_bytes=len(TEXT))) == TEXT
    assert bytes(decompress(codec, bytearray(data), max_bytes=MIB)) == TEXT
    assert bytes(decompress(codec, memoryview(data), max_bytes=MIB)) == TEXT


@encodings
def test_one_byte_more_than_the_cap_is_refused(codec, data):
    with pytest.raises(CorruptionError) as caught:
        decompress(codec, data, max_bytes=len(TEXT) - 1)
    assert caught.value.facts == {
        "codec": codec.name.lower(),
        "max_bytes": len(TEXT) - 1,
        "why": "more output than allowed",
    }


@encodings
def test_data_cut_off_anywhere_is_refused_and_never_shortened(codec, data):
    for end in [*range(min(40, len(data))), len(data) // 2, *range(len(data) - 12, len(data))]:
        try:
            output = bytes(decompress(codec, data[:end], max_bytes=MIB))
        except CorruptionError:
            continue
        # Only between two parts that each end by themselves does a cut leave whole data.
        assert codec in {Codec.GZIP, Codec.ZSTD, Codec.SNAPPY}
        assert data[:end] in _whole_beginnings(codec), (end, len(output))


def _whole_beginnings(codec):
    """Data that is complete before its end: xerial's frame without a block."""
    return {xerial(b"")} if codec is Codec.SNAPPY else set()


@encodings
def test_bytes_behind_the_end_are_refused(codec, data):
    with pytest.raises(CorruptionError):
        decompress(codec, data + b"\x00\x01\x02", max_bytes=MIB)


@relaxed
@given(st.sampled_from(Codec), st.binary(max_size=2000))
def test_round_trip(codec, data):
    assert bytes(decompress(codec, compress(codec, data), max_bytes=max(1, len(data)))) == data


@relaxed
@given(st.sampled_from(list(Codec)[1:]), st.binary(max_size=100))
def test_garbage_is_refused_or_undone_within_the_cap(codec, data):
    with contextlib.suppress(CorruptionError):
        assert len(decompress(codec, data, max_bytes=4096)) <= 4096


@relaxed
@given(st.sampled_from(sorted(ENCODED)), st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_undone_within_the_cap(name, at, bit):
    codec, data = ENCODED[name]
    spoiled = bytearray(data)
    spoiled[at % len(data)] ^= 1 << bit
    with contextlib.suppress(CorruptionError):
        assert len(decompress(codec, spoiled, max_bytes=MIB)) <= MIB


EMPTY_ZSTD = zstandard.compress(b"")
TINY_PARTS = {
    "gzip members": (Codec.GZIP, b"", gzip.compress(b"")),
    "zstd frames": (Codec.ZSTD, b"", EMPTY_ZSTD),
    "snappy blocks": (Codec.SNAPPY, xerial(b""), xerial_block(b"\x01\x00x")),
}


@pytest.mark.parametrize(("codec", "head", "part"), TINY_PARTS.values(), ids=TINY_PARTS)
def test_the_cost_of_data_of_tiny_parts_grows_with_their_number(codec, head, part):
    """Eight times the parts take about eight times the CPU time, not 64 times."""

    def cpu_s(count):
        data = head + part * count
        began = time.thread_time()
        with contextlib.suppress(CorruptionError):
            assert len(decompress(codec, data, max_bytes=MIB)) < MIB
        return time.thread_time() - began

    most = MIB // len(part)
    cpu_s(10)  # compiles
    taken = [(cpu_s(most // 8), cpu_s(most)) for _ in range(8)]

    assert min(many for _, many in taken) < 32 * min(few for few, _ in taken)


def test_two_gzip_members_cut_anywhere_are_refused_but_between_them():
    first, second = gzip.compress(TEXT[:100]), gzip.compress(TEXT[100:200])
    data = first + second
    for end in range(len(data)):
        if end == len(first):
            assert bytes(decompress(Codec.GZIP, data[:end], max_bytes=MIB)) == TEXT[:100]
            continue
        with pytest.raises(CorruptionError):
            decompress(Codec.GZIP, data[:end], max_bytes=MIB)


@pytest.mark.parametrize("at", [3, 100, -1, -5])
def test_a_damaged_second_gzip_member_is_refused(at):
    first, second = gzip.compress(TEXT[:100]), bytearray(gzip.compress(TEXT))
    second[at] ^= 0xFF

    with pytest.raises(CorruptionError):
        decompress(Codec.GZIP, first + second, max_bytes=MIB)


def zstd_repeats(blocks):
    """A frame without size whose every 4-byte block unfolds to 128 KiB."""
    head = bytes.fromhex("28b52ffd") + bytes([0x00, 17 - 10 << 3])  # window 128 KiB
    block = (1 << 17) << 3 | 1 << 1  # repeat one byte 2^17 times
    body = b"".join(struct.pack("<I", block)[:3] + b"x" for _ in range(blocks - 1))
    return head + body + struct.pack("<I", block | 1)[:3] + b"x"


def zstd_claims(content_size):
    """A frame that names its size, with one small raw block."""
    head = bytes.fromhex("28b52ffd") + bytes([0xE0]) + struct.pack("<Q", content_size)
    return head + struct.pack("<I", 4 << 3 | 1)[:3] + b"abcd"


def zstd_window(exponent):
    """A streamed frame that asks for a window of 2^exponent bytes."""
    return bytes.fromhex("28b52ffd") + bytes([0, exponent - 10 << 3]) + b"\x21\x00\x00abcd"


def gzip_zeros(mebibytes):
    deflater = zlib.compressobj(1, zlib.DEFLATED, 31)
    zeros = bytes(MIB)
    return b"".join(deflater.compress(zeros) for _ in range(mebibytes)) + deflater.flush()


def snappy_zeros(mebibytes):
    return bytes(cramjam.snappy.compress_raw(bytes(mebibytes * MIB)))


# Built when their test runs, not when tests are collected.
BOMBS = {
    "gzip, 256 MiB": (Codec.GZIP, lambda: gzip_zeros(256)),
    "gzip, many members": (Codec.GZIP, lambda: gzip.compress(bytes(MIB)) * 1024),
    "snappy, claims 4 GiB": (Codec.SNAPPY, lambda: b"\xff\xff\xff\xff\x0f" + b"\xfe\1\0" * 100),
    "snappy, dense": (Codec.SNAPPY, lambda: snappy_zeros(64)),
    "snappy, xerial of dense blocks": (
        Codec.SNAPPY,
        lambda: xerial(b"") + xerial_block(snappy_zeros(32)) * 32,
    ),
    "snappy, xerial block of 2 GiB": (
        Codec.SNAPPY,
        lambda: xerial(b"") + xerial_block(b"x" * 50, 2**31 - 1),
    ),
    "snappy, xerial block of -1": (Codec.SNAPPY, lambda: xerial(b"") + xerial_block(b"x", -1)),
    "lz4, 256 MiB": (Codec.LZ4, lambda: lz4.frame.compress(bytes(256 * MIB))),
    "zstd, repeats to 1 GiB": (Codec.ZSTD, lambda: zstd_repeats(8192)),
    "zstd, many frames": (Codec.ZSTD, lambda: zstandard.compress(bytes(MIB)) * 1024),
    "zstd, claims 2^62": (Codec.ZSTD, lambda: zstd_claims(2**62)),
    "zstd, claims more than its blocks": (Codec.ZSTD, lambda: zstd_claims(MIB)),
    "zstd, window of 2 GiB": (Codec.ZSTD, lambda: zstd_window(31)),
}


@pytest.mark.parametrize(("codec", "build"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(codec, build):
    cap, bomb = 2 * MIB, build()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError) as caught:
            decompress(codec, bomb, max_bytes=cap)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert caught.value.facts["codec"] == codec.name.lower()
    assert peak < 4 * cap
    assert grown_kib < 64 * 1024


def test_the_repeating_frame_is_a_legal_one():
    """Else its refusal above would prove nothing."""
    assert bytes(decompress(Codec.ZSTD, zstd_repeats(3), max_bytes=MIB)) == b"x" * 3 * (1 << 17)


def test_a_window_that_java_would_refuse_is_refused():
    with pytest.raises(CorruptionError) as caught:
        decompress(Codec.ZSTD, zstd_window(28), max_bytes=MIB)
    assert caught.value.facts["why"] == "window is too large"
    assert bytes(decompress(Codec.ZSTD, zstd_window(27), max_bytes=MIB)) == b"abcd"


def test_one_decompressor_serves_many_calls_of_all_codecs():
    decompressor = Decompressor()
    for _ in range(3):
        for codec, data in ENCODED.values():
            assert bytes(decompressor.decompress(codec, data, max_bytes=MIB)) == TEXT
            with pytest.raises(CorruptionError):
                decompressor.decompress(codec, data[:-1], max_bytes=MIB)
