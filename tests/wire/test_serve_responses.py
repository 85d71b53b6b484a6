"""Goal: hand-encoded responses are valid in every version.

Method: kio, an independent codec, reads them back; records are inserted as from a file.
"""

from __future__ import annotations

import uuid

import pytest

from kit.judges.raw_client import read_response
from logmirror.wire.serve_fetch import Fetched, pack_fetch_response
from logmirror.wire.serve_produce import Produced, pack_produce_response


@pytest.mark.parametrize("version", range(3, 12))
def test_kio_reads_a_produce_response(version):
    topics = [("a", [Produced(0, 0, 2**40, 5), Produced(1, 45, -1, -1)]), ("b\u00fc", [])]

    frame = pack_produce_response(version, 99, topics)

    correlation_id, response = read_response(0, version, bytes(frame[4:]))
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    assert correlation_id == 99
    assert [topic.name for topic in response.responses] == ["a", "b\u00fc"]
    good, bad = response.responses[0].partition_responses
    assert (good.index, good.error_code, good.base_offset) == (0, 0, 2**40)
    assert (bad.index, bad.error_code, bad.base_offset) == (1, 45, -1)
    if version >= 5:
        assert (good.log_start_offset, bad.log_start_offset) == (5, -1)


@pytest.mark.parametrize("version", range(4, 18))
def test_kio_reads_a_fetch_response_with_records_in_between(version):
    name = uuid.UUID(int=5).bytes if version >= 13 else "a"
    records = [b"x" * 300, b"y" * 7]
    rest = Fetched(1, 1, 9, 9, 0, 9), Fetched(2, 0, 50, 0, 7, 50, [])
    topics = [
        (name, [Fetched(0, 0, 100, 3, 300, 90, [(7, 12), (2**40, 80)]), *rest]),
        (name, []),
    ]

    pieces = pack_fetch_response(version, 99, topics)

    assert len(pieces) == 3
    frame = bytes(pieces[0]) + records[0] + bytes(pieces[1]) + records[1] + bytes(pieces[2])
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    correlation_id, response = read_response(1, version, frame[4:])
    assert correlation_id == 99
    first, wrong, last = response.responses[0].partitions
    assert (first.partition_index, first.error_code, first.high_watermark) == (0, 0, 100)
    assert first.last_stable_offset == 90
    aborted = [(one.producer_id, one.first_offset) for one in first.aborted_transactions]
    assert aborted == [(7, 12), (2**40, 80)]
    assert (wrong.aborted_transactions, last.aborted_transactions) == (None, ())
    assert bytes(first.records) == records[0]
    assert (wrong.error_code, wrong.high_watermark, len(wrong.records or b"")) == (1, 9, 0)
    assert bytes(last.records) == records[1]
    if version >= 5:
        assert first.log_start_offset == 3


@pytest.mark.parametrize("version", range(7, 18))
def test_kio_reads_the_refusal_of_a_fetch_session(version):
    [frame] = pack_fetch_response(version, 1, [], error=70)

    _, response = read_response(1, version, bytes(frame[4:]))

    assert (response.error_code, response.session_id) == (70, 0)
    assert response.responses == ()
