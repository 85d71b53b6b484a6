"""Whether an object is what was promised of it: by its claim, or when it was merged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from logmirror.archive.claims import Claim
    from logmirror.model import OffsetRange


def compare_with_claim(  # noqa: PLR0913  # all that a claim promises
    claim: Claim,
    name: str,
    *,
    covered: OffsetRange,
    digest: str | None,
    record_count: int | None,
    topic: str | None,
    topic_id: str,
) -> None:
    """Raise CorruptionError where the object called `name` is not what was claimed.

    What is None, or an empty id, the object does not tell.
    """
    differences = {
        "range": (claim.covered, covered),
        "digest": (claim.digest, digest or claim.digest),
        "record count": (
            claim.record_count,
            claim.record_count if record_count is None else record_count,
        ),
        "topic": (claim.topic, topic or claim.topic),
        "topic id": (claim.topic_id or topic_id, topic_id or claim.topic_id),
    }
    for what, (expected, present) in differences.items():
        if expected != present:
            raise CorruptionError(
                f"the object's {what} is not the one that was claimed for it",
                hint="the object was changed after it was written",
                name=name,
                expected=expected,
                found=present,
                claimed_by=claim.writer,
            )
