"""The content digest, by which two writers recognise objects with the same content.

It does not depend on compression. For native objects the content is the bytes; for other formats it
is the records, column by column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from logmirror.archive.metadata import DIGEST_KEY
from logmirror.archive.naming import NATIVE, PARQUET
from logmirror.archive.ndjson import read_ndjson
from logmirror.errors import CorruptionError
from logmirror.wire.columns import ContentDigest

if TYPE_CHECKING:
    from typing import BinaryIO

    from logmirror.stores.base import BlobStore

_READ_BYTES: Final = 1 << 20


def object_digest(store: BlobStore, name: str, *, expected: str) -> str | None:
    """Return the content digest of an object; None for a Parquet file without one in its footer.

    For Parquet the digest in the footer is returned without a check of the rows. This is cheap and
    identifies the object; `object_check.check_object` verifies the content.

    Args:
        store: The destination's store.
        name: The object's name, with its folder.
        expected: The digest that the caller expects. NDJSON does not show whether keys and values
            are base64 or text; the reading with this digest is the right one.

    Raises:
        CorruptionError: The object violates the format in its name.
        KeyError: There is no such object.
    """
    extension = name.rpartition(".")[2]
    with store.open(name) as file:
        if extension == NATIVE:
            return bytes_digest(file)
        if extension == PARQUET:
            return _footer_digest(file, name)
    with store.open(name) as file:
        # Every line that can be read as base64 can also be read as text, so text is tried first.
        found = lines_digest(file, name, utf8=True)
        if found == expected:
            return found
        file.seek(0)
        return lines_digest(file, name)


def lines_digest(file: BinaryIO, name: str, *, utf8: bool = False) -> str:
    """Return the digest of the records in an NDJSON object."""
    digest = ContentDigest()
    for batch in read_ndjson(file, name=name, utf8=utf8):
        digest.update_arrow(batch)
    return digest.hexdigest()


def bytes_digest(file: BinaryIO) -> str:
    """Return the digest of a file's bytes from its current position to its end."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    while (size_bytes := file.readinto(buffer)) > 0:  # type: ignore[attr-defined]  # typeshed lacks it
        digest.update(buffer[:size_bytes])
    return f"xxh3:{digest.hexdigest()}"


def _footer_digest(file: BinaryIO, name: str) -> str | None:
    try:
        metadata = pq.read_metadata(file).metadata or {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptionError("not a whole Parquet file", name=name, reason=str(error)) from error
    digest = metadata.get(DIGEST_KEY.encode())
    return None if digest is None else digest.decode("ascii", "replace")
