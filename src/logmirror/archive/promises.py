"""Whether an object is what was promised of it: by its claim, or when it was merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from logmirror.archive.claims import Claim
    from logmirror.model import OffsetRange


class Found(Protocol):
    """What a check has found of an object; None, or an empty id: the object does not tell."""

    @property
    def name(self) -> str:
        """Without folder."""
        ...

    @property
    def covered(self) -> OffsetRange:
        """The range of its name."""
        ...

    @property
    def digest(self) -> str | None:
        """Of its content."""
        ...

    @property
    def record_count(self) -> int | None:
        """How many it holds."""
        ...

    @property
    def topic_id(self) -> str:
        """Of the source's topic."""
        ...


def compare_with_claim(found: Found, claim: Claim, topic: str | None) -> None:
    """Raise CorruptionError where an object, or its records' topic, is not what was claimed."""
    count, topic_id = found.record_count, found.topic_id
    differences = {
        "range": (claim.covered, found.covered),
        "digest": (claim.digest, found.digest or claim.digest),
        "record count": (claim.record_count, claim.record_count if count is None else count),
        "topic": (claim.topic, topic or claim.topic),
        "topic id": (claim.topic_id or topic_id, topic_id or claim.topic_id),
    }
    for what, (expected, present) in differences.items():
        if expected != present:
            raise CorruptionError(
                f"the object's {what} is not the one that was claimed for it",
                hint="the object was changed after it was written",
                name=found.name,
                expected=expected,
                found=present,
                claimed_by=claim.writer,
            )
