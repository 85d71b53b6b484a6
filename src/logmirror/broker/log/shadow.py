"""A second copy of the open segment, while a partition moves to another log directory (KIP-113).

From the moment that a log has a shadow, each batch is appended to both files, and each flush makes
both durable before it is reported. So whatever was acknowledged is durable in both, at any moment.
What fails in the shadow ends the shadow, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logmirror.broker.log.disk import Disk, OpenFile


class Shadow:
    """The second file.

    Args:
        disk: The system calls.
        file: The file, which holds the open segment's bytes.

    Attributes:
        failure: Why it is not a copy any more.
    """

    def __init__(self, disk: Disk, file: OpenFile) -> None:
        self.file = file
        self._disk = disk
        self.failure: OSError | None = None

    def append(self, batch: memoryview) -> None:
        """Append a batch that was appended to the segment."""
        if self.failure is None:
            try:
                self._disk.append(self.file, batch)
            except OSError as error:
                self.failure = error

    def sync(self) -> None:
        """Make it durable. Blocks; runs in a worker thread."""
        if self.failure is None:
            try:
                self._disk.sync(self.file)
            except OSError as error:
                self.failure = error
