"""The kinds of errors, by who acts on them.

A kind exists only where it is handled differently from every other kind:

    kind             exit  who acts    action
    usage               2  the user    correct the command line, the YAML, or a permission
    unavailable        75  the loop    retry with back-off; nothing was written
    outcome-unknown    75  the loop    read the position again, then decide; never retry blindly
    fenced             69  the user    another writer owns the partition; find it, keep one
    position           69  the user    source or destination contradicts the chain; compare them
    corruption         65  the user    bytes are damaged, at rest or on the wire; never repaired
    internal           70  developers  a bug

The class and `kind` are public API. The message and the facts are not.
"""

from __future__ import annotations

from typing import ClassVar, Self, cast


class LogmirrorError(Exception):
    """Base class of all errors that logmirror raises on purpose.

    All subclasses share this constructor so that any of them survives pickling between a Spark
    executor and the driver (an exception with required keyword arguments does not).

    Args:
        message: One sentence, lower case, no full stop; what was expected and what was found.
        hint: What to do next, if that is known. Empty: it is not.
        facts: The values needed to diagnose, for example `topic`, `partition`, `expected`.
    """

    kind: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts

    def __str__(self) -> str:
        facts = " ".join(f"{name}={value!r}" for name, value in self.facts.items())
        return f"{self.message} [{facts}]" if facts else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.facts)

    def add_facts(self, **facts: object) -> Self:
        """Add facts that an outer layer knows, such as the topic. Existing facts stay."""
        self.facts = {**facts, **self.facts}
        return self

    def copy(self, **facts: object) -> Self:
        """Return a copy with facts added. Existing facts stay.

        For an error that several flows share: each gets a copy with its own topic and partition.
        """
        return type(self)(self.message, hint=self.hint, **{**facts, **self.facts})


def _rebuild(
    cls: type[LogmirrorError], message: str, hint: str, facts: dict[str, object]
) -> LogmirrorError:
    return cls(message, hint=hint, **facts)


class UsageError(LogmirrorError):
    """The command line, the configuration or a permission is wrong. The user can correct it."""

    kind = "usage"
    exit_code = 2


class UnavailableError(LogmirrorError):
    """A service did not respond in time. Nothing was written. Retry with back-off."""

    kind = "unavailable"
    exit_code = 75


class OutcomeUnknownError(LogmirrorError):
    """The response was lost; the write may or may not exist. Read before deciding (I7)."""

    kind = "outcome-unknown"
    exit_code = 75


class FencedError(LogmirrorError):
    """Another writer owns the partition. Do not retry."""

    kind = "fenced"
    exit_code = 69


class PositionError(LogmirrorError):
    """The position of the source or of the destination contradicts the chain."""

    kind = "position"
    exit_code = 69


class PositionMovedError(PositionError):
    """The destination's position is not the planned one. Nothing was written: read it again."""


class EndsEarlierError(PositionError):
    """The copy ends before the fact `offset`: `until` names its time, and the source a later one.

    The source's lookup by time was not exact. All records before that offset may be copied.
    """

    @property
    def offset(self) -> int:
        """The first offset that is not copied."""
        return cast("int", self.facts["offset"])


class CorruptionError(LogmirrorError):
    """Bytes contradict their format, their checksum or each other."""

    kind = "corruption"
    exit_code = 65


class InternalError(LogmirrorError):
    """A bug in logmirror."""

    kind = "internal"
    exit_code = 70
