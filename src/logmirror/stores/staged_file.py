"""An object under construction in a directory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from logmirror.errors import InternalError, LogmirrorError
from logmirror.stores.blocks import BlockWriter
from logmirror.stores.directory import os_errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.stores.base import Buffer, StagedObject
    from logmirror.stores.syscalls import Syscalls

    def _is_a_staged_object(staged: StagedFile) -> StagedObject:
        return staged


class StagedFile:
    """An object under construction; see `StagedObject`."""

    def __init__(
        self,
        path: Path,
        token: str,
        descriptor: int,
        syscalls: Syscalls,
        reach: Callable[[str], None],
    ) -> None:
        self._reach = reach
        self._path = path
        self._token = token
        self._descriptor: int | None = descriptor
        self._sys = syscalls
        self._blocks = BlockWriter(descriptor, self._put)

    def write(self, data: Buffer) -> int:
        """See `StagedObject.write`."""
        self._open_descriptor()
        with memoryview(data) as view, view.cast("B") as rest, os_errors("write", self._path):
            size_bytes = len(rest)
            self._blocks.write(rest)
        return size_bytes

    def _put(self, descriptor: int, data: memoryview) -> int:
        written = self._sys.write(descriptor, data)
        self._reach("stage.written")
        return written

    def finish(self, name: str, *, travels: bool) -> str:
        """See `StagedObject.finish`; any process can link the file to any name."""
        del name, travels
        descriptor = self._open_descriptor()
        try:
            with os_errors("write", self._path):
                self._blocks.finish()
            with os_errors("make an object durable", self._path):
                self._sys.sync_data(descriptor)
        except LogmirrorError:
            # After a failed sync the kernel may have dropped the pages and cleared the error, so a
            # second sync would succeed without the bytes. The object must be written again.
            self.abort()
            raise
        self._close()
        self._reach("stage.finished")
        return self._token

    def abort(self) -> None:
        """See `StagedObject.abort`."""
        if self._descriptor is not None:
            self._close()
            with contextlib.suppress(OSError):
                self._sys.unlink(self._path)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise InternalError("the staged object is finished or aborted", token=self._token)
        return self._descriptor

    def _close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            self._blocks.close()
            # fdatasync has reported every relevant error; errors of close are ignored.
            with contextlib.suppress(OSError):
                self._sys.close(descriptor)
