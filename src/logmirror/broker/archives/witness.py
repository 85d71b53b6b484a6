"""What an object must contain, by its claim or its compaction record.

Claims of native and NDJSON objects are kept as long as the objects. An object without one was
written by mirror-v3, or its archive was copied without the folder `.logmirror`. Whether offsets at
its end had no record, or were cut off, is not known then, so it must end where its name says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.archive.claims import accepted_claims
from logmirror.archive.compactions import expected_content
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from logmirror.archive.claims import Claim
    from logmirror.model import OffsetRange
    from logmirror.stores.base import BlobStore


def read_witness(
    store: BlobStore, folder: str, covered: OffsetRange, *, name: str
) -> Mapping[str, Claim]:
    """Return the claims of an object by the digests that it may have; empty: not known.

    Args:
        store: The archive.
        folder: `<destination>/<partition>`.
        covered: The object's range.
        name: Its name, for errors.

    Raises:
        CorruptionError: The claim is for another range, or not a claim.
        UnavailableError: The store cannot be reached.
    """
    claim = expected_content(store, folder, covered)
    if claim is None:
        return {}
    if claim.covered != covered:
        raise differs("range", str(claim.covered), str(covered), name=name)
    return accepted_claims(store, folder.rpartition("/")[0], claim)


def check_digest(found: str, witness: Collection[str], *, name: str) -> None:
    """Raise CorruptionError if the digest is not one that the object may have."""
    if witness and found not in witness:
        raise differs("digest", ", ".join(sorted(witness)), found, name=name)


def differs(what: str, expected: str, found: str, *, name: str) -> CorruptionError:
    """Return the error for an object that is not what its claim or its footer says."""
    return CorruptionError(
        f"the object's {what} differs from its claim or its footer; it is not served",
        hint="restore the object from a backup, or copy its offsets again from the source",
        name=name,
        expected=expected,
        found=found,
    )


def check_end(end: int, covered: OffsetRange, *, name: str) -> None:
    """Raise CorruptionError if an object without a claim ends before the last offset of its name.

    Args:
        end: The offset behind its last batch or record.
        covered: Its range.
        name: Its name, for errors.
    """
    if end != covered.next_offset:
        raise CorruptionError(
            "the object does not end at the last offset of its name, and no claim shows why; "
            "it is not served",
            hint="copy the folder `.logmirror` of the archive too; if it is there, records are "
            "missing at the end of the object",
            name=name,
            expected=covered.last,
            found=end - 1,
        )
