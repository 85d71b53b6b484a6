"""Links that run round by round, each in a thread of its own, until the process stops.

A cluster or a store that does not respond delays its own link only. An error never stops a mirror:
the link waits, longer after each failure, and tries again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final, Generic, Protocol, TypeVar

from logmirror.errors import LogmirrorError
from logmirror.mirror.backoff import RETRIABLE, backoff_ms
from logmirror.mirror.repeated import Repeated
from logmirror.monitoring import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logmirror.clock import Clock
    from logmirror.monitoring.metrics import Recorder

_LOG = logging.getLogger("logmirror.groups")

JOIN_MS: Final = 10_000
"""How long after `stop` the end waits for all rounds that run."""

ONCE_MS: Final = 20_000
"""How long after its beginning a single round is tried again: a topic that it has created may have
no leader yet."""

NONE_HINT: Final = (
    "a group is only visible with Describe on it; see `logmirror acls print`, `include` and "
    "`exclude`"
)
"""If no group is visible."""


class _Spec(Protocol):
    @property
    def source_alias(self) -> str: ...
    @property
    def destination(self) -> str: ...
    @property
    def interval_ms(self) -> int: ...


SpecT = TypeVar("SpecT", bound=_Spec)
LinkT = TypeVar("LinkT")


class Rounds(ABC, Generic[SpecT, LinkT]):
    """The links of one process.

    Args:
        specs: The links.
        open_link: Opens a link with clients of its own.
        clock: Time.
        recorder: Receives the metrics.
    """

    NAME: ClassVar[str]
    """What its threads are called."""

    REOPENS: ClassVar[bool]
    """Whether a link is opened again after a failure; otherwise it keeps what it knows."""

    def __init__(
        self,
        specs: Sequence[SpecT],
        open_link: Callable[[SpecT], contextlib.AbstractContextManager[LinkT]],
        clock: Clock,
        recorder: Recorder,
    ) -> None:
        self._specs, self._open_link = specs, open_link
        self._clock, self._recorder = clock, recorder
        self._stopping = threading.Event()
        self._end_ms: int | None = None
        self._repeated = Repeated(clock)
        self._over: list[LogmirrorError] = []
        """Why links have ended for good, one for each."""

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

    def wait(self) -> None:
        """Return once `stop` is called."""
        self._stopping.wait()

    def run_once(self) -> None:
        """Run one round of each link; those that fail are tried again for `ONCE_MS`.

        Raises:
            LogmirrorError: The first error, after all links were tried.
        """
        errors: list[LogmirrorError] = []
        for spec in self._specs:
            try:
                self._run_one(spec)
            except LogmirrorError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _run_one(self, spec: SpecT) -> None:
        give_up_ms, failures = self._clock.monotonic_ms() + ONCE_MS, 0
        while True:
            try:
                with self._open_link(spec) as link:
                    self._round(spec, link)
            except RETRIABLE:
                failures += 1
                pause_ms = backoff_ms(failures)
                is_late = self._clock.monotonic_ms() + pause_ms > give_up_ms
                if is_late or self._stopping.wait(pause_ms / 1000):
                    raise
            else:
                return

    def _started(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._run, args=(spec,), name=f"{self.NAME}-{n}", daemon=True)
            for n, spec in enumerate(self._specs)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _run(self, spec: SpecT) -> None:
        self._starts(spec)
        failures = 0
        with contextlib.ExitStack() as opened:
            link: LinkT | None = None
            while not self._stopping.is_set():
                began_ms = self._clock.monotonic_ms()
                try:
                    if link is None:
                        link = opened.enter_context(self._open_link(spec))
                        if self._stopping.is_set():
                            return
                    self._round(spec, link)
                    failures = 0
                except LogmirrorError as error:
                    if self._is_over(spec, error):
                        self._over.append(error)
                        return
                    failures += 1
                    if self.REOPENS:
                        opened.close()
                        link = None
                pause_ms = backoff_ms(failures) if failures else spec.interval_ms
                left_ms = began_ms + pause_ms - self._clock.monotonic_ms()
                self._stopping.wait(max(left_ms, 0) / 1000)

    def _warn_of(self, spec: SpecT, message: str, error: LogmirrorError) -> None:
        hint = {"hint": error.hint} if error.hint else {}
        self._warn(spec, message, **{**error.facts, "error": error.message, **hint})

    def _warn(self, spec: SpecT, message: str, *kind: object, **facts: object) -> None:
        """Log a warning about a link, now and then if it is always the same one.

        Args:
            spec: The link.
            message: What is wrong.
            kind: What differs from another one with the same message and error.
            facts: More about it.
        """
        about = dict(zip(metrics.LINK, (spec.source_alias, spec.destination), strict=True))
        what = (*about.values(), message, facts.get("error"), *kind)
        if self._repeated.admit(what) is not None:
            _LOG.warning(message, extra={"facts": {**facts, **about}})

    def _starts(self, spec: SpecT) -> None:
        """Called once, before the first round of a link."""

    @abstractmethod
    def _round(self, spec: SpecT, link: LinkT) -> None:
        """Run one round, and record what it did."""

    @abstractmethod
    def _is_over(self, spec: SpecT, error: LogmirrorError) -> bool:
        """Log a failed round; return whether the link must end for good."""
