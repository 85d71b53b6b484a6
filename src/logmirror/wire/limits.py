"""Errors for legal batches and records that are larger than the configuration allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from logmirror.wire.compression import Codec

_HINT: Final = (
    "the source accepted it, so it is legal. To copy it, raise this limit in the configuration and "
    "give each slot the memory for it. Nothing was written past it."
)


def batch_too_large(*, offset: int, size: int, codec: Codec, limit_bytes: int) -> UsageError:
    """Return the error for a batch above `limits.max-batch-unpacked-bytes`.

    Args:
        offset: Its base offset.
        size: Its bytes at the source, compressed.
        codec: Its codec.
        limit_bytes: The limit.
    """
    return UsageError(
        "a batch is larger than `limits.max-batch-unpacked-bytes` when it is decompressed",
        hint=_HINT,
        offset=offset,
        batch_bytes=size,
        codec=codec.name.lower(),
        limit_bytes=limit_bytes,
    )


def record_too_large(*, offset: int, batch_offset: int, size: int, limit_bytes: int) -> UsageError:
    """Return the error for a record above `limits.max-record-bytes`.

    Args:
        offset: Its offset. If the log cleaner removed records before it, the first of theirs.
        batch_offset: The base offset of its batch.
        size: Its bytes.
        limit_bytes: The limit.
    """
    return UsageError(
        "a record is larger than `limits.max-record-bytes`",
        hint=_HINT,
        offset=offset,
        batch_offset=batch_offset,
        record_bytes=size,
        limit_bytes=limit_bytes,
    )
