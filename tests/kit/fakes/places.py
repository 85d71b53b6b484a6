"""Two disks and a store in memory that lose power together, at a call of any of them.

The disks are a model that knows what is durable, see `tree_disk`. The working folder of the bucket
is beside them; it is lost with the power. Each of the three may fail while there is power, see
`disk_faults`. The store keeps its objects, and may fail before and after a request.
"""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kit.fakes.disk_faults import Kind
from kit.fakes.faulty_disk import PowerLossError
from kit.fakes.tree_disk import TreeDisk
from logmirror.broker.bucket.files import BucketDisk
from logmirror.broker.log.disk import OpenFile
from logmirror.errors import OutcomeUnknownError, UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.fakes.disk_faults import DiskFault

_PAUSES_S: Final = (0.0005, 0.002, 0.006)


class Power:
    """Counts the calls of disks and store, and is lost at one of them.

    Args:
        lost_at: The number of that call; 0: never.
        pause_rate: How often a call waits a moment first, so that others overtake it.
    """

    def __init__(self, lost_at: int, pause_rate: float = 0.0) -> None:
        self._pause_rate, self._chance = pause_rate, random.Random(lost_at)
        self.count, self._lost_at = 0, lost_at
        self._lock = threading.Lock()
        self.is_off = False
        self.when_lost: Callable[[], None] = lambda: None

    def pause(self) -> None:
        """Wait a moment, or not. Called without locks."""
        if self._pause_rate and self._chance.random() < self._pause_rate:
            time.sleep(self._chance.choice(_PAUSES_S))

    def use(self) -> bool:
        """Count a call; returns whether there is power."""
        with self._lock:
            self.count += not self.is_off
            if self.count == self._lost_at and not self.is_off:
                self.is_off = True
                self.when_lost()
            return not self.is_off


def make_disks(root: Path) -> Path:
    """Make the log directories of the two disks; returns the folder they are in."""
    for name in ("a", "b"):
        (root / name / ".logmirror").mkdir(parents=True)
    return root


class PlacesDisk(TreeDisk, BucketDisk):
    """The model for the disks. The working folder is lost with the power. For several threads."""

    def __init__(self, root: Path, power: Power, store: MemoryStore, **more: Any) -> None:
        self.lock = threading.RLock()
        self._work, self._power = root / "w", power
        self.fault: DiskFault | None = None
        self.is_within = False
        """Whether a call is made by another one, which does not fail any more."""
        super().__init__(root, store=store, **more)

    def _call(self, name: str) -> None:
        del name
        if not self._power.use():
            raise PowerLossError

    def _is_modelled(self, path: Path) -> bool:
        return super()._is_modelled(path) and not path.is_relative_to(self._work)

    def remove_folder(self, path: Path) -> None:
        """See `TreeDisk.remove_folder`."""
        with self.lock:
            if (error := self._error("remove_folder", path)) is not None:
                raise error
            super().remove_folder(path)

    def open_for_reading(self, path: Path) -> OpenFile:
        """See `BucketDisk.open_for_reading`."""
        self._power.pause()
        if (error := self._error("read", path)) is not None:
            raise error
        return super().open_for_reading(path)

    def read_anyway(self, path: Path) -> bytes:
        """Read a file without a failure; one of the working folder is fetched if it is missing."""
        file = super().open_for_reading(path)
        return os.pread(file.fd, os.fstat(file.fd).st_size, 0)

    def _error(self, name: str, where: Path | OpenFile, *rest: Any) -> OSError | None:
        """Return the error that a call gets; what a failed one leaves has happened then."""
        if self.fault is None or self.is_within or self._power.is_off:
            return None
        grows = True
        if isinstance(where, OpenFile):
            place = self._place(Path(f"/proc/self/fd/{where.fd}").readlink())
            if name == "write_at":
                grows = rest[0] + len(rest[1]) > os.fstat(where.fd).st_size
        elif where.is_relative_to(self._root):
            place = self._place(where)
        else:
            return None
        with self.lock:
            error = self.fault.error(place, name, grows=grows)
            if error is not None and not isinstance(where, OpenFile):
                error.filename = str(where)
            if error is not None and place != self._work.name:
                self._leave(name, where, rest, is_full=self.fault.kind is Kind.FULL)
        return error

    def _place(self, path: Path) -> str:
        return path.relative_to(self._root).parts[0]

    def _leave(
        self, name: str, where: Path | OpenFile, rest: tuple[Any, ...], *, is_full: bool
    ) -> None:
        """Let happen what happens of a call that fails."""
        if isinstance(where, OpenFile):
            if name == "sync":
                self.sync_failed(where)
            elif name == "append":
                part = rest[0][: len(rest[0]) // 2]
                BucketDisk.append(self, where, part)
        elif name == "write_synced":
            data = b"".join(rest[0])
            self.write_failed(where, data[: len(data) // 2] if is_full else data)


def _locked(name: str) -> Callable[..., Any]:
    """A method that is the model's or, in the working folder, that of the disk."""
    modelled, plain = getattr(TreeDisk, name), getattr(BucketDisk, name)

    def call(self: Any, where: Path | OpenFile, *rest: Any) -> Any:
        self._power.pause()
        with self.lock:
            if isinstance(where, OpenFile):
                is_modelled = self.is_modelled(where)
            else:
                is_modelled = not where.is_relative_to(self._work)
            if (error := self._error(name, where, *rest)) is not None:
                raise error
            if not is_modelled:
                self._call(name)
            before, self.is_within = self.is_within, True
            try:
                return (modelled if is_modelled else plain)(self, where, *rest)
            finally:
                self.is_within = before

    return call


for _name in (
    *("make_folder", "create", "open_for_append", "open_for_update", "link", "rename", "unlink"),
    *("write_synced", "rewrite", "sync_folder", "append", "truncate", "sync", "write_at"),
):
    setattr(PlacesDisk, _name, _locked(_name))


class FailingStore(MemoryStore):
    """Refuses requests, and loses responses, as often as `rate` says; all of the kind `refused`."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(before=self._before)
        self._chance, self.rate = chance, 0.0
        self.refused = ""
        self.power = Power(0)

    def _before(self, operation: str, name: str) -> None:
        self.power.pause()
        is_lost = not self.power.use() or self._chance.random() < self.rate
        if is_lost or operation == self.refused:
            raise UnavailableError("no response", operation=operation, name=name)

    def _add(self, name: str, data: bytes) -> None:
        super()._add(name, data)
        if self._chance.random() < self.rate:
            raise OutcomeUnknownError("no response", name=name)
