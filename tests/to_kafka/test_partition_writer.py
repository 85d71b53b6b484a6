"""The state of one partition's writer: what may be sent, what a response means, what stops it.

Method: log ends and responses are constructed one by one, as a broker could return them.
"""

import struct

import pytest

from kit.fakes.scripted import batches, record
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.produce_responses import NO_RESPONSE, ProduceResponse
from logmirror.cluster.transport import LINGER_MS_MAX
from logmirror.errors import (
    OutcomeUnknownError,
    PositionError,
    PositionMovedError,
    UnavailableError,
)
from logmirror.model import TopicPartition
from logmirror.to_kafka.idempotence import (
    PRODUCER_STATE_AGE_MS,
    SEND_DEADLINE_MS,
    SEQUENCE_MASK,
    deadline_ms,
    is_sequence_checked,
    producer_id,
    quiesce_ms,
)
from logmirror.to_kafka.partition_writer import IN_FLIGHT_MAX, PartitionWriter
from logmirror.wire.batch_header import parse_header
from logmirror.wire.rebatch import Rebatcher
from logmirror.wire.records import encode_reference
from logmirror.wire.scan import BatchScanner

WHERE = TopicPartition("t", 3)
PRODUCER = producer_id("t", 3, None)
NOW_MS = 1_800_000_000_000
FRESH_MS, OLD_MS = NOW_MS - PRODUCER_STATE_AGE_MS + 1, NOW_MS - PRODUCER_STATE_AGE_MS
ALIVE = ProducerState(0, 99, FRESH_MS)


def piece(first, count=10, *, stamp_ms=FRESH_MS):
    """A piece as the rebatcher makes it."""
    rows = [record(first + n, timestamp_ms=stamp_ms) for n in range(count)]
    buffer = bytearray(encode_reference(rows))
    found = BatchScanner().scan(buffer, len(buffer))
    (made,) = Rebatcher().pieces(buffer, found, 0, found.count, first=first, end=first + count)
    return made


def writer(end=100, state=ALIVE, *, at_ms=1000, window=IN_FLIGHT_MAX):
    """A writer that continues another slice, with its window."""
    made = PartitionWriter(WHERE, PRODUCER)
    made.record_log_end(LogEnd(end, 0), state, at_ms=at_ms, now_ms=NOW_MS)
    made.resume(window)
    return made


def send(made, count=10, *, at_ms=1000, stamp_ms=FRESH_MS):
    """Prepare the next batch; returns its first offset, sequence and producer as sent."""
    assert made.may_send()
    sent = piece(made.next_offset, count, stamp_ms=stamp_ms)
    made.prepare(sent, at_ms=at_ms, now_ms=NOW_MS)
    header = parse_header(bytes(sent.data), 0)
    return sent.base_offset, header.base_sequence, header.producer_id


def response(made, base_offset, *, error=None, code=0):
    made.record_response(ProduceResponse(WHERE, code, base_offset, -1, 0, error), NOW_MS)


def refused(code):
    return UnavailableError("could not write", code=code, error=f"CODE_{code}")


@pytest.mark.mirror_v3("KAF-05")
def test_a_writer_begins_at_the_log_end_with_the_sequence_that_the_broker_expects():
    assert send(writer()) == (100, 100, PRODUCER)
    assert send(writer(end=130)) == (130, 100, PRODUCER), "30 of the offsets are gaps"
    assert send(writer(state=None)) == (100, 100, PRODUCER), "nothing remembered: the offset"


def test_a_gap_that_begins_an_epoch_restarts_sequences():
    made = writer()
    assert made.next_epoch == 1
    made.passed_gap(107, 2000)
    assert made.next_epoch == 1, "most gaps do not affect the data's producer"

    made.passed_gap(130, 2000, fenced=True)

    for first, sequence in ((130, 0), (140, 10)):
        sent = piece(first)
        made.prepare(sent, at_ms=1000, now_ms=NOW_MS)
        header = parse_header(bytes(sent.data), 0)
        found = (header.producer_id, header.producer_epoch, header.base_sequence)
        assert found == (PRODUCER, 1, sequence)
    assert made.next_epoch == 2


def test_the_epoch_goes_on_as_the_broker_remembers_it():
    made = writer(end=130, state=ProducerState(1, -1, FRESH_MS))
    sent = piece(130)
    made.prepare(sent, at_ms=1000, now_ms=NOW_MS)
    header = parse_header(bytes(sent.data), 0)
    assert (header.producer_epoch, header.base_sequence) == (1, 0)
    assert writer(state=ProducerState(32_767, 99, FRESH_MS)).next_epoch is None


@pytest.mark.parametrize("end", [2**31 - 5, 2**31 - 1, 2**31, 2**40 + 7])
def test_sequences_go_round_at_two_to_the_31(end):
    made = writer(end=end, state=ProducerState(0, (end - 1) & SEQUENCE_MASK, FRESH_MS))

    _, first, _ = send(made)
    _, second, _ = send(made)

    assert (first, second) == (end % 2**31, (end + 10) % 2**31)


@pytest.mark.mirror_v3("ACK-06")
def test_what_is_verified_is_what_was_responded_and_never_what_was_sent():
    made = writer()
    send(made, 10)
    send(made, 5)

    assert (made.verified, made.next_offset, made.in_flight) == (100, 115, 2)
    response(made, 100)
    assert (made.verified, made.next_offset, made.in_flight, made.record_count) == (110, 115, 1, 10)
    response(made, 110)
    assert (made.verified, made.in_flight, made.record_count) == (115, 0, 15)
    assert made.sent_bytes > 0


@pytest.mark.parametrize(("state", "most"), [(ALIVE, IN_FLIGHT_MAX), (None, 1)])
def test_many_batches_are_in_flight_with_sequence_check_and_one_without(state, most):
    made = writer(state=state)

    assert fill_window(made) == most


def fill_window(made):
    """Send until no more may be in flight; return how many are."""
    while made.may_send():
        send(made)
    return made.in_flight


def confirm(made):
    """The oldest batch in flight was appended where it belongs."""
    response(made, made.verified)


def test_each_response_with_the_expected_offset_opens_the_window():
    made = writer(window=1)
    seen = []
    for _ in range(9):
        seen.append(fill_window(made))
        confirm(made)

    assert seen == [1, 2, 4, 8, 16, 32, 64, 64, 64]


@pytest.mark.parametrize("shut", ["a reading of the log end", "a gap"])
def test_the_window_closes_to_one_batch(shut):
    made = writer()
    for _ in range(8):
        fill_window(made)
        confirm(made)
    while made.in_flight:
        confirm(made)
    now_ms, end = 1000, made.verified
    assert made.window(now_ms) == IN_FLIGHT_MAX
    if shut == "a gap":
        end += 5
        made.passed_gap(end, now_ms)
    else:
        state = ProducerState(0, end - 1, FRESH_MS)
        made.record_log_end(LogEnd(end, 0), state, at_ms=now_ms, now_ms=NOW_MS)

    assert made.window(now_ms) == 1
    send(made, at_ms=now_ms)
    assert not made.may_send()
    response(made, end)
    assert fill_window(made) == 2


def test_a_slice_that_comes_late_begins_with_one_batch():
    made = writer()

    assert made.window(1000 + SEND_DEADLINE_MS) == IN_FLIGHT_MAX
    assert made.window(1000 + SEND_DEADLINE_MS + 1) == 1


def test_producer_state_that_is_about_to_expire_does_not_count():
    assert is_sequence_checked(ProducerState(0, 0, FRESH_MS), NOW_MS)
    assert not is_sequence_checked(ProducerState(0, 0, OLD_MS), NOW_MS)
    assert not is_sequence_checked(ProducerState(0, 0, -1), NOW_MS), "records without a time"
    assert not is_sequence_checked(None, NOW_MS)


def test_the_first_acknowledged_current_batch_enables_the_sequence_check_and_old_ones_do_not():
    for stamp_ms, most in ((FRESH_MS, IN_FLIGHT_MAX), (OLD_MS, 1)):
        made = writer(state=None)
        send(made, stamp_ms=stamp_ms)
        assert not made.may_send()
        response(made, 100)
        assert fill_window(made) == most


def test_nothing_is_sent_behind_old_records_before_they_are_acknowledged():
    """The broker may forget the producer when it has them, and then checks no sequences."""
    made = writer()
    send(made)
    send(made)
    send(made, stamp_ms=OLD_MS)

    assert not made.may_send()
    response(made, 100)
    assert not made.may_send(), "the response to an earlier batch proves nothing about the old one"
    response(made, 110)
    assert not made.may_send()
    response(made, 120)
    assert made.may_send()
    send(made, stamp_ms=OLD_MS)
    assert not made.may_send(), "one at a time"


def test_current_records_behind_old_ones_restore_the_sequence_check():
    made = writer(state=None)
    send(made, stamp_ms=OLD_MS)
    response(made, 100)
    send(made)
    assert not made.may_send()
    response(made, 110)
    send(made)
    assert made.may_send()


def test_another_base_offset_is_a_foreign_record():
    made = writer()
    send(made)

    response(made, 101)

    assert isinstance(made.error, PositionError)
    assert not isinstance(made.error, PositionMovedError)
    facts = made.error.facts
    assert (facts["reason"], facts["expected"], facts["found"]) == ("ForeignRecord", 100, 101)
    assert made.verified == 100, "what follows is not where it belongs"


def test_a_duplicate_response_with_the_first_offset_is_success():
    """The broker had the batch already: an earlier attempt whose response was lost."""
    made = writer()
    send(made)
    response(made, 100)
    assert (made.error, made.verified) == (None, 110)


@pytest.mark.parametrize("code", [45, 46, 47, 59])
def test_a_sequence_that_is_refused_means_look(code):
    made = writer()
    send(made)

    response(made, -1, error=refused(code), code=code)

    assert isinstance(made.error, PositionMovedError)
    assert made.error.facts["code"] == code
    assert made.verified == 100


@pytest.mark.parametrize(
    "error", [OutcomeUnknownError("no response"), UnavailableError("not sent"), refused(19)]
)
def test_other_failures_stay_what_they_are(error):
    made = writer()
    send(made)
    response(made, -1, error=error, code=error.facts.get("code", NO_RESPONSE))
    assert made.error is error


def test_the_first_failure_counts_and_what_was_sent_behind_it_is_not_believed():
    made = writer()
    for _ in range(3):
        send(made)

    response(made, -1, error=refused(19), code=19)
    response(made, 100)  # a broker that has forgotten us may take it, in the wrong place
    response(made, -1, error=OutcomeUnknownError("no response"), code=NO_RESPONSE)

    assert (made.verified, made.record_count, made.in_flight) == (100, 0, 0)
    assert made.error.facts["code"] == 19


def test_a_batch_that_did_not_leave_is_not_on_its_way():
    made = writer()
    send(made)
    send(made)
    late = PositionMovedError("too late")

    made.not_sent(late)
    response(made, 100)

    assert made.error is late
    assert made.in_flight == 0
    assert made.verified == 100, "after a failure the log end is read, whatever the response"


@pytest.mark.parametrize("state", [ALIVE, None])
def test_a_look_is_good_for_the_deadline_and_no_longer(state):
    made = writer(state=state, at_ms=1000)
    assert not made.is_stale(1000 + SEND_DEADLINE_MS)
    assert made.is_stale(1001 + SEND_DEADLINE_MS)


@pytest.mark.parametrize("size_bytes", [0, 1_000_000, 50_000_000])
def test_a_large_batch_has_its_time_on_a_slow_link(size_bytes):
    alone = deadline_ms(size_bytes, sequence_checked=False)
    assert alone == SEND_DEADLINE_MS + size_bytes / 1000, "1 MB/s"
    assert alone < quiesce_ms(size_bytes) - LINGER_MS_MAX
    assert deadline_ms(size_bytes, sequence_checked=True) > alone, "what is late is refused anyway"


def test_the_batch_that_was_prepared_last_says_until_when_it_may_be_sent():
    made = writer(state=None, at_ms=1000)
    send(made, 1000)
    size = made._in_flight[-1].size  # noqa: SLF001  # what was sent
    assert size > 10_000
    assert made.send_until_ms == 1000 + deadline_ms(size, sequence_checked=False)
    made = writer(at_ms=1000)
    assert made.send_until_ms == 1000 + deadline_ms(0, sequence_checked=True)
    send(made, stamp_ms=OLD_MS)
    assert made.send_until_ms == 1000 + deadline_ms(0, sequence_checked=False), (
        "behind it sequences are not checked"
    )


def test_an_acknowledged_batch_is_as_good_as_a_look_from_the_moment_it_was_prepared():
    made = writer(at_ms=1000)
    send(made, at_ms=3000)
    assert made.verified_ms == 1000, "sent is not seen"

    response(made, 100)

    assert made.verified_ms == 3000, "and the response may be minutes old"


def test_gaps_take_offsets_and_no_sequences():
    made = writer()
    send(made)
    response(made, 100)

    made.passed_gap(117, 5000)

    assert (made.verified, made.next_offset) == (117, 117)
    assert made.verified_ms == 5000
    assert send(made) == (117, 110, PRODUCER)


def test_a_batch_is_ours_and_its_checksum_right_after_it_was_prepared():
    sent = piece(100)
    writer().prepare(sent, at_ms=1000, now_ms=NOW_MS)
    found = BatchScanner().scan(sent.data, len(sent.data))  # checks the CRC
    assert (found.count, int(found.producer_ids[0])) == (1, PRODUCER)
    assert struct.unpack_from(">h", sent.data, 51) == (0,), "epoch"
    assert batches(0, 10) != [bytes(sent.data)]
