"""Read objects back: their rows, and the types of their columns."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from logmirror.archive.naming import NATIVE, PARQUET, parse_object_name, partition_of
from logmirror.archive.native import native_rows
from logmirror.archive.ndjson import read_ndjson
from logmirror.archive.parquet import column_types, open_parquet, read_parquet
from logmirror.errors import LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.model import ColumnTypes
    from logmirror.stores.base import BlobStore


def iterate(  # noqa: PLR0913  # one parameter for each thing the object does not contain
    store: BlobStore,
    folder: str,
    name: str,
    *,
    topic: str = "",
    utf8: bool = False,
    at_end: bool = False,
) -> Iterator[Any]:
    """Yield an object's rows as Arrow record batches of `wire.columns.SCHEMA`, in order.

    Args:
        store: The destination's store.
        folder: The chain's folder: `<destination>/<partition>`.
        name: The object's name, without the folder.
        topic: Topic in the rows of native objects, which do not contain it.
        utf8: NDJSON keys and values are text.
        at_end: The caller needs the last rows only. The others may be left out: of Parquet, all row
            groups but the last are not read.

    Raises:
        CorruptionError: The object violates its format.
        KeyError: There is no such object.
    """
    covered, extension = parse_object_name(name)
    with store.open(f"{folder}/{name}") as file:
        if extension == NATIVE:
            yield from native_rows(file, name, covered, topic, partition_of(folder))
        elif extension == PARQUET:
            yield from read_parquet(open_parquet(file, name), name, last_group=at_end)
        else:
            yield from read_ndjson(file, name=name, utf8=utf8)


def object_types(store: BlobStore, folder: str, name: str) -> ColumnTypes:
    """Return the types of the key and value columns of a Parquet object.

    Raises:
        CorruptionError: It is not Parquet, or has other columns.
        UnavailableError: The object could not be read.
        KeyError: There is no such object.
    """
    with read_errors(name), store.open(f"{folder}/{name}") as file:
        return column_types(open_parquet(file, name), name)


@contextlib.contextmanager
def read_errors(name: str, **facts: object) -> Iterator[None]:
    """Add the object's name, and further facts, to errors; an OSError becomes UnavailableError."""
    try:
        yield
    except LogmirrorError as error:
        raise error.add_facts(name=name, **facts) from None
    except OSError as error:
        raise UnavailableError(
            "could not read the object",
            hint="check the disk",
            name=name,
            reason=error.strerror,
        ) from error
