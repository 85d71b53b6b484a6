"""An object of a bucket as a seekable file, read ahead in ranges."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, BinaryIO, Final

from logmirror.stores.s3_calls import MissingError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

    from logmirror.stores.s3_calls import Calls

BUFFER_BYTES: Final = 1 << 16
"""Size of the buffer that completes short reads."""

AHEAD_BYTES: Final = 8 << 20
"""Bytes per request; also the memory limit."""


class ObjectReader(io.RawIOBase):
    """Reads one object, which never changes; see `open`."""

    def __init__(self, calls: Calls, key: str, size: int) -> None:
        self._calls, self._key, self._size = calls, key, size
        self._position = 0
        self._window = b""
        self._window_start = 0

    @classmethod
    def open(cls, calls: Calls, key: str) -> BinaryIO:
        """Open an object.

        Raises:
            MissingError: The object does not exist.
        """
        size = int(calls.read("head_object", Key=key)["ContentLength"])
        return io.BufferedReader(cls(calls, key, size), BUFFER_BYTES)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position; sends no request."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill the buffer from the bytes read ahead; at least one byte unless at the end."""
        with memoryview(buffer).cast("B") as view:
            begin = self._position - self._window_start
            if not 0 <= begin < len(self._window):
                if self._position >= self._size or not len(view):
                    return 0
                last = min(self._size, self._position + max(AHEAD_BYTES, len(view))) - 1
                try:
                    self._window = self._calls.body(self._key, self._position, last)
                except MissingError:  # deleted since it was opened
                    raise KeyError(self._key) from None
                self._window_start, begin = self._position, 0
            count = min(len(view), len(self._window) - begin)
            view[:count] = self._window[begin : begin + count]
            self._position += count
            return count
