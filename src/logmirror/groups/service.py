"""The groups of all links, each in a thread of its own, beside the mirrors or alone.

A source or a target that does not respond delays its own links only. An error never stops a mirror:
the link waits, longer after each failure, and tries again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final

from logmirror.errors import FencedError, LogmirrorError
from logmirror.groups.translation import CAUSES
from logmirror.mirror.backoff import backoff_ms
from logmirror.mirror.repeated import Repeated
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from logmirror.clock import Clock
    from logmirror.groups.link import Link, Round
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.monitoring.metrics import Recorder

_LOG = logging.getLogger("logmirror.groups")

_NONE: Final = "no consumer group has committed offsets of mirrored topics"
_NONE_HINT: Final = (
    "a group is only visible with Describe on it; see `logmirror acls print`, `include` and "
    "`exclude`"
)

_UNREADABLE: Final = "groups not read; retried"
_UNFIT: Final = "groups left out: a text is too long for a checkpoint"

_SHOWN: Final = 10
"""The most groups in one log event."""

JOIN_MS: Final = 10_000
"""How long after `stop` the end waits for all rounds that run."""


class GroupService:
    """The links of one process.

    Args:
        specs: The links.
        open_link: Opens a link with clients of its own.
        clock: Time.
        recorder: Receives the metrics.
    """

    def __init__(
        self,
        specs: Sequence[LinkSpec],
        open_link: Callable[[LinkSpec], contextlib.AbstractContextManager[Link]],
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._specs, self._open_link = specs, open_link
        self._clock, self._recorder = clock, recorder
        self._stopping = threading.Event()
        self._end_ms: int | None = None
        self._repeated = Repeated(clock)
        self._fenced: list[FencedError] = []

    def stop(self) -> None:
        """End after the rounds that run now. Safe from any thread."""
        if self._end_ms is None:
            self._end_ms = self._clock.monotonic_ms() + JOIN_MS
        self._stopping.set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the links in threads until the block ends."""
        threads = self._started()
        try:
            yield
        finally:
            self.stop()
            for thread in threads:
                thread.join(max((self._end_ms or 0) - self._clock.monotonic_ms(), 0) / 1000)

    def run(self) -> None:
        """Run the links until `stop` is called, or another process has taken over all of them.

        Raises:
            FencedError: Another process translates the groups of a link.
        """
        with self.running():
            while not self._stopping.wait(0.1):
                if len(self._fenced) == len(self._specs):
                    break
        if self._fenced:
            raise self._fenced[0]

    def run_once(self) -> None:
        """Run one round of each link.

        Raises:
            LogmirrorError: The first error, after all links were tried.
        """
        errors: list[LogmirrorError] = []
        for spec in self._specs:
            try:
                with self._open_link(spec) as link:
                    self._round(spec, link)
            except LogmirrorError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _started(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._run, args=(spec,), name=f"groups-{number}", daemon=True)
            for number, spec in enumerate(self._specs)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _run(self, spec: LinkSpec) -> None:
        failures = 0
        facts: dict[str, object] = {"source": spec.source_alias, "destination": spec.destination}
        labels = (spec.source_alias, spec.destination)
        self._recorder.set(metrics.ROUND_SECONDS, labels, self._clock.now_ms() / 1000)
        for histogram in (metrics.ROUND_DURATION, metrics.CHECKPOINT_DELAY):
            self._recorder.expect(histogram, labels)
        with self._open_link(spec) as link:
            while not self._stopping.is_set():
                began_ms = self._clock.monotonic_ms()
                try:
                    self._round(spec, link)
                    failures = 0
                except FencedError as error:
                    self._fenced.append(error)
                    _LOG.exception(
                        "groups are no longer translated here",
                        exc_info=False,
                        extra={"facts": {**facts, "reason": error.message}},
                    )
                    return
                except LogmirrorError as error:
                    failures += 1
                    if self._repeated.admit((*facts.values(), error.message)) is not None:
                        about = {**error.facts, **facts, "error": error.message}
                        about |= {"hint": error.hint} if error.hint else {}
                        _LOG.warning("groups not translated; retried", extra={"facts": about})
                pause_ms = backoff_ms(failures) if failures else spec.interval_ms
                left_ms = began_ms + pause_ms - self._clock.monotonic_ms()
                self._stopping.wait(max(left_ms, 0) / 1000)

    def _round(self, spec: LinkSpec, link: Link) -> None:
        began_ms = self._clock.monotonic_ms()
        done = link.round()
        labels = (spec.source_alias, spec.destination)
        duration_s = (self._clock.monotonic_ms() - began_ms) / 1000
        self._recorder.observe(metrics.ROUND_DURATION, labels, duration_s)
        self._record(labels, done)
        self._log(dict(zip(metrics.LINK, labels, strict=True)), done)

    def _log(self, facts: Mapping[str, object], done: Round) -> None:
        link = tuple(facts.values())
        if not done.groups and self._repeated.admit((link, _NONE)) is not None:
            _LOG.warning(_NONE, extra={"facts": {**facts, "hint": _NONE_HINT}})
        for what, errors in ((_UNREADABLE, done.failed), (_UNFIT, done.unfit)):
            if errors and self._repeated.admit((link, what, frozenset(errors))) is not None:
                shown = {group: str(error) for group, error in list(errors.items())[:_SHOWN]}
                about = {**facts, "groups": len(errors), "reasons": shown}
                _LOG.warning(what, extra={"facts": about})

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
