"""Brokers of Apache Kafka that many tests share, and that are paused while no test uses them.

One that no test uses takes 3 % of a core, and after its start more than 10 %.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from kit.servers.kafka import ApacheKafka

if TYPE_CHECKING:
    from pathlib import Path

_A_DAY_MS = 24 * 3600 * 1000


class SharedKafka(ApacheKafka):
    """A broker that no test ends. It is resumed when its address or its PID is read."""

    all: ClassVar[weakref.WeakSet[SharedKafka]] = weakref.WeakSet()
    """Those of this process."""

    def __init__(self, version: str, folder: Path, **more: Any) -> None:
        config = {"broker.session.timeout.ms": _A_DAY_MS}  # else a pause is taken for a failure
        super().__init__(version, folder, config=config, **more)
        self._is_asleep = False
        self.all.add(self)

    def address(self, listener: str) -> str:
        self.wake()
        return super().address(listener)

    @property
    def pid(self) -> int:
        self.wake()
        return super().pid

    def sleep(self) -> None:
        """Pause it, if it runs."""
        if self._process is not None and not self._is_asleep:
            self._is_asleep = True
            self.pause()

    def wake(self) -> None:
        """Resume it, if it is paused."""
        if self._is_asleep:
            self._is_asleep = False
            self.resume()
