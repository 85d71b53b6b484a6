"""Two disks and a store in memory that lose power together, at a call of any of them.

The disks are a model that knows what is durable, see `tree_disk`. The working folder of the bucket
is beside them; it is lost with the power. The store keeps its objects, and may fail before and
after a request.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kit.fakes.faulty_disk import PowerLossError
from kit.fakes.tree_disk import TreeDisk
from logmirror.broker.bucket.files import BucketDisk
from logmirror.broker.log.disk import OpenFile
from logmirror.errors import OutcomeUnknownError, UnavailableError
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from pathlib import Path


class Power:
    """Counts the calls of disks and store, and is lost at one of them."""

    def __init__(self, lost_at: int) -> None:
        self.count, self._lost_at = 0, lost_at
        self._lock = threading.Lock()
        self.is_off = False
        self.when_lost: Callable[[], None] = lambda: None

    def use(self) -> bool:
        """Count a call; returns whether there is power."""
        with self._lock:
            self.count += not self.is_off
            if self.count == self._lost_at and not self.is_off:
                self.is_off = True
                self.when_lost()
            return not self.is_off


class PlacesDisk(TreeDisk, BucketDisk):
    """The model for the disks. The working folder is lost with the power. For several threads."""

    def __init__(self, root: Path, power: Power, store: MemoryStore, **more: Any) -> None:
        self.lock = threading.RLock()
        self._work, self._power = root / "w", power
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
            super().remove_folder(path)


def _locked(name: str) -> Callable[..., Any]:
    """A method that is the model's or, in the working folder, that of the disk."""
    modelled, plain = getattr(TreeDisk, name), getattr(BucketDisk, name)

    def call(self: Any, where: Path | OpenFile, *rest: Any) -> Any:
        with self.lock:
            if isinstance(where, OpenFile):
                is_modelled = where.fd in self._by_fd
            else:
                is_modelled = not where.is_relative_to(self._work)
            if is_modelled:
                return modelled(self, where, *rest)
            self._call(name)
            return plain(self, where, *rest)

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
        is_lost = not self.power.use() or self._chance.random() < self.rate
        if is_lost or operation == self.refused:
            raise UnavailableError("no response", operation=operation, name=name)

    def _add(self, name: str, data: bytes) -> None:
        super()._add(name, data)
        if self._chance.random() < self.rate:
            raise OutcomeUnknownError("no response", name=name)
