"""The groups of all links, each in a thread of its own, beside the mirrors or alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from logmirror.errors import FencedError
from logmirror.groups.link_spec import LinkSpec
from logmirror.groups.rounds import NONE_HINT, Rounds
from logmirror.groups.translation import CAUSES
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from logmirror.errors import LogmirrorError
    from logmirror.groups.link import Link, Round

_LOG = logging.getLogger("logmirror.groups")

_NONE: Final = "no consumer group has committed offsets of mirrored topics"

_UNREADABLE: Final = "groups not read; retried"
_UNFIT: Final = "groups left out: a text is too long for a checkpoint"

_SHOWN: Final = 10
"""The most groups in one log event."""


class GroupService(Rounds[LinkSpec, "Link"]):
    """The links of one process."""

    NAME = "groups"
    REOPENS = False

    def run(self) -> None:
        """Run the links until `stop` is called, or another process has taken over all of them.

        Raises:
            FencedError: Another process translates the groups of a link.
        """
        with self.running():
            while not self._stopping.wait(0.1):
                if len(self._over) == len(self._specs):
                    break
        if self._over:
            raise self._over[0]

    def _starts(self, spec: LinkSpec) -> None:
        labels = (spec.source_alias, spec.destination)
        self._recorder.set(metrics.ROUND_SECONDS, labels, self._clock.now_ms() / 1000)
        for histogram in (metrics.ROUND_DURATION, metrics.CHECKPOINT_DELAY):
            self._recorder.expect(histogram, labels)

    def _is_over(self, spec: LinkSpec, error: LogmirrorError) -> bool:
        if not isinstance(error, FencedError):
            self._warn_of(spec, "groups not translated; retried", error)
            return False
        _LOG.error(
            "groups are no longer translated here",
            extra={
                "facts": {
                    "source": spec.source_alias,
                    "destination": spec.destination,
                    "reason": error.message,
                }
            },
        )
        return True

    def _round(self, spec: LinkSpec, link: Link) -> None:
        began_ms = self._clock.monotonic_ms()
        done = link.round()
        labels = (spec.source_alias, spec.destination)
        duration_s = (self._clock.monotonic_ms() - began_ms) / 1000
        self._recorder.observe(metrics.ROUND_DURATION, labels, duration_s)
        self._record(labels, done)
        if not done.groups:
            self._warn(spec, _NONE, hint=NONE_HINT)
        for what, errors in ((_UNREADABLE, done.failed), (_UNFIT, done.unfit)):
            if errors:
                shown = {group: str(error) for group, error in list(errors.items())[:_SHOWN]}
                self._warn(spec, what, frozenset(errors), groups=len(errors), reasons=shown)

    def _record(self, labels: tuple[str, str], done: Round) -> None:
        self._recorder.set(metrics.GROUPS, labels, done.groups)
        self._recorder.set(metrics.GROUPS_INEXACT, labels, done.inexact)
        self._recorder.set(metrics.OFFSETS_INEXACT, labels, done.inexact_offsets)
        self._recorder.set(metrics.GROUPS_FAILED, labels, len(done.failed))
        self._recorder.add(metrics.CHECKPOINTS, labels, done.checkpoints)
        self._recorder.set(metrics.ROUND_SECONDS, labels, self._clock.now_ms() / 1000)
        if done.delay_ms is not None:
            self._recorder.observe(metrics.CHECKPOINT_DELAY, labels, done.delay_ms / 1000)
        reasons: dict[str, int] = {cause: done.causes[cause] for cause in CAUSES}
        reasons |= {"unreadable": len(done.failed), "too-long": len(done.unfit)}
        if done.at_target is not None:
            reasons["active-at-target"] = len(done.at_target.active)
            reasons["ahead-at-target"] = done.at_target.ahead
            reasons["refused"] = len(done.at_target.failed)
            self._recorder.set(metrics.GROUPS_ACTIVE, labels, len(done.at_target.active))
            self._recorder.add(metrics.GROUP_COMMITS, labels, done.at_target.committed)
        for reason, count in reasons.items():
            self._recorder.set(metrics.GROUPS_BY_REASON, (*labels, reason), count)
