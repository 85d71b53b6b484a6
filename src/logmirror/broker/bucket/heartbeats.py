"""Signs of life of the owner of a log dir, for those that wait to take it over.

    .logmirror/broker/heartbeats/<epoch>-<number>                 the owner was there
    .logmirror/broker/heartbeats/<epoch>-<number>.stopped-<end>   it has stopped; the chain ends
                                                                  with this number

They decide nothing: only a fence does (`chain`). A name is created once, and the ones before it are
removed. Names of a former owner, which a paused one may still create, have a lower epoch and do not
count. A request that hangs does not delay the next heartbeat, which has a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.bucket.chain import HEARTBEAT_MS
from logmirror.errors import LogmirrorError

if TYPE_CHECKING:
    from logmirror.stores.base import BlobStore

_LOG: Final = logging.getLogger(__name__)
HEARTBEATS: Final = ".logmirror/broker/heartbeats"
_STOPPED: Final = ".stopped-"
_DIGITS: Final = 20
_THREADS_MAX: Final = 4


class Heartbeat(NamedTuple):
    """A heartbeat; later ones compare as greater."""

    epoch: int
    number: int
    stopped_at: int = -1
    """The last number of the chain when the owner stopped; -1: it runs."""

    @property
    def name(self) -> str:
        """The name of its object, without the folder."""
        start = f"{self.epoch:0{_DIGITS}d}-{self.number:0{_DIGITS}d}"
        return start if self.stopped_at < 0 else f"{start}{_STOPPED}{self.stopped_at:0{_DIGITS}d}"


def parse(name: str) -> Heartbeat | None:
    """Return the heartbeat of a name; None: it is not one's."""
    start, _, end = name.partition(_STOPPED)
    epoch, _, number = start.partition("-")
    if not (epoch.isdecimal() and number.isdecimal() and (end or "0").isdecimal()):
        return None
    found = Heartbeat(int(epoch), int(number), int(end) if end else -1)
    return found if found.name == name else None


def newest(store: BlobStore) -> Heartbeat | None:
    """Return the newest heartbeat of a log dir. One request for each 1,000, usually one in all.

    `BlobStore.tail` searches by the first 20 digits, which those of one owner share.
    """
    return max(filter(None, map(parse, store.names(HEARTBEATS))), default=None)


class Heart:
    """Writes the heartbeats of an owner.

    Args:
        store: The log dir.
        epoch: The owner's epoch.
        interval_ms: Time between two heartbeats.
    """

    def __init__(self, store: BlobStore, epoch: int, interval_ms: int = HEARTBEAT_MS) -> None:
        self._store, self._epoch, self._interval_s = store, epoch, interval_ms / 1000
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._number = self._running = 0
        self._old: set[str] = set()
        self._has_swept = False
        self._thread = threading.Thread(target=self._run, name="logmirror-heart", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat now, and one in each interval. Does not wait for them."""
        self._thread.start()

    def stop(self) -> None:
        """Write no more heartbeats. One in progress may still be written."""
        self._ending.set()

    def say_stopped(self, end: int, timeout_s: float) -> None:
        """Let a standby take over at once. Waits until it can know, up to a limit.

        Args:
            end: The last number of the chain, behind which this owner writes nothing more.
            timeout_s: The limit.
        """
        self.stop()
        last = self._begin(end)
        if last is not None:
            last.join(timeout_s)

    def _run(self) -> None:
        self._begin()
        while not self._ending.wait(self._interval_s):
            self._begin()

    def _begin(self, stopped_at: int = -1) -> threading.Thread | None:
        with self._lock:
            if self._running >= _THREADS_MAX and stopped_at < 0:
                return None
            self._number += 1
            self._running += 1
            beat = Heartbeat(self._epoch, self._number, stopped_at)
        thread = threading.Thread(
            target=self._write, args=(beat,), name="logmirror-heartbeat", daemon=True
        )
        thread.start()
        return thread

    def _write(self, beat: Heartbeat) -> None:
        try:
            self._store.create(f"{HEARTBEATS}/{beat.name}", b"")
            self._remove_others(beat)
        except LogmirrorError as error:
            _LOG.debug("heartbeat could not be written: %s", error)
        finally:
            with self._lock:
                self._running -= 1

    def _remove_others(self, beat: Heartbeat) -> None:
        with self._lock:
            must_sweep, self._has_swept = not self._has_swept, True
            newest_name = max(self._old | {beat.name})  # not this one, if its request was slow
            before = (self._old | {beat.name}) - {newest_name}
            self._old = {newest_name}
        try:
            if must_sweep:  # those of earlier owners
                before |= {name for name in self._store.names(HEARTBEATS) if name < beat.name}
            for name in sorted(before):
                self._store.delete(f"{HEARTBEATS}/{name}")
        except LogmirrorError:
            with self._lock:
                self._old |= before
                self._has_swept = self._has_swept and not must_sweep
            raise
