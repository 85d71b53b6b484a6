"""The snapshots of groups beside archives, each archive's in a thread of its own.

A source or a store that does not respond delays its own archive only. An error never stops a
mirror: it is logged, and the round is tried again, later after each failure.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from logmirror.errors import LogmirrorError
from logmirror.mirror.backoff import backoff_ms
from logmirror.mirror.repeated import Repeated
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logmirror.clock import Clock
    from logmirror.groups.archive_link import ArchiveLink, ArchiveRound
    from logmirror.groups.archive_spec import ArchiveLinkSpec
    from logmirror.monitoring.metrics import Recorder

_LOG = logging.getLogger("logmirror.groups")

_NONE: Final = "no consumer group has committed offsets of archived topics"
_NONE_HINT: Final = (
    "a group is only visible with Describe on it; see `logmirror acls print`, `include` and "
    "`exclude`"
)

JOIN_MS: Final = 10_000
"""How long after `stop` the end waits for all rounds that run."""


class ArchiveService:
    """The groups of all archives of one process.

    Args:
        specs: The archives.
        open_link: Opens one with a client and a store of its own.
        clock: Time.
        recorder: Receives the metrics.
    """

    def __init__(
        self,
        specs: Sequence[ArchiveLinkSpec],
        open_link: Callable[[ArchiveLinkSpec], contextlib.AbstractContextManager[ArchiveLink]],
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._specs, self._open_link = specs, open_link
        self._clock, self._recorder = clock, recorder
        self._stopping = threading.Event()
        self._end_ms: int | None = None
        self._repeated = Repeated(clock)

    def stop(self) -> None:
        """End after the rounds that run now. Safe from any thread."""
        if self._end_ms is None:
            self._end_ms = self._clock.monotonic_ms() + JOIN_MS
        self._stopping.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Write snapshots in threads until the block ends."""
        threads = [
            threading.Thread(target=self._run, args=(spec,), name=f"snapshots-{n}", daemon=True)
            for n, spec in enumerate(self._specs)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self.stop()
            for thread in threads:
                thread.join(max((self._end_ms or 0) - self._clock.monotonic_ms(), 0) / 1000)

    def wait(self) -> None:
        """Return once `stop` is called."""
        self._stopping.wait()

    def run_once(self) -> None:
        """Write the snapshots that are due.

        Raises:
            LogmirrorError: The first error, after all archives were tried.
        """
        errors: list[LogmirrorError] = []
        for spec in self._specs:
            try:
                with self._open_link(spec) as link:
                    self._record(spec, link.round())
            except LogmirrorError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _run(self, spec: ArchiveLinkSpec) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                with self._open_link(spec) as link:
                    while not self._stopping.is_set():
                        began_ms = self._clock.monotonic_ms()
                        self._record(spec, link.round())
                        failures = 0
                        left_ms = began_ms + spec.interval_ms - self._clock.monotonic_ms()
                        self._stopping.wait(max(left_ms, 0) / 1000)
            except LogmirrorError as error:
                failures += 1
                self._recorder.add(metrics.SNAPSHOT_FAILURES, _labels(spec))
                self._warn_of(spec, "snapshots of groups not written; retried", error)
                self._stopping.wait(backoff_ms(failures) / 1000)

    def _record(self, spec: ArchiveLinkSpec, done: ArchiveRound) -> None:
        labels = _labels(spec)
        self._recorder.set(metrics.GROUPS_ARCHIVED, labels, done.groups)
        self._recorder.set(metrics.GROUPS_FAILED, labels, len(done.failed))
        self._recorder.set(metrics.ARCHIVED_SECONDS, labels, self._clock.now_ms() / 1000)
        self._recorder.add(metrics.SNAPSHOTS, labels, done.written)
        self._recorder.add(metrics.SNAPSHOT_FAILURES, labels, 0)
        if not done.groups:
            self._warn(spec, _NONE, hint=_NONE_HINT)
        if done.not_pruned is not None:
            self._warn_of(spec, "old snapshots of groups not deleted", done.not_pruned)

    def _warn_of(self, spec: ArchiveLinkSpec, message: str, error: LogmirrorError) -> None:
        hint = {"hint": error.hint} if error.hint else {}
        self._warn(spec, message, **{**error.facts, "error": error.message, **hint})

    def _warn(self, spec: ArchiveLinkSpec, message: str, **facts: object) -> None:
        about = dict(zip(metrics.LINK, _labels(spec), strict=True))
        if self._repeated.admit((*about.values(), message, facts.get("error"))) is not None:
            _LOG.warning(message, extra={"facts": {**facts, **about}})


def _labels(spec: ArchiveLinkSpec) -> tuple[str, str]:
    return spec.source_alias, spec.destination
