"""JSON of claims and compaction records: what the two formats have in common.

A file holds one JSON object in UTF-8, without spaces, and a line feed. `docs/formats/claim.md` and
`docs/formats/archive.md` list the fields. The bytes are part of the format: the checksum of a claim
covers them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from logmirror.errors import CorruptionError, UsageError
from logmirror.model import Gap, GapCause, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Fields = dict[str, Any]
OpenAborted = tuple[tuple[int, int], ...]
"""Producer ID and first offset in the object, of each transaction; see `transactions`."""

OPEN_ABORTED_MAX: Final = 1000
"""Limit for these transactions; if there are more, they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """A kind of JSON file, and the texts of the errors about it."""

    version: int
    """The highest version that can be read; also the one that is written."""

    unreadable: str
    """Message of the error for a file that cannot be read."""

    hint: str
    """Hint of that error."""

    too_new: str
    """Message of the error for a higher version."""

    too_new_hint: str
    """Hint of that error."""

    def load(self, data: bytes, name: str) -> Fields:
        """Return the fields of a file.

        Args:
            data: The file's content.
            name: The file's name in the store, for errors.

        Raises:
            CorruptionError: The content is not a JSON object.
        """
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self.error(name, str(error)) from error
        if not isinstance(content, dict):
            raise self.error(name, "not a JSON object")
        return content

    def check_version(self, content: Fields, name: str) -> None:
        """Raise UsageError if a newer release of logmirror wrote the file."""
        found = content.get("version")
        if type(found) is int and found > self.version:
            raise UsageError(
                self.too_new,
                hint=self.too_new_hint,
                name=name,
                expected=self.version,
                found=found,
            )

    def error(self, name: str, reason: str) -> CorruptionError:
        """Return the error for a file that cannot be read."""
        return CorruptionError(self.unreadable, hint=self.hint, name=name, reason=reason)


def encode(content: Mapping[str, object]) -> bytes:
    """Return the JSON text of a file, without the line feed."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def gap_fields(gaps: Iterable[Gap], counts: Mapping[GapCause, int]) -> Fields:
    """Return the fields `holes` and `hole_counts`; an empty one is left out.

    Args:
        gaps: Runs of offsets without records.
        counts: Number of such offsets by cause; a cause with 0 is left out.
    """
    fields: Fields = {}
    if runs := gap_list(gaps):
        fields["holes"] = runs
    if by_cause := count_map(counts):
        fields["hole_counts"] = by_cause
    return fields


def gap_list(gaps: Iterable[Gap]) -> list[list[object]]:
    """Return gaps as JSON holds them: `[first, last, cause]`."""
    return [[gap.first, gap.last, gap.cause.value] for gap in gaps]


def count_map(counts: Mapping[GapCause, int]) -> dict[str, int]:
    """Return counts as JSON holds them: by the name of the cause, without zeros."""
    return {cause.value: count for cause, count in counts.items() if count}


def read_gaps(content: Fields) -> tuple[Gap, ...]:
    """Return the gaps of the field `holes`.

    Raises:
        TypeError, ValueError: It is not a list of `[first, last, cause]`.
    """
    return tuple(
        Gap(first=integer(first), last=integer(last), cause=GapCause(cause))
        for first, last, cause in content.get("holes", ())
    )


def read_counts(content: Fields) -> dict[GapCause, int]:
    """Return the counts of the field `hole_counts`.

    Raises:
        TypeError, ValueError: It is not an object of counts by cause.
    """
    counts = content.get("hole_counts", {})
    if not isinstance(counts, dict):
        raise TypeError(counts)
    return {GapCause(cause): integer(count) for cause, count in counts.items()}


def open_aborted_field(found: OpenAborted | None) -> Fields:
    """Return the field `open_aborted`; it is left out if it is not known."""
    return {} if found is None else {"open_aborted": [list(pair) for pair in found]}


def read_open_aborted(content: Fields) -> OpenAborted | None:
    """Return the transactions of the field `open_aborted`; None: not known.

    Raises:
        TypeError, ValueError: It is not a list of `[producer ID, first offset]`.
    """
    if "open_aborted" not in content:
        return None
    return tuple((integer(one), integer(first)) for one, first in content["open_aborted"])


def read_range(content: Fields) -> OffsetRange:
    """Return the range of the fields `from` and `to`.

    Raises:
        KeyError, TypeError, ValueError: One is missing, or they are not a range.
    """
    return OffsetRange(first=integer(content["from"]), last=integer(content["to"]))


def integer(value: object) -> int:
    """Return a whole number; TypeError for anything else, also for a boolean."""
    if type(value) is not int:
        raise TypeError(value)
    return value


def text(value: object) -> str:
    """Return a string; TypeError for anything else."""
    if not isinstance(value, str):
        raise TypeError(value)
    return value
