"""JSON of claims and compaction records: what the two formats have in common.

A file holds one JSON object in UTF-8, without spaces, and a line feed. `docs/formats/claim.md` and
`docs/formats/archive.md` list the fields. The bytes are part of the format: the checksum of a claim
covers them.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from logmirror.errors import CorruptionError, UsageError
from logmirror.model import Decided, Gap, GapCause, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Fields = dict[str, Any]


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


def decided_field(found: Iterable[Decided]) -> Fields:
    """Return the field `decided`; it is left out if there is none."""
    listed = [[one.last, list(one.aborted), list(one.committed)] for one in found]
    return {"decided": listed} if listed else {}


def read_decided(content: Fields) -> tuple[Decided, ...]:
    """Return the field `decided`.

    Raises:
        TypeError, ValueError: It is not a list of `[last offset, producer IDs of those that were
            aborted, producer IDs of those that were committed]`, ascending.
    """
    found = tuple(
        Decided(integer(last), tuple(map(integer, aborted)), tuple(map(integer, committed)))
        for last, aborted, committed in content.get("decided", ())
    )
    if any(before.last >= after.last for before, after in itertools.pairwise(found)):
        raise ValueError(found)
    return found


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
