"""Metadata in the footer of a Parquet object: source, range, counts, offset gaps, digests.

Key-value pairs with keys `logmirror.*` and text values, described in `docs/formats/parquet.md`. A
file without these keys was written by another program; only its rows are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from logmirror.archive.json_codec import count_map, gap_list
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import Gap, GapCause, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1
"""Version of the keys and of the columns. A reader rejects a higher one."""

PREFIX: Final = "logmirror."

DIGEST_KEY: Final = f"{PREFIX}digest"
"""Holds the content digest of the records."""

FILE_CHECK_KEY: Final = f"{PREFIX}file-check"
"""Holds the checksum of the whole file, computed with `NO_FILE_CHECK` as its own value."""

NO_FILE_CHECK: Final = f"xxh3:{'0' * 32}"

_VERSION_KEY: Final = f"{PREFIX}format-version"
_COMPACTION_KEY: Final = f"{PREFIX}compaction"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMetadata:
    """The metadata of an object."""

    topic: str
    topic_id: str
    """32 hexadecimal digits; empty if the source has no topic IDs."""

    partition: int
    covered: OffsetRange
    record_count: int
    digest: str
    """Content digest: `xxh3:` and 32 hexadecimal digits."""

    gaps: tuple[Gap, ...] = ()
    """Runs of offsets without records, ascending; the first ones if there are very many."""

    gap_counts: Mapping[GapCause, int] = field(default_factory=dict)
    """How many offsets have no record, by cause; complete even if `gaps` is not."""

    is_snapshot: bool = False
    """One row for each key, sorted by key, as written with `compaction: log`. Offsets may then be
    below the range, and records and gaps need not add up to it."""

    def to_key_values(self) -> dict[str, str]:
        """Return the key-value pairs of the Parquet footer."""
        return {
            _VERSION_KEY: str(VERSION),
            f"{PREFIX}topic": self.topic,
            f"{PREFIX}topic-id": self.topic_id,
            f"{PREFIX}partition": str(self.partition),
            f"{PREFIX}from": str(self.covered.first),
            f"{PREFIX}to": str(self.covered.last),
            f"{PREFIX}record-count": str(self.record_count),
            DIGEST_KEY: self.digest,
            f"{PREFIX}holes": _json(gap_list(self.gaps)),
            f"{PREFIX}hole-counts": _json(count_map(self.gap_counts)),
        } | ({_COMPACTION_KEY: "log"} if self.is_snapshot else {})

    @classmethod
    def from_key_values(
        cls, pairs: Mapping[bytes, bytes] | None, *, name: str
    ) -> ObjectMetadata | None:
        """Read the metadata of the object `name`; None if another program wrote the object.

        Raises:
            CorruptionError: The keys violate the format or contradict each other.
            UsageError: A newer version of logmirror wrote the object.
        """
        version = (pairs or {}).get(_VERSION_KEY.encode())
        if pairs is None or version is None:
            return None
        try:
            texts = {key.decode(): value.decode() for key, value in pairs.items()}
            if int(version) > VERSION:
                raise UsageError(
                    "a newer version of logmirror wrote this object",
                    hint="upgrade logmirror here",
                    name=name,
                    expected=VERSION,
                    found=int(version),
                )
            metadata = cls._from_texts(texts)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                "unreadable metadata in the object", name=name, reason=repr(error)
            ) from error
        missing = sum(metadata.gap_counts.values())
        if metadata.is_snapshot:
            return metadata
        if metadata.record_count + missing != metadata.covered.offset_count:
            raise CorruptionError(
                "records and offset gaps do not add up to the offsets covered",
                name=name,
                expected=metadata.covered.offset_count,
                records=metadata.record_count,
                gaps=missing,
            )
        return metadata

    @classmethod
    def _from_texts(cls, texts: Mapping[str, str]) -> ObjectMetadata:
        def whole(key: str) -> int:
            return int(texts[PREFIX + key])

        gaps: list[Any] = json.loads(texts[f"{PREFIX}holes"])
        counts: dict[str, Any] = json.loads(texts[f"{PREFIX}hole-counts"])
        return cls(
            topic=texts[f"{PREFIX}topic"],
            topic_id=texts[f"{PREFIX}topic-id"],
            partition=whole("partition"),
            covered=OffsetRange(first=whole("from"), last=whole("to")),
            record_count=whole("record-count"),
            digest=texts[DIGEST_KEY],
            gaps=tuple(
                Gap(first=int(first), last=int(last), cause=GapCause(cause))
                for first, last, cause in gaps
            ),
            gap_counts={GapCause(cause): int(count) for cause, count in counts.items()},
            is_snapshot=texts.get(_COMPACTION_KEY) == "log",
        )


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
