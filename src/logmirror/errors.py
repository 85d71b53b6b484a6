"""What can go wrong, grouped by what someone must do about it.

A kind exists only where it is handled differently from every other kind:

    kind             exit  who acts    what they do
    usage               2  the user    fix the command line, the YAML, or a permission
    unavailable        75  the loop    retry with back-off; nothing was written
    outcome-unknown    75  the loop    re-read the position, then decide; never blindly retry
    fenced             69  nobody      another writer owns the partition; stop for good
    position           69  operator    source or destination is not where the chain says; look
    corruption         65  operator    bytes are wrong, at rest or on the wire; never repaired
    internal           70  us          a bug

The class and `kind` are public API. The message and the facts are not.
"""

from __future__ import annotations

from typing import ClassVar, Self


class LogmirrorError(Exception):
    """Base of every error we raise on purpose.

    All subclasses share this constructor so that any of them survives pickling between a Spark
    executor and the driver (an exception with required keyword arguments does not).

    Args:
        message: One sentence, lower case, no full stop; what was expected and what was found.
        hint: What to do next, when we know it.
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
        """Add what only an outer layer knows, such as the topic; facts already there stay."""
        self.facts = {**facts, **self.facts}
        return self


def _rebuild(
    cls: type[LogmirrorError], message: str, hint: str, facts: dict[str, object]
) -> LogmirrorError:
    return cls(message, hint=hint, **facts)


class UsageError(LogmirrorError):
    """The command line, the configuration or a permission is wrong; the user can fix it."""

    kind = "usage"
    exit_code = 2


class UnavailableError(LogmirrorError):
    """Something could not be reached in time; nothing was written. Retry with back-off."""

    kind = "unavailable"
    exit_code = 75


class OutcomeUnknownError(LogmirrorError):
    """The answer was lost; the write may or may not exist. Look before deciding (I7)."""

    kind = "outcome-unknown"
    exit_code = 75


class FencedError(LogmirrorError):
    """Another writer owns the partition. Stop for good."""

    kind = "fenced"
    exit_code = 69


class PositionError(LogmirrorError):
    """Source or destination does not stand where the chain says it must."""

    kind = "position"
    exit_code = 69


class CorruptionError(LogmirrorError):
    """Bytes contradict their format, their checksum or each other."""

    kind = "corruption"
    exit_code = 65


class InternalError(LogmirrorError):
    """A bug of ours."""

    kind = "internal"
    exit_code = 70
