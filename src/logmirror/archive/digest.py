"""The digest by which two writers recognise each other's object.

It is of the content: two writers that compress differently still agree on it. For native objects
the content is the bytes; for the others it is the records, column by column.
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
    """Return the content digest of an object, or None if it is a file that does not tell.

    A Parquet object is believed what its footer says, so that this stays cheap: the question is
    whose object lies there. Whether its bytes are still good is asked by `reader.check_object`.

    Args:
        store: Where it lies.
        name: With its folder.
        expected: The digest it should have. NDJSON does not tell whether its keys and values are
            base64 or text; if one reading has this digest, it is the right one.

    Raises:
        CorruptionError: The object is not of the format that its name says.
        KeyError: There is no such object.
    """
    extension = name.rpartition(".")[2]
    with store.open(name) as file:
        if extension == NATIVE:
            return bytes_digest(file)
        if extension == PARQUET:
            return _footer_digest(file, name)
    with store.open(name) as file:
        # Text reads any line that base64 reads, so this order never fails where the other would do.
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
    """Return the digest of a file's bytes from here to its end."""
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
