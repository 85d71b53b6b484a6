"""Rows of Parquet and NDJSON objects as record batches, compared with footer and claim.

Imports pyarrow and numba, which a broker without such archives does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from logmirror.archive.compactions import part_starts
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import PARQUET, parse_object_name, partition_of
from logmirror.archive.reader import iterate
from logmirror.broker.archives.witness import check_digest, check_end, differs, read_witness
from logmirror.errors import CorruptionError
from logmirror.wire.columns import ContentDigest
from logmirror.wire.serve_columns import serve_columns

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from logmirror.stores.base import BlobStore

_TIME_COLUMNS: Final = frozenset({"timestamp", "timestamp_ms"})
"""Of objects of logmirror and of mirror-v3."""

_NO_TIME: Final = -1


def checked_batches(store: BlobStore, folder: str, name: str, *, utf8: bool) -> Iterator[bytearray]:
    """Yield the record batches of an object; they are valid only if this ends without an error.

    Args:
        store: The archive.
        folder: `<destination>/<partition>`.
        name: The object's name, without the folder.
        utf8: NDJSON keys and values are text.

    Raises:
        CorruptionError: The object is damaged, is a snapshot, or differs from footer or claim.
        UnavailableError: The store cannot be reached.
        KeyError: There is no such object.
    """
    covered, extension = parse_object_name(name)
    claims = read_witness(store, folder, covered, name=name)
    witness: Collection[str] = claims.keys()
    if extension == PARQUET:
        metadata = _metadata(_footer(store, folder, name), folder, name)
        if metadata is not None:
            check_digest(metadata.digest, witness, name=name)
            witness = {metadata.digest}
    rows = _checked(iterate(store, folder, name, utf8=utf8), witness, name)
    # A reader may have read some of the parts before they were merged.
    is_merged = any(claim.is_merged for claim in claims.values())
    starts = part_starts(store, folder, covered) if is_merged else ()
    yield from serve_columns(rows, covered.first, covered.last, starts)


def _checked(rows: Iterator[Any], witness: Collection[str], name: str) -> Iterator[Any]:
    covered, _ = parse_object_name(name)
    digest, end = ContentDigest(), covered.first
    for batch in rows:
        digest.update_arrow(batch)
        if len(batch):
            end = batch.column("offset")[-1].as_py() + 1
        yield batch
    if witness:
        check_digest(digest.hexdigest(), witness, name=name)
    else:
        check_end(end, covered, name=name)


def newest_ms(store: BlobStore, folder: str, name: str) -> int | None:
    """Return the largest timestamp of a Parquet object by its footer; None: it does not say.

    Raises as `checked_batches` does.
    """
    footer = _footer(store, folder, name)
    _metadata(footer, folder, name)
    newest = _NO_TIME
    for group in range(footer.num_row_groups):
        columns = footer.row_group(group)
        for number in range(columns.num_columns):
            column = columns.column(number)
            if column.path_in_schema in _TIME_COLUMNS:
                statistics = column.statistics
                if statistics is None or not statistics.has_min_max:
                    return None
                newest = max(newest, statistics.max_raw)
    return newest


def _footer(store: BlobStore, folder: str, name: str) -> Any:  # noqa: ANN401  # no types
    try:
        with store.open(f"{folder}/{name}") as file:
            return pq.read_metadata(file)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptionError(
            "not a whole Parquet file", name=name, reason=str(error)[:200]
        ) from error


def _metadata(footer: Any, folder: str, name: str) -> ObjectMetadata | None:  # noqa: ANN401  # as above
    covered, _ = parse_object_name(name)
    metadata = ObjectMetadata.from_key_values(footer.metadata, name=name)
    if metadata is None:
        return None
    if metadata.is_snapshot:
        raise CorruptionError(
            "snapshots are not served",
            hint="read them with logmirror.dataframes",
            name=name,
            folder=folder,
        )
    if metadata.covered != covered:
        raise differs("range", str(metadata.covered), str(covered), name=name)
    if metadata.partition != partition_of(folder):
        raise differs("partition", str(metadata.partition), str(partition_of(folder)), name=name)
    return metadata
