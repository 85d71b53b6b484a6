"""Threads that flush logs, and remove deleted segments: each log directory has its own.

So none waits for the disk of another one.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

_THREADS: Final = 4
"""For each directory: how many of its partitions are flushed at a time."""


class FlushThreads:
    """The threads of all directories. Leaving it waits for their work."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._by_dir: dict[Path, Executor] = {}

    def of(self, log: PartitionLog) -> Executor:
        """Return the threads of the directory that a log is in. Called on the event loop."""
        log_dir = log.folder.parent.parent
        if log_dir not in self._by_dir:
            executor = ThreadPoolExecutor(_THREADS, "logmirror-flush")
            self._by_dir[log_dir] = self._stack.enter_context(executor)
        return self._by_dir[log_dir]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
