"""Kafka's five codecs, with a limit for the decompressed size.

A small batch may decompress to gigabytes. Every decoder has a limit for its output and stops there.
No buffer is allocated from a size in the data that exceeds what the codec can produce from that
many input bytes. The time is bounded, too: data of many tiny parts (gzip members, zstd frames,
snappy blocks) takes about as long as ordinary data, or is refused.

Besides the plain formats, Kafka's clients write: snappy raw (librdkafka) or in xerial's frame
(Java), gzip with several members, zstd without a content size (Java streams it).

Xerial's frame: 8 bytes magic, int32 version, int32 lowest compatible version, then blocks of
int32 length and that many bytes of raw snappy; all big-endian.
"""

from __future__ import annotations

import enum
import io
import struct
from typing import TYPE_CHECKING, Final

import cramjam
import lz4.frame
import zstandard
from isal import igzip, isal_zlib

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from typing import TypeAlias

    Bytes: TypeAlias = bytes | bytearray | memoryview


class Codec(enum.IntEnum):
    """Compression of a batch's records: bits 0-2 of its attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_GZIP_WBITS: Final = 31
_GZIP_MAGIC: Final = b"\x1f\x8b"
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD: Final = 16
_SNAPPY_RATIO: Final = 22
"""Snappy's densest element is a copy of 64 bytes in 3."""

_ZSTD_WINDOW_MAX: Final = 1 << 27
"""The largest window that zstd decoders, including Java's, accept by default."""

_ZSTD_BLOCK_MAX: Final = 1 << 17
_ZSTD_BLOCK_HEAD: Final = 3
_ZSTD_RLE: Final = 1
_ZSTD_COMPRESSED: Final = 2
_SPARE_PARTS: Final = 16_384
_PART_BYTES: Final = 1024
"""Limit for zstd frames and snappy blocks: 16,384, and one more per KiB of output. Each costs
microseconds; writers make parts of 32 KiB and more, or a single one."""

_GZIP_READ_BYTES: Final = 1024 * 1024


def decompress(codec: Codec, data: Bytes, *, max_bytes: int) -> Bytes:
    """Decompress the records of one batch.

    Args:
        codec: The codec; `Codec.NONE` returns the data.
        data: The compressed records.
        max_bytes: Limit for the output.

    Returns:
        The output, bytes-like. Treat it as read-only.

    Raises:
        CorruptionError: The data is malformed, truncated or followed by other bytes, or exceeds
            `max_bytes` when decompressed (facts `codec`, `max_bytes`, `why`); see `is_over_limit`.
    """
    return Decompressor().decompress(codec, data, max_bytes=max_bytes)


def compress(codec: Codec, data: Bytes) -> Bytes:
    """Compress like a stock producer, at a fast level; snappy without a frame."""
    if codec is Codec.GZIP:
        packed: bytes = isal_zlib.compress(data, level=1, wbits=_GZIP_WBITS)
        return packed
    if codec is Codec.SNAPPY:
        return bytes(cramjam.snappy.compress_raw(data))
    if codec is Codec.LZ4:
        # Kafka's Java reader refuses frames with linked blocks.
        framed: bytes = lz4.frame.compress(data, block_linked=False)
        return framed
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=3).compress(data)
    return data


class Decompressor:
    """`decompress` with a reused zstd context. Not thread-safe."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)

    def decompress(self, codec: Codec, data: Bytes, *, max_bytes: int) -> Bytes:
        """See the function of the same name."""
        try:
            if codec is Codec.NONE:
                output = data
            elif codec is Codec.GZIP:
                output = _gunzip(data, max_bytes)
            elif codec is Codec.SNAPPY:
                output = _unsnappy(data, max_bytes)
            elif codec is Codec.LZ4:
                output = _unlz4(data, max_bytes)
            else:
                output = self._unzstd(data, max_bytes)
        except _BadDataError as error:
            raise _corrupt(codec, max_bytes, str(error)) from error
        if len(output) > max_bytes:
            raise _corrupt(codec, max_bytes, _OVER)
        return output

    def _unzstd(self, data: Bytes, max_bytes: int) -> Bytes:
        """Frame by frame, each in one call, which needs no window however large it claims."""
        view, left = memoryview(data), max_bytes
        outputs: list[bytes] = []
        if not view:
            raise _BadDataError(_CUT_OFF)
        while view:
            size, bound, exact = _measure_zstd_frame(view)
            if exact and bound > left:
                raise _BadDataError(_OVER)
            try:
                # One byte more than allowed, to distinguish reaching the limit from exceeding it.
                room = max(1, min(bound, left + 1))
                output = self._zstd.decompress(view[:size], max_output_size=room)
            except zstandard.ZstdError as error:
                raise _BadDataError(_OVER if bound > left else str(error)) from error
            left -= len(output)
            if left < 0:
                raise _BadDataError(_OVER)
            outputs.append(output)
            _check_parts(len(outputs), max_bytes - left)
            view = view[size:]
        return outputs[0] if len(outputs) == 1 else b"".join(outputs)


class _BadDataError(Exception):
    """Internal: the data cannot be decompressed; the text is the fact `why`."""


_OVER: Final = "more output than allowed"
_CUT_OFF: Final = "cut off"
_BEHIND: Final = "bytes behind the end"


def is_over_limit(error: CorruptionError) -> bool:
    """Whether `decompress` failed because of its limit. The data may be whole."""
    return error.facts.get("why") == _OVER


def _corrupt(codec: Codec, max_bytes: int, why: str) -> CorruptionError:
    return CorruptionError(
        "records cannot be decompressed", codec=codec.name.lower(), max_bytes=max_bytes, why=why
    )


def _check_parts(count: int, output_bytes: int) -> None:
    if count > _SPARE_PARTS + output_bytes // _PART_BYTES:
        raise _BadDataError("too many small parts")


def _gunzip(data: Bytes, max_bytes: int) -> Bytes:
    member = isal_zlib.decompressobj(wbits=_GZIP_WBITS)
    try:
        output: bytes = member.decompress(data, max_bytes + 1)
    except isal_zlib.error as error:  # type: ignore[misc]  # its stub does not say it is one
        raise _BadDataError(str(error)) from error
    if len(output) > max_bytes:
        raise _BadDataError(_OVER)
    if not member.eof:
        raise _BadDataError(_CUT_OFF)
    if not member.unused_data:
        return output
    if not member.unused_data.startswith(_GZIP_MAGIC):
        raise _BadDataError(_BEHIND)
    return b"".join([output, *_gunzip_more(member.unused_data, max_bytes - len(output))])


def _gunzip_more(data: bytes, max_bytes: int) -> list[bytes]:
    """Further members, in one pass: `decompressobj` would copy all the rest at each member."""
    outputs, left = [], max_bytes
    with igzip.IGzipFile(fileobj=io.BytesIO(data)) as reader:  # type: ignore[no-untyped-call]  # untyped
        try:
            while output := reader.read(min(left + 1, _GZIP_READ_BYTES)):
                left -= len(output)
                if left < 0:
                    raise _BadDataError(_OVER)
                outputs.append(output)
        except EOFError as error:
            raise _BadDataError(_CUT_OFF) from error
        except (OSError, isal_zlib.error) as error:  # type: ignore[misc]  # as in `_gunzip`
            raise _BadDataError(str(error)) from error
    return outputs


def _unlz4(data: Bytes, max_bytes: int) -> Bytes:
    decoder = lz4.frame.LZ4FrameDecompressor()
    try:
        output: bytes = decoder.decompress(data, max_length=max_bytes + 1)
    except (RuntimeError, EOFError) as error:
        raise _BadDataError(str(error)) from error
    if len(output) > max_bytes:
        raise _BadDataError(_OVER)
    if not decoder.eof:
        raise _BadDataError(_CUT_OFF)
    if decoder.unused_data:
        raise _BadDataError(_BEHIND)
    return output


def _unsnappy(data: Bytes, max_bytes: int) -> Bytes:
    view = memoryview(data)
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        return _unsnappy_blocks([view], max_bytes)
    if len(view) < _XERIAL_HEAD:
        raise _BadDataError(_CUT_OFF)
    blocks, position = [], _XERIAL_HEAD
    while position < len(view):
        if position + 4 > len(view):
            raise _BadDataError(_CUT_OFF)
        (size,) = struct.unpack_from(">i", view, position)
        position += 4
        if not 0 < size <= len(view) - position:
            raise _BadDataError("block length is out of bounds")
        blocks.append(view[position : position + size])
        position += size
    return _unsnappy_blocks(blocks, max_bytes)


def _unsnappy_blocks(blocks: list[memoryview], max_bytes: int) -> Bytes:
    """Raw blocks into one buffer, which is made only after every claimed length was believed."""
    sizes = [_snappy_claim(block) for block in blocks]
    if sum(sizes) > max_bytes:
        raise _BadDataError(_OVER)
    _check_parts(len(sizes), sum(sizes))
    output = bytearray(sum(sizes))
    position = 0
    with memoryview(output) as target:
        for block, size in zip(blocks, sizes, strict=True):
            try:
                written = cramjam.snappy.decompress_raw_into(
                    block, target[position : position + size]
                )
            except cramjam.DecompressionError as error:
                raise _BadDataError(str(error)) from error
            if written != size:
                raise _BadDataError("block is shorter than it claims")
            position += size
    return output


def _snappy_claim(block: memoryview) -> int:
    """The output length that a raw block claims, if its input could reach it."""
    claim = 0
    for index, byte in enumerate(block[:5]):
        claim |= (byte & 0x7F) << (7 * index)
        if byte <= 0x7F:  # noqa: PLR2004  # the continuation bit
            if claim > _SNAPPY_RATIO * len(block):
                raise _BadDataError("block claims more than its bytes can hold")
            return claim
    raise _BadDataError(_CUT_OFF)


def _measure_zstd_frame(view: memoryview) -> tuple[int, int, bool]:
    """The first frame: its size, a bound on its output, and whether that bound is exact."""
    try:
        head = zstandard.get_frame_parameters(view)
        position = zstandard.frame_header_size(view)
    except zstandard.ZstdError as error:
        raise _BadDataError(str(error)) from error
    if head.window_size > _ZSTD_WINDOW_MAX and head.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        raise _BadDataError("window is too large")
    bound = last = 0
    while not last:
        if position + _ZSTD_BLOCK_HEAD > len(view):
            raise _BadDataError(_CUT_OFF)
        word = int.from_bytes(view[position : position + _ZSTD_BLOCK_HEAD], "little")
        last, kind, size = word & 1, (word >> 1) & 3, word >> 3
        bound += _ZSTD_BLOCK_MAX if kind == _ZSTD_COMPRESSED else size
        position += _ZSTD_BLOCK_HEAD + (1 if kind == _ZSTD_RLE else size)
    position += 4 if head.has_checksum else 0
    if position > len(view):
        raise _BadDataError(_CUT_OFF)
    if head.content_size == zstandard.CONTENTSIZE_UNKNOWN:
        return position, bound, False
    if head.content_size > bound:
        raise _BadDataError("frame claims more than its blocks can hold")
    return position, head.content_size, True
