"""Topics that a regular expression matches, for members that subscribe by one (KIP-848).

The syntax is that of RE2, as in Apache Kafka: no expression takes more than linear time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.groups.values import RefusedError

if TYPE_CHECKING:
    from collections.abc import Collection

_KEPT: Final = 1_000
_MAX_BYTES: Final = 1 << 20
"""Memory of one compiled expression. A larger one is refused."""


class _Matched(NamedTuple):
    names: frozenset[str]
    """All topics when it was evaluated."""

    found: frozenset[str]


class TopicPatterns:
    """Regular expressions and the topics that they match. Only new topics are compared again."""

    def __init__(self) -> None:
        self._version = -1
        self._names: frozenset[str] = frozenset()
        self._known: dict[str, _Matched] = {}

    def matching(self, regex: str, names: Collection[str], version: int) -> frozenset[str]:
        """Return the topics whose whole name matches.

        Args:
            regex: In the syntax of RE2.
            names: All topics.
            version: Another number after each change of `names`.

        Raises:
            RefusedError: INVALID_REGULAR_EXPRESSION.
        """
        if version != self._version:
            self._version, self._names = version, frozenset(names)
        known = self._known.pop(regex, _Matched(frozenset(), frozenset()))
        found = known.found
        if regex and known.names is not self._names:
            new = self._names - known.names
            found = (found & self._names) | _matches(regex, new)
        if len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[regex] = _Matched(self._names, found)
        return found


def _matches(regex: str, names: Collection[str]) -> frozenset[str]:
    import re2  # noqa: PLC0415  # few groups need it

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _MAX_BYTES
    try:
        pattern = re2.compile(regex, options)
    except re2.error as error:
        [cause] = error.args
        reason = f"not a regular expression of RE2: {cause.decode(errors='replace')}"
        raise RefusedError(ErrorCode.INVALID_REGULAR_EXPRESSION, reason) from error
    return frozenset(name for name in names if pattern.fullmatch(name))
