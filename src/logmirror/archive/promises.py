"""Whether an object is what was promised of it: by its claim, or when it was merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from logmirror.archive.claims import Claim
    from logmirror.archive.reader import ObjectReport


def compare_with_claim(found: ObjectReport, claim: Claim, topic: str | None) -> None:
    """Raise CorruptionError where an object is not what was claimed.

    Args:
        found: What the object is.
        claim: What was promised.
        topic: Of its records, if they tell.
    """
    differences = {
        "range": (claim.covered, found.covered),
        "digest": (claim.digest, found.digest or claim.digest),
        "record count": (
            claim.record_count,
            claim.record_count if found.record_count is None else found.record_count,
        ),
        "topic": (claim.topic, topic or claim.topic),
        "topic id": (claim.topic_id or found.topic_id, found.topic_id or claim.topic_id),
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
