"""Driver: what MirrorMaker 2 has left about the partitions that it copied.

    mm2-offset-syncs.<target>.internal   at the source: pairs of offsets of the same record
    mm2-offsets.<source>.internal        at the target: the last offset that it consumed, as its
                                         Connect worker stores it every 60 s
    <source>-mm2                         at the target: the group of its Connect workers

Nothing of this is trusted: pairs and stored offsets only say where to look.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.cluster.client import EARLIEST, LATEST
from logmirror.cluster.retry import NotFoundError
from logmirror.model import TopicPartition
from logmirror.source.compare import chunks
from logmirror.source.partition import KafkaSource
from logmirror.wire.mirrormaker import SYNC_BYTES, encode_sync_key, offsets_topic

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import numpy.typing as npt

    from logmirror.cluster.client import ClusterClient
    from logmirror.source.partition import FetchBuffer
    from logmirror.wire.decode import RecordDecoder

_INT64: Final = np.dtype(">i8")
_NO_PAIRS: Final = np.empty((0, 2), np.int64)

PAIRS_MAX: Final = 64
"""Pairs that are kept for each partition: those with the highest upstream offsets."""


def sync_pairs(
    client: ClusterClient,
    topic: str | None,
    partitions: Collection[TopicPartition],
    decoder: RecordDecoder,
    buffer: FetchBuffer,
) -> dict[TopicPartition, npt.NDArray[np.int64]]:
    """Read the offset syncs of some partitions, with one pass over their topic.

    Returns:
        For each partition, shape (n, 2): upstream and downstream, highest upstream first.
    """
    keys = {encode_sync_key(partition): partition for partition in partitions}
    found = dict.fromkeys(partitions, _NO_PAIRS)
    values = pa.array(list(keys), pa.binary())
    for table in _records(client, topic, decoder, buffer):
        is_sync = pc.and_(
            pc.is_in(table["key"], value_set=values),
            pc.fill_null(pc.greater_equal(pc.binary_length(table["value"]), SYNC_BYTES), False),
        )
        syncs = table.filter(is_sync).combine_chunks()
        for key in pc.unique(syncs["key"]).to_pylist():
            mine = syncs.filter(pc.equal(syncs["key"], key)).combine_chunks()
            heads = pc.binary_slice(mine["value"].combine_chunks(), 0, SYNC_BYTES)
            heads = pa.concat_arrays([heads])  # without an offset of its own
            data = np.frombuffer(heads.buffers()[2], dtype=_INT64, count=2 * len(heads))
            pairs = np.concatenate([found[keys[key]], data.reshape(-1, 2).astype(np.int64)])
            highest = np.argsort(-pairs[:, 0], kind="stable")[:PAIRS_MAX]
            found[keys[key]] = pairs[highest]
    return found


def stored_offsets(
    client: ClusterClient,
    source_alias: str,
    partitions: Collection[TopicPartition],
    decoder: RecordDecoder,
    buffer: FetchBuffer,
) -> dict[TopicPartition, int]:
    """Read the last offset of each partition that MirrorMaker has stored as consumed."""
    found: dict[TopicPartition, int] = {}
    for table in _records(client, offsets_topic(source_alias), decoder, buffer):
        keys = table["key"].combine_chunks().dictionary_encode()
        rows = keys.indices.to_numpy(zero_copy_only=False)
        for number, key in enumerate(keys.dictionary.to_pylist()):
            partition = _source_of(key, source_alias)
            if partition is not None and partition in partitions:
                last = int(np.flatnonzero(rows == number)[-1])
                offset = _offset_of(table["value"][last].as_py())
                if offset is not None:
                    found[partition] = offset
    return found


def _source_of(key: bytes, source_alias: str) -> TopicPartition | None:
    """Return the partition of a stored offset; None if the key is not of a copied partition."""
    try:
        _, about = json.loads(key)
        if about["cluster"] != source_alias:
            return None
        return TopicPartition(str(about["topic"]), int(about["partition"]))
    except (ValueError, TypeError, KeyError):
        return None


def _offset_of(value: bytes | None) -> int | None:
    try:
        return int(json.loads(value or b"")["offset"])
    except (ValueError, TypeError, KeyError):
        return None


def _records(
    client: ClusterClient, topic: str | None, decoder: RecordDecoder, buffer: FetchBuffer
) -> Iterator[pa.Table]:
    """Yield the committed records of all partitions of a topic; none if there is no such topic."""
    if topic is None:
        return
    try:
        found = client.topic(topic)
    except NotFoundError:
        return
    where = [TopicPartition(topic, number) for number in found.partitions]
    starts, ends = client.list_offsets(where, EARLIEST), client.list_offsets(where, LATEST)
    for one in where:
        log = KafkaSource(client, one, topic_id=found.topic_id, buffer=buffer)
        for table, _ in chunks(log, decoder, starts[one], ends[one]):
            if table.num_rows:
                yield table
