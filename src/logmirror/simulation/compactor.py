"""`logmirror compact` in a simulation, beside the mirrors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from logmirror.archive.compact import Limits, compact
from logmirror.archive.merge import Archive
from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.mirror.ports import ArchiveSpec
from logmirror.simulation.schedule import KilledError
from logmirror.simulation.source import TOPIC
from logmirror.simulation.world import Process
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    from logmirror.clock import Chooser
    from logmirror.simulation.node import SimulatedDestination
    from logmirror.simulation.world import World

_FOLDER: Final = "copy/0"
_EVERY_MS: Final = (200, 1500)
_TARGET_BYTES: Final = (10_000, 30_000, 1 << 20)


class Compactor:
    """Runs `compact` at intervals until the faults are over.

    Args:
        world: The simulation.
        destination: The archive.
        chooser: Draws the intervals and the target size.
    """

    def __init__(self, world: World, destination: SimulatedDestination, chooser: Chooser) -> None:
        self._world, self._destination, self._chooser = world, destination, chooser
        self._limits = Limits(target_bytes=chooser.choice(_TARGET_BYTES), min_objects=2)
        self._starts = 0

    def run_until_healed(self) -> None:
        """Run at intervals until the faults are over."""
        while not self._world.is_healed:
            self._world.schedule.sleep_ms(self._chooser.randint(*_EVERY_MS))
            self._run_once()

    def _run_once(self) -> None:
        self._starts += 1
        process = Process(self._world, f"c.{self._starts}.w")
        self._world.enter(process)
        try:
            self._merge(process)
        except KilledError:
            return
        except CorruptionError as error:
            self._world.history.unreadable(f"compact: {error}")
        except LogmirrorError as error:
            self._world.schedule.note(f"compact ended with {error.kind}: {error.message}")
        finally:
            self._world.leave()

    def _merge(self, process: Process) -> None:
        spec, store = self._destination.spec, self._destination.store(process)
        if not isinstance(spec, ArchiveSpec):
            raise TypeError("the destination is not an archive")
        archive = Archive(
            store=store,
            folder=_FOLDER,
            topic=TOPIC,
            extension=spec.extension,
            compression=spec.compression,
            utf8=spec.encoding == "utf8",
        )
        with contextlib.ExitStack() as stack:
            if isinstance(store, FilesystemStore):
                stack.enter_context(store.hold_writer_lock())
                store.sweep()
            compact(
                archive, self._limits, start=0, writer_id=process.name, clock=self._world.schedule
            )
