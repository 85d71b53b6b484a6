"""A replica that ends below the source's log start offset: refused, unless it ends with padding.

Method: a scripted destination that serves one batch, which fits the first request or does not.
"""

from __future__ import annotations

import pytest

from logmirror.cluster.client import EARLIEST, FetchResult
from logmirror.errors import PositionError
from logmirror.model import TopicPartition
from logmirror.to_kafka.idempotence import padding_producer_id, producer_id
from logmirror.to_kafka.trimmed import check_trimmed
from logmirror.wire.padding import padding
from logmirror.wire.rebatch import stamp

WHERE = TopicPartition("copy", 0)
WRITER = producer_id("copy", 0, bytes(16))
PADDING = padding_producer_id(WRITER)
END, SOURCE_START = 10, 15


def last_batch(producer: int) -> bytearray:
    """A batch of ten records, which ends at `END`."""
    batch = bytearray(padding(END, timestamp_ms=0))
    stamp(memoryview(batch), producer_id=producer, producer_epoch=0, sequence=0)
    return batch


class Destination:
    """One partition, whose only batch is `data`."""

    def __init__(self, data: bytes, *, start: int = 0, least_view: int = 0) -> None:
        self.data, self.start, self.least_view = data, start, least_view
        self.offsets: list[int] = []

    def list_offsets(self, partitions, at, *, read_committed):
        assert (at, read_committed) == (EARLIEST, False)
        return dict.fromkeys(partitions, self.start)

    def fetch(self, partition, offset, view, **how):
        assert partition == WHERE
        assert how == {"topic_id": None, "max_wait_ms": 0, "read_committed": False}
        self.offsets.append(offset)
        needed = max(len(self.data), self.least_view)
        if needed > len(view):
            return FetchResult(0, END, END, self.start, (), needed)
        view[: len(self.data)] = self.data
        return FetchResult(len(self.data), END, END, self.start, (), 0)


def check(destination: Destination) -> None:
    check_trimmed(destination, WHERE, END, SOURCE_START, PADDING)


@pytest.mark.parametrize("least_view", [0, 1 << 20])
def test_records_before_the_lost_ones_are_refused(least_view):
    destination = Destination(last_batch(WRITER), least_view=least_view)

    with pytest.raises(PositionError) as refused:
        check(destination)

    facts = refused.value.facts
    assert (facts["reason"], facts["position"]) == ("SourceTrimmed", END)
    assert (facts["log_start"], facts["source_start"]) == (0, SOURCE_START)
    assert destination.offsets == [END - 1] * (2 if least_view else 1)


def test_padding_may_continue():
    check(Destination(last_batch(PADDING)))


def test_padding_that_was_deleted_is_not_read():
    destination = Destination(b"", start=END)

    check(destination)

    assert destination.offsets == []


@pytest.mark.parametrize("data", [b"", last_batch(WRITER)[:40]])
def test_what_cannot_be_read_is_left_to_the_executor(data):
    check(Destination(data))


def test_an_enormous_batch_is_left_to_the_executor():
    destination = Destination(last_batch(WRITER), least_view=9 << 20)

    check(destination)

    assert len(destination.offsets) == 1


def test_a_log_that_moves_meanwhile_is_left_to_the_executor():
    class Moving(Destination):
        def fetch(self, *_, **__):
            raise PositionError("the offset is outside the partition's log")

    check(Moving(last_batch(WRITER)))
