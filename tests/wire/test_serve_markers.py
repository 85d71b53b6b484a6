"""Goal: a transaction marker equals the one that Kafka writes, byte for byte.

Method: comparison with the reference encoder, which tests of the broker compare with Kafka's.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from logmirror.wire.batch_header import MarkerType, crc32c_reference, parse_header
from logmirror.wire.records import encode_marker
from logmirror.wire.serve_markers import MARKER_BYTES, coordinator_epoch_of, pack_marker

_INT64 = st.integers(-(2**63), 2**63 - 1)
_EPOCHS = st.integers(-(2**31), 2**31 - 1)


@given(_INT64, st.integers(-(2**15), 2**15 - 1), st.sampled_from(MarkerType), _INT64)
def test_a_marker_is_what_the_reference_makes(producer_id, epoch, marker, timestamp_ms):
    found = pack_marker(
        producer_id,
        epoch,
        commit=marker is MarkerType.COMMIT,
        coordinator_epoch=0,
        timestamp_ms=timestamp_ms,
    )

    expected = encode_marker(
        marker,
        offset=0,
        producer_id=producer_id,
        producer_epoch=epoch,
        timestamp_ms=timestamp_ms,
    )
    assert bytes(found) == expected
    assert len(found) == MARKER_BYTES


@given(_EPOCHS)
def test_the_coordinator_epoch_is_read_back(epoch):
    marker = pack_marker(7, 3, commit=True, coordinator_epoch=epoch, timestamp_ms=5)

    assert coordinator_epoch_of(marker) == epoch
    assert coordinator_epoch_of(marker[:-1]) == -1
    crc = crc32c_reference(bytes(marker[21:]))
    assert parse_header(marker, 0).crc == crc
