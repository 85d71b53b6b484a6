"""The snapshots of groups beside archives, each archive's in a thread of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.groups.archive_link import ArchiveLink
from logmirror.groups.archive_spec import ArchiveLinkSpec
from logmirror.groups.rounds import NONE_HINT, Rounds
from logmirror.mirror.backoff import RETRIABLE
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from logmirror.clock import Clock
    from logmirror.errors import LogmirrorError
    from logmirror.groups.archive_link import ArchiveRound
    from logmirror.monitoring.metrics import Recorder

_NONE: Final = "no consumer group has committed offsets of archived topics"

_UNREADABLE: Final = "groups not read; retried"

_SHOWN: Final = 10
"""The most groups in one log event."""


class ArchiveService(Rounds[ArchiveLinkSpec, ArchiveLink]):
    """The groups of all archives of one process."""

    NAME = "snapshots"
    REOPENS = True

    def __init__(
        self,
        specs: Sequence[ArchiveLinkSpec],
        open_link: Callable[[ArchiveLinkSpec], AbstractContextManager[ArchiveLink]],
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        super().__init__(specs, open_link, clock, recorder)
        self._failed: dict[tuple[str, str], Mapping[str, LogmirrorError]] = {}
        """The groups that each link has not read in its last round."""

    def _is_over(self, spec: ArchiveLinkSpec, error: LogmirrorError) -> bool:
        self._recorder.add(metrics.SNAPSHOT_FAILURES, _labels(spec))
        self._warn_of(spec, "snapshots of groups not written; retried", error)
        return False

    def _round(self, spec: ArchiveLinkSpec, link: ArchiveLink) -> None:
        self._record(spec, link.round())

    def _record(self, spec: ArchiveLinkSpec, done: ArchiveRound) -> None:
        labels = _labels(spec)
        self._recorder.set(metrics.GROUPS_ARCHIVED, labels, done.groups)
        self._recorder.set(metrics.GROUPS_FAILED, labels, len(done.failed))
        self._recorder.set(metrics.ARCHIVED_SECONDS, labels, self._clock.now_ms() / 1000)
        self._recorder.add(metrics.SNAPSHOTS, labels, done.written)
        self._recorder.add(metrics.SNAPSHOT_FAILURES, labels, 0)
        if not done.groups:
            self._warn(spec, _NONE, hint=NONE_HINT)
        before = self._failed.get(labels, done.failed)
        self._failed[labels] = done.failed
        # An open transaction is usual, unless it is still open in the next round.
        errors = {
            group: error
            for group, error in done.failed.items()
            if group in before or not isinstance(error, RETRIABLE)
        }
        if errors:
            shown = {group: str(error) for group, error in list(errors.items())[:_SHOWN]}
            self._warn(spec, _UNREADABLE, frozenset(errors), groups=len(errors), reasons=shown)
        if done.not_pruned is not None:
            self._warn_of(spec, "old snapshots of groups not deleted", done.not_pruned)


def _labels(spec: ArchiveLinkSpec) -> tuple[str, str]:
    return spec.source_alias, spec.destination
