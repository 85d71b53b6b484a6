"""A scan lists exactly the whole batches, refuses malformed ones, and classifies the rest.

Method: named odd and illegal batches; runs drawn at random and truncated at every byte;
transactions interleaved at random, checked against a consumer's rule in ten lines.
"""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.runs.record_batches import batches, relaxed, runs_of_batches, with_right_checksums
from logmirror.errors import CorruptionError, InternalError, UsageError
from logmirror.model import TimestampType
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, decode_reference, encode_marker, encode_reference
from logmirror.wire.scan import KIND_ABORTED, KIND_CONTROL, KIND_DATA, BatchScanner


def row(offset, timestamp_ms=1_700_000_000_000):
    return Record(offset, timestamp_ms, TimestampType.CREATE_TIME, b"key", b"value", ())


def scan(data, **options):
    return BatchScanner().scan(data, len(data), **options)


def test_all_columns_say_what_the_headers_say():
    parts = [
        encode_reference(
            [row(7), row(9)], producer_id=2**62, producer_epoch=32767, base_sequence=5
        ),
        encode_reference([row(10)], codec=Codec.ZSTD, leader_epoch=77, attribute_bits=1 << 14),
        encode_reference([row(20)], last_offset=2**31, max_timestamp_ms=-1),
    ]
    listed = scan(b"".join(parts))

    assert len(listed) == listed.count == 3
    assert listed.positions.tolist() == [0, len(parts[0]), len(parts[0] + parts[1])]
    assert listed.sizes.tolist() == [len(part) for part in parts]
    assert listed.base_offsets.tolist() == [7, 10, 20]
    assert listed.last_offsets.tolist() == [9, 10, 2**31]
    assert listed.record_counts.tolist() == [2, 1, 1]
    assert listed.attributes.tolist() == [0, 4 | 1 << 14, 0]
    assert listed.max_timestamps_ms.tolist() == [1_700_000_000_000, 1_700_000_000_000, -1]
    assert listed.producer_ids.tolist() == [2**62, -1, -1]
    assert listed.producer_epochs.tolist() == [32767, -1, -1]
    assert listed.base_sequences.tolist() == [5, -1, -1]
    assert listed.leader_epochs.tolist() == [0, 77, 0]
    assert listed.kinds.tolist() == [KIND_DATA] * 3
    assert (listed.consumed_bytes, listed.needed_bytes) == (sum(map(len, parts)), 0)


@relaxed
@given(runs_of_batches())
def test_columns_equal_the_parsed_headers(drawn):
    data, _ = drawn
    listed = scan(data)
    position = 0
    for index in range(listed.count):
        header = parse_header(data, position)
        assert listed.base_offsets[index] == header.base_offset
        assert listed.last_offsets[index] == header.last_offset
        assert listed.record_counts[index] == header.record_count
        position += header.size_bytes
    assert position == listed.consumed_bytes == len(data)


@pytest.mark.parametrize(
    "wrap", [bytes, bytearray, memoryview, lambda d: np.frombuffer(d, np.uint8)]
)
def test_any_buffer_will_do_and_none_is_changed(wrap):
    data = encode_reference([row(3)])
    buffer = wrap(bytearray(data))
    assert BatchScanner().scan(buffer, len(data)).count == 1
    assert bytes(buffer) == data


def test_a_truncated_batch_is_not_consumed_and_its_size_is_returned_if_known():
    first, second = encode_reference([row(0)]), encode_reference([row(1)])
    data, scanner = first + second, BatchScanner()
    for size in range(len(data) + 1):
        listed = scanner.scan(data, size)
        whole = (size >= len(first)) + (size == len(data))
        assert listed.count == whole
        assert listed.consumed_bytes == [0, len(first), len(data)][whole]
        left = size - listed.consumed_bytes
        assert listed.needed_bytes == (len(first) if left >= 17 else 0)


def test_nothing_in_is_nothing_out():
    assert scan(b"").count == 0
    assert BatchScanner().scan(bytearray(100), 0).count == 0


def test_a_size_beyond_the_buffer_is_our_own_mistake():
    for size in (-1, 101):
        with pytest.raises(InternalError):
            BatchScanner().scan(bytearray(100), size)


def test_the_table_grows_and_is_used_again():
    scanner = BatchScanner()
    many = b"".join(encode_reference([row(offset)]) for offset in range(3000))
    listed = scanner.scan(many, len(many))
    assert listed.base_offsets.tolist() == list(range(3000))
    assert listed.kinds.tolist() == [KIND_DATA] * 3000
    one = encode_reference([row(5)])
    assert scanner.scan(one, len(one)).base_offsets.tolist() == [5]


def test_an_aborted_transaction_stays_active_while_the_table_grows():
    parts = [
        encode_reference([row(offset)], producer_id=4, transactional=True) for offset in range(2000)
    ]
    data = b"".join(parts) + encode_marker(MarkerType.ABORT, offset=2000, producer_id=4)
    data += encode_reference([row(2001)], producer_id=4, transactional=True)
    listed = scan(data, aborted=[(4, 0)])
    assert listed.kinds.tolist() == [KIND_ABORTED] * 2000 + [KIND_CONTROL, KIND_DATA]


BATCH = encode_reference([row(100), row(101), row(102)], producer_id=3)
MARKER = encode_marker(MarkerType.ABORT, offset=100, producer_id=3)


def put(data, form, at, *values, checksum=True):
    spoiled = bytearray(data)
    struct.pack_into(form, spoiled, at, *values)
    return with_right_checksums(bytes(spoiled)) if checksum else bytes(spoiled)


def control_batch(key):
    return encode_reference([row(100)._replace(key=key)], producer_id=3, control=True)


ILLEGAL = {
    "length below a header": (put(BATCH, ">i", 8, 48, checksum=False), "length"),
    "length negative": (put(BATCH, ">i", 8, -1, checksum=False), "length"),
    "length smallest": (put(BATCH, ">i", 8, -(2**31), checksum=False), "length"),
    "magic 3": (put(BATCH, ">b", 16, 3, checksum=False), "magic"),
    "magic -1": (put(BATCH, ">b", 16, -1, checksum=False), "magic"),
    "checksum": (put(BATCH, ">I", 17, 0xDEADBEEF, checksum=False), "crc"),
    "a flipped bit in a value": (BATCH[:-3] + bytes([BATCH[-3] ^ 1]) + BATCH[-2:], "crc"),
    "base offset negative": (put(BATCH, ">q", 0, -1), "base-offset"),
    "base offset overflows": (put(BATCH, ">q", 0, 2**63 - 2), "last-offset-delta"),
    "no offset could follow": (put(BATCH, ">q", 0, 2**63 - 3), "last-offset-delta"),
    "last offset delta negative": (put(BATCH, ">i", 23, -1), "last-offset-delta"),
    "last offset delta below count - 1": (put(BATCH, ">i", 23, 1), "count"),
    "count negative": (put(BATCH, ">i", 57, -1), "count"),
    "count huge": (put(put(BATCH, ">i", 23, 2**31 - 1), ">i", 57, 2**31 - 1), "count"),
    "count beyond the bytes": (put(put(BATCH, ">i", 23, 999), ">i", 57, 999), "count"),
    "codec 5": (put(BATCH, ">h", 21, 5), "codec"),
    "codec 7": (put(BATCH, ">h", 21, 7), "codec"),
    "control batch compressed": (put(MARKER, ">h", 21, 0x30 | Codec.LZ4), "codec"),
    "control batch without key": (control_batch(None), "marker"),
    "control batch, key too short": (control_batch(b"\0\0\0"), "marker"),
    "control batch, record cut": (put(MARKER, ">b", 61, 0x7E), "record"),
}


@pytest.mark.parametrize(("data", "why"), ILLEGAL.values(), ids=ILLEGAL)
def test_an_illegal_batch_is_refused_with_its_place_and_reason(data, why):
    before = encode_reference([row(5)])
    with pytest.raises(CorruptionError) as caught:
        scan(before + data)
    facts = caught.value.facts
    assert (facts["position"], facts["why"]) == (len(before), why)
    assert facts["offset"] == struct.unpack_from(">q", data)[0]
    assert caught.value.hint
    with pytest.raises(CorruptionError) as judged:
        decode_reference(before + data)
    assert judged.value.facts["why"] == why


LEGAL = {
    "batch without records": (encode_reference([], base_offset=9, last_offset=20), KIND_DATA),
    "count below the offsets covered": (
        encode_reference([row(12)], base_offset=9, last_offset=20),
        KIND_DATA,
    ),
    "last offset is the largest": (encode_reference([row(2**63 - 2)]), KIND_DATA),
    "last offset delta is the largest": (
        encode_reference([row(9)], last_offset=9 + 2**31 - 1),
        KIND_DATA,
    ),
    "reserved attribute bits": (encode_reference([row(9)], attribute_bits=0x7F80), KIND_DATA),
    "top attribute bit": (put(encode_reference([row(9)]), ">H", 21, 0x8000), KIND_DATA),
    "delete horizon": (encode_reference([row(9)], attribute_bits=1 << 6), KIND_DATA),
    "transactional without producer": (encode_reference([row(9)], transactional=True), KIND_DATA),
    "timestamps before 1970": (encode_reference([row(9, -5)]), KIND_DATA),
    "producer epoch and sequence at their ends": (
        encode_reference([row(9)], producer_id=0, producer_epoch=32767, base_sequence=2**31 - 1),
        KIND_DATA,
    ),
    "control batch without records": (
        encode_reference([], base_offset=9, producer_id=3, transactional=True, control=True),
        KIND_CONTROL,
    ),
    "control batch of an unknown type": (control_batch(b"\0\0\0\x09"), KIND_CONTROL),
    "control batch of KRaft, no producer": (
        encode_reference([row(9)._replace(key=b"\0\0\0\x02")], control=True),
        KIND_CONTROL,
    ),
}


@pytest.mark.parametrize(("data", "kind"), LEGAL.values(), ids=LEGAL)
def test_an_odd_but_legal_batch_is_listed(data, kind):
    listed = scan(data)
    assert (listed.count, listed.consumed_bytes, listed.kinds.tolist()) == (1, len(data), [kind])
    decode_reference(data)


def test_offsets_must_ascend_from_batch_to_batch():
    first = encode_reference([row(5)], last_offset=9)
    for offset in (5, 8, 9):
        with pytest.raises(CorruptionError) as caught:
            scan(first + encode_reference([row(offset)]))
        assert caught.value.facts["why"] == "base-offset"
        assert (caught.value.facts["offset"], caught.value.facts["position"]) == (
            offset,
            len(first),
        )
    assert scan(first + encode_reference([row(10)])).count == 2


@pytest.mark.parametrize("magic", [0, 1])
def test_old_formats_are_named_with_what_to_do(magic):
    before = encode_reference([row(5)])
    # offset, size, crc, magic, attributes, key -1, value -1: the least that format v0 allows
    old = struct.pack(">qiIbbii", 41, 14, 0, magic, 0, -1, -1)
    with pytest.raises(UsageError, match="older than") as caught:
        scan(before + old)
    assert caught.value.facts == {"magic": magic, "offset": 41, "position": len(before)}
    assert "Kafka 4.0" in caught.value.hint


def test_without_the_check_a_wrong_checksum_passes_and_structure_is_still_judged():
    assert scan(ILLEGAL["checksum"][0], check_crc=False).count == 1
    with pytest.raises(CorruptionError):
        scan(ILLEGAL["count beyond the bytes"][0], check_crc=False)


@st.composite
def histories(draw):
    """Transactions of a few producers, interleaved as a broker would append them.

    Returns the batches (first offset, last offset, producer, what it is, bytes) and the aborted
    transactions (producer, first offset, offset of its marker).
    """
    offset, log, aborted, begun = draw(st.integers(0, 5)), [], [], {}
    for _ in range(draw(st.integers(0, 14))):
        producer = draw(st.integers(1, 3))
        act = draw(st.sampled_from(["data", "data", "data", "plain", "abort", "commit"]))
        if act in {"abort", "commit"} and producer not in begun:
            act = "data"
        last = offset
        if act == "data":
            begun.setdefault(producer, offset)
            last = offset + draw(st.integers(0, 2))
            data = encode_reference(
                [row(at) for at in range(offset, last + 1)],
                producer_id=producer,
                transactional=True,
            )
        elif act == "plain":  # the same producer may write outside of transactions, too
            data = encode_reference(
                [row(offset)], producer_id=draw(st.sampled_from([-1, producer]))
            )
        else:
            marker = MarkerType.ABORT if act == "abort" else MarkerType.COMMIT
            data = encode_marker(marker, offset=offset, producer_id=producer)
            first = begun.pop(producer)
            if act == "abort":
                aborted.append((producer, first, offset))
        log.append((offset, last, producer, act, data))
        offset = last + 1 + draw(st.sampled_from([0, 0, 4]))
    # What is still open has no verdict: a broker does not serve it to read_committed.
    stable = min(begun.values(), default=offset)
    return [entry for entry in log if entry[0] < stable], aborted


@relaxed
@given(histories(), st.data())
def test_aborted_batches_are_classified_wherever_a_response_begins(history, data):
    log, aborted = history
    begin = data.draw(st.integers(0, max(0, len(log) - 1)))
    response = log[begin:]
    fetched_from = response[0][0] if response else 0
    fetched_to = response[-1][1] if response else -1
    listed_by_broker = [
        (producer, first)
        for producer, first, marker in aborted
        if marker >= fetched_from and first <= fetched_to
    ]
    shuffled = data.draw(st.permutations(listed_by_broker))

    listed = scan(b"".join(entry[4] for entry in response), aborted=shuffled)

    truth = []
    for first, last, producer, act, _ in response:
        dead = any(p == producer and f <= first and last < m for p, f, m in aborted)
        kind = KIND_ABORTED if act == "data" and dead else KIND_DATA
        truth.append(KIND_CONTROL if act in {"abort", "commit"} else kind)
    assert listed.kinds.tolist() == truth


def test_a_producer_aborts_commits_and_aborts_again():
    def data(offset):
        return encode_reference([row(offset)], producer_id=5, transactional=True)

    def marker(kind, offset):
        return encode_marker(kind, offset=offset, producer_id=5)

    log = data(10) + marker(MarkerType.ABORT, 11) + data(12) + marker(MarkerType.COMMIT, 13)
    log += data(14) + data(15) + marker(MarkerType.ABORT, 16) + data(17)
    kinds = scan(log, aborted=[(5, 14), (5, 10)]).kinds.tolist()
    aborted, control, plain = KIND_ABORTED, KIND_CONTROL, KIND_DATA
    assert kinds == [aborted, control, plain, control, aborted, aborted, control, plain]


def test_one_aborted_producer_does_not_touch_another():
    log = encode_reference([row(1)], producer_id=5, transactional=True)
    log += encode_reference([row(2)], producer_id=6, transactional=True)
    log += encode_reference([row(3)], producer_id=5)  # not in the transaction
    assert scan(log, aborted=[(5, 1)]).kinds.tolist() == [KIND_ABORTED, KIND_DATA, KIND_DATA]


def test_a_list_of_aborted_transactions_is_forgotten_after_its_response():
    scanner = BatchScanner()
    one = encode_reference([row(1)], producer_id=5, transactional=True)
    assert scanner.scan(one, len(one), aborted=[(5, 1)]).kinds.tolist() == [KIND_ABORTED]
    assert scanner.scan(one, len(one)).kinds.tolist() == [KIND_DATA]


@relaxed
@given(batches(), st.integers(0, 40))
def test_what_follows_a_cut_is_never_read(drawn, cut):
    data, _, following = drawn
    tail = encode_reference([row(following)])[:cut]
    listed = scan(data + tail)
    assert (listed.count, listed.consumed_bytes) == (1, len(data))
