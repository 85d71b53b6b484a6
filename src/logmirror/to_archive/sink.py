"""Executor: one object under construction at one store.

The writer encodes rows or batches into a durable staged object and computes the digest of its
content, which the claim then records. The digest covers the content, not the file: it does not
depend on compression.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from logmirror.archive.envelope import NativeEncoder, NdjsonEncoder, ParquetEncoder
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import format_name
from logmirror.errors import InternalError
from logmirror.model import GapCause
from logmirror.wire.columns import ContentDigest

if TYPE_CHECKING:
    from logmirror.mirror.ports import ArchiveSpec, FlowId, GapSummary
    from logmirror.model import OffsetRange
    from logmirror.stores.base import BlobStore, Buffer
    from logmirror.wire.columns import Columns


class ObjectWriter:
    """Writes one object. Append rows or batches, never both; then call `finish` or `abort`."""

    def __init__(
        self,
        store: BlobStore,
        spec: ArchiveSpec,
        flow: FlowId,
        first: int,
        *,
        row_group_bytes: int | None = None,
    ) -> None:
        self._flow, self._spec = flow, spec
        self._staged = store.stage(f"{flow.topic}-{flow.partition}-{first}")
        self.object_bytes = 0
        self.payload_bytes = 0
        self.record_count = 0
        self._rows_digest = ContentDigest()
        self._bytes_digest = xxhash.xxh3_128()
        self._encoder: NativeEncoder | ParquetEncoder | NdjsonEncoder
        if spec.format == "native":
            self._encoder = NativeEncoder(self)
        elif spec.format == "parquet":
            self._encoder = ParquetEncoder(
                self,
                topic=flow.topic,
                partition=flow.partition,
                compression=spec.compression,
                row_group_bytes=row_group_bytes,
                types=spec.types,
            )
        else:
            self._encoder = NdjsonEncoder(
                self, topic=flow.topic, partition=flow.partition, utf8=spec.encoding == "utf8"
            )

    def write(self, data: Buffer) -> int:
        """Write bytes of the encoder to the store and count them."""
        written = self._staged.write(data)
        self.object_bytes += written
        return written

    def append_batches(self, data: memoryview, record_count: int) -> None:
        """Append whole batches, unchanged."""
        if not isinstance(self._encoder, NativeEncoder):
            raise InternalError("batches for an object of rows", format=self._spec.format)
        self._encoder.append(data)
        self._bytes_digest.update(data)
        self.payload_bytes += len(data)
        self.record_count += record_count

    def append_rows(self, columns: Columns, start: int, stop: int) -> None:
        """Append rows start..stop of a decoded chunk."""
        if isinstance(self._encoder, NativeEncoder):
            raise InternalError("rows for an object of batches", format=self._spec.format)
        self._encoder.append(columns, start, stop)
        self._rows_digest.update(columns, start, stop)
        self.payload_bytes += int(columns.payload_bytes[start:stop].sum())
        self.record_count += stop - start

    def append_arrow(self, batch: Any) -> None:  # noqa: ANN401  # pyarrow has no types
        """Append a record batch of `wire.columns.SCHEMA`, of a snapshot."""
        if not isinstance(self._encoder, ParquetEncoder):
            raise InternalError("a snapshot that is not Parquet", format=self._spec.format)
        self._encoder.append_arrow(batch)
        self._rows_digest.update_arrow(batch)
        self.record_count += len(batch)

    def finish(
        self, covered: OffsetRange, gaps: GapSummary, topic_id: bytes | None, *, travels: bool
    ) -> tuple[str, str]:
        """Finish the staged object; returns the store's token and the content digest.

        Args:
            covered: The range of the object.
            gaps: Its offsets without a record.
            topic_id: The source's topic ID.
            travels: Whether another process will publish the object.
        """
        if isinstance(self._encoder, NativeEncoder):
            digest = f"xxh3:{self._bytes_digest.hexdigest()}"
        else:
            digest = self._rows_digest.hexdigest()
        metadata = ObjectMetadata(
            topic=self._flow.topic,
            topic_id=topic_id.hex() if topic_id else "",
            partition=self._flow.partition,
            covered=covered,
            record_count=self.record_count,
            digest=digest,
            gaps=gaps.runs,
            gap_counts={
                GapCause.CONTROL: gaps.control,
                GapCause.ABORTED: gaps.aborted,
                GapCause.COMPACTED: gaps.compacted,
            },
            is_snapshot=self._spec.compaction == "log",
        )
        self._encoder.finish(metadata.to_key_values())
        name = f"{self._flow.folder}/{format_name(covered, self._spec.extension)}"
        return self._staged.finish(name, travels=travels), digest

    def abort(self) -> None:
        """Discard the object. Never raises."""
        # Breaks a reference cycle through Arrow's memory, which the collector cannot see.
        if isinstance(self._encoder, ParquetEncoder):
            self._encoder.detach()
        self._staged.abort()
