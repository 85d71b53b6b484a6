"""MirrorMaker 2's own translation of offsets: `MirrorTranslationJudge.java`.

Its stores of offset syncs and of checkpoints, and the decision of its checkpoint task, with the
records of a test or with the topics of brokers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from kit.judges.java_program import JavaProgram
from kit.judges.mirrormaker import MirrorMakerTools
from kit.servers.apache import VERSIONS
from logmirror.wire.mirrormaker import encode_sync, encode_sync_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logmirror.model import TopicPartition

_SOURCE: Final = Path(__file__).with_name("MirrorTranslationJudge.java")

Records = list[tuple[bytes, bytes]]
"""Keys and values."""


def sync_records(partition: TopicPartition, pairs: Iterable[tuple[int, int]]) -> Records:
    """Return offset syncs as records of their topic."""
    return [(encode_sync_key(partition), encode_sync(*pair)) for pair in pairs]


def table(records: Records) -> pa.Table:
    """Return records as columns, as readers of these topics get them."""
    keys, values = [key for key, _ in records], [value for _, value in records]
    return pa.table(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": [[] for _ in records],
            "is_aborted": [False for _ in records],
        }
    )


class CheckpointStart(NamedTuple):
    """How the start of MirrorMaker's store of checkpoints has ended."""

    is_read: bool
    is_initialized: bool
    count: int


class MirrorTranslation(JavaProgram):
    """One store of syncs and one of checkpoints, of one release; a context manager."""

    def __init__(self, version: str = VERSIONS[-1]) -> None:
        super().__init__(
            MirrorMakerTools(version).application(
                _SOURCE, "org.apache.kafka.connect.mirror.MirrorTranslationJudge"
            )
        )

    def read_checkpoints(
        self, records: Records, *, groups: Sequence[str] = ("g",), is_readable: bool = True
    ) -> CheckpointStart:
        """`CheckpointStore.start` of a task for some groups.

        Args:
            records: Those of the checkpoints topic.
            groups: The groups of the task.
            is_readable: Whether READ is allowed on the topic to its end.
        """
        found = self.request("checkpoints", ",".join(groups), _hex(records), _java(is_readable))
        return CheckpointStart(*found)

    def read_syncs(self, records: Records, *, must_read_to_end: bool) -> None:
        """`OffsetSyncStore.start`; the task passes whether no checkpoints were read."""
        self.request("syncs", _java(must_read_to_end), _hex(records))

    def add_syncs(self, records: Records) -> None:
        """Syncs that arrive after the start."""
        self.request("add", _hex(records))

    def read_topics(self, properties: Mapping[str, object]) -> bool:
        """Start both stores with the topics of brokers; return whether checkpoints were read."""
        given = (f"{name}={value}" for name, value in properties.items())
        return bool(self.request("read", *given))

    def translated(self, partition: TopicPartition, offsets: Iterable[int]) -> list[int | None]:
        """`OffsetSyncStore.translateDownstream` for each offset; -1 or None: no translation."""
        found: list[int | None] = self.request(
            "translate", *_where(partition), ",".join(map(str, offsets))
        )
        return found

    def slots(self, partition: TopicPartition) -> list[int]:
        """Return the upstream offsets of the different syncs in the store, newest first."""
        found: list[int] = self.request("slots", *_where(partition))
        return found

    def emitted(self, partition: TopicPartition, offset: int, group: str = "g") -> int | None:
        """`MirrorCheckpointTask`: the downstream offset of the checkpoint; None: no checkpoint."""
        found: int | None = self.request("emitted", group, *_where(partition), str(offset))
        return found

    def syncs_due(self, lag_max: int, pairs: Iterable[tuple[int, int]]) -> list[bool]:
        """`OffsetSyncWriter.PartitionState`: for each record's pair whether it is a sync."""
        found: list[bool] = self.request(
            "rule", str(lag_max), ",".join(f"{a}:{b}" for a, b in pairs)
        )
        return found


def _java(value: bool) -> str:  # a value, not a switch
    return str(value).lower()


def _where(partition: TopicPartition) -> tuple[str, str]:
    return partition.topic, str(partition.partition)


def _hex(records: Records) -> str:
    return ",".join(f"{key.hex()}:{value.hex()}" for key, value in records)
