"""Goal: compaction knows which transactions were aborted, at the end of an archive too."""

from __future__ import annotations

from struct import pack_into

import pytest

from logmirror.broker.log.outcomes import Aborted, Outcomes
from logmirror.broker.log.partition_transactions import Marker
from logmirror.wire.records import Record, encode_reference
from logmirror.wire.scan import BatchScanner


def _add(outcomes: Outcomes, *batches: bytes) -> None:
    window = b"".join(batches)
    outcomes.add(window, BatchScanner().scan(window, len(window)))


def _in_transaction() -> bytes:
    writer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    return encode_reference([Record(0, 0, 0, b"k", b"v", ())], transactional=True, **writer)


def _aborts(offset: int) -> bytes:
    marker = Marker(7, 0, is_commit=False, coordinator_epoch=0).packed(0)
    pack_into(">q", marker, 0, offset)
    return bytes(marker)


@pytest.mark.parametrize(
    ("archive_end", "crossing", "first"),
    [
        pytest.param(0, (), 0, id="no archive"),
        pytest.param(2, (), 0, id="ended in the archive"),
        pytest.param(1, (), 1, id="of a later producer with this ID"),
        # After a power loss, segments of this broker may be taken for those of an archive.
        pytest.param(1, {1}, 0, id="continued behind the archive"),
    ],
)
def test_an_abort_reaches_into_an_archive_only_where_its_transaction_does(
    archive_end, crossing, first
):
    outcomes = Outcomes(archive_end, crossing)
    _add(outcomes, _in_transaction(), _aborts(1))
    assert outcomes.aborted == [Aborted(7, first, 1)]


@pytest.mark.parametrize(
    ("archive_end", "is_whole", "first"), [(0, True, 0), (1, True, None), (1, False, 0)]
)
def test_a_transaction_without_a_marker_is_committed_only_in_an_archive(
    archive_end, is_whole, first
):
    outcomes = Outcomes(archive_end)
    _add(outcomes, _in_transaction())
    assert outcomes.first_undecided(is_whole=is_whole) == first
