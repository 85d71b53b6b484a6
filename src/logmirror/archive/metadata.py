"""What a Parquet object says of itself in its footer: who it is, what it covers, what it lacks.

Key-value metadata, keys `logmirror.*`, values text; described in `docs/formats/parquet.md`. A file
without these keys was written by another program and is read for what it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from logmirror.errors import CorruptionError, UsageError
from logmirror.model import Gap, GapCause, OffsetRange

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION: Final = 1
"""Of the keys and of the columns. A reader refuses a higher one."""

PREFIX: Final = "logmirror."

DIGEST_KEY: Final = f"{PREFIX}digest"
"""Holds the content digest of the records."""

FILE_CHECK_KEY: Final = f"{PREFIX}file-check"
"""Holds the checksum of the whole file, in which `NO_FILE_CHECK` stands in place of itself."""

NO_FILE_CHECK: Final = f"xxh3:{'0' * 32}"

_VERSION_KEY: Final = f"{PREFIX}format-version"
_COMPACTION_KEY: Final = f"{PREFIX}compaction"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectMetadata:
    """An object's own account of itself."""

    topic: str
    topic_id: str
    """32 hexadecimal digits; empty where the source has no topic ids."""

    partition: int
    covered: OffsetRange
    record_count: int
    digest: str
    """Of the records: `xxh3:` and 32 hexadecimal digits."""

    gaps: tuple[Gap, ...] = ()
    """Runs of offsets without records, ascending; where there are very many, the first of them."""

    gap_counts: Mapping[GapCause, int] = field(default_factory=dict)
    """How many offsets carry no record, by cause; complete, also where `gaps` is not."""

    is_snapshot: bool = False
    """One row for each key, sorted by key: what `compaction: log` writes. Offsets may then lie
    below the range, and records and holes need not add up to it."""

    def to_key_values(self) -> dict[str, str]:
        """Return the metadata as Parquet holds it."""
        gaps = [[gap.first, gap.last, gap.cause.value] for gap in self.gaps]
        counts = {cause.value: count for cause, count in self.gap_counts.items() if count}
        return {
            _VERSION_KEY: str(VERSION),
            f"{PREFIX}topic": self.topic,
            f"{PREFIX}topic-id": self.topic_id,
            f"{PREFIX}partition": str(self.partition),
            f"{PREFIX}from": str(self.covered.first),
            f"{PREFIX}to": str(self.covered.last),
            f"{PREFIX}record-count": str(self.record_count),
            DIGEST_KEY: self.digest,
            f"{PREFIX}holes": json.dumps(gaps, separators=(",", ":")),
            f"{PREFIX}hole-counts": json.dumps(counts, separators=(",", ":")),
        } | ({_COMPACTION_KEY: "log"} if self.is_snapshot else {})

    @classmethod
    def from_key_values(
        cls, pairs: Mapping[bytes, bytes] | None, *, name: str
    ) -> ObjectMetadata | None:
        """Read the metadata of the object called `name`; None if another program wrote it.

        Raises:
            CorruptionError: The keys contradict their format or each other.
            UsageError: A newer version of the program wrote the object.
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
                "records and holes do not add up to the offsets covered",
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
