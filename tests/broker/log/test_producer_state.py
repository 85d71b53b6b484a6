"""Goal: a duplicate batch is stored once, and no batch that should be stored is refused.

Method: Kafka's rules case by case, then random histories against a model that keeps everything. A
snapshot reads back as written, and every damaged one is refused.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from logmirror.broker.log import producer_state
from logmirror.broker.log.producer_state import (
    MAX_PRODUCERS,
    Producer,
    ProducerState,
    RefusedSequenceError,
    SequencedBatch,
    last_sequence,
)
from logmirror.errors import CorruptionError

ID = 4000


def _store(state: ProducerState, epoch: int, first: int, count: int, offset: int) -> SequencedBatch:
    batch = SequencedBatch(first, last_sequence(first, count), offset, offset + count - 1, 50)
    state.stored(ID, epoch, batch)
    return batch


def _refusal(state: ProducerState, epoch: int, first: int, count: int) -> ErrorCode:
    with pytest.raises(RefusedSequenceError) as raised:
        state.find_duplicate(ID, epoch, first, count)
    return raised.value.code


def test_an_unknown_producer_may_begin_anywhere():
    assert ProducerState().find_duplicate(ID, 0, 77, 3) is None


def test_the_next_sequence_is_accepted_and_any_other_is_out_of_order():
    state = ProducerState()
    _store(state, 0, 0, 10, 100)

    assert state.find_duplicate(ID, 0, 10, 5) is None
    for first in (9, 11, 5, 2**31 - 1):
        assert _refusal(state, 0, first, 5) == ErrorCode.out_of_order_sequence_number


def test_five_batches_are_remembered_and_the_sixth_is_not():
    state = ProducerState()
    batches = [_store(state, 0, number * 2, 2, 50 + number * 2) for number in range(6)]

    for batch in batches[1:]:
        assert state.find_duplicate(ID, 0, batch.first_sequence, 2) == batch
    assert _refusal(state, 0, 0, 2) == ErrorCode.out_of_order_sequence_number


def test_same_sequence_with_another_record_count_is_no_duplicate():
    state = ProducerState()
    _store(state, 0, 0, 10, 0)

    assert _refusal(state, 0, 0, 9) == ErrorCode.out_of_order_sequence_number


def test_sequences_wrap_at_two_to_the_31():
    state = ProducerState()
    batch = _store(state, 0, 2**31 - 2, 5, 0)

    assert batch.last_sequence == 2
    assert state.find_duplicate(ID, 0, 3, 1) is None
    assert state.find_duplicate(ID, 0, 2**31 - 2, 5) == batch


def test_a_higher_epoch_begins_at_zero_and_ends_the_lower_one():
    state = ProducerState()
    _store(state, 3, 0, 10, 0)

    assert _refusal(state, 4, 10, 1) == ErrorCode.out_of_order_sequence_number
    assert state.find_duplicate(ID, 4, 0, 1) is None
    _store(state, 4, 0, 1, 10)
    assert _refusal(state, 3, 10, 1) == ErrorCode.invalid_producer_epoch
    assert _refusal(state, 4, 0, 10) == ErrorCode.out_of_order_sequence_number


def test_made_up_producers_push_out_those_that_wrote_longest_ago(monkeypatch):
    monkeypatch.setattr(producer_state, "MAX_PRODUCERS", 3)
    state = ProducerState()
    for producer_id in (1, 2, 3, 1, 4):
        state.stored(producer_id, 0, SequencedBatch(0, 0, 0, 0, 50))

    assert len(state) == 3
    assert state.find_duplicate(1, 0, 0, 1) is not None
    assert state.find_duplicate(2, 0, 0, 1) is None
    assert MAX_PRODUCERS == 10_000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=40))
def test_a_resent_lost_batch_is_stored_once(steps):
    """Each step sends the next batch, or one of the last five again."""
    state, sent, offset = ProducerState(), [], 0
    for back, count in steps:
        if back and len(sent) >= back:
            first, repeated_count, batch = sent[-back]
            assert state.find_duplicate(ID, 0, first, repeated_count) == batch
            continue
        first = sum(entry[1] for entry in sent)
        assert state.find_duplicate(ID, 0, first, count) is None
        sent.append((first, count, _store(state, 0, first, count, offset)))
        offset += count


def test_a_marker_keeps_the_sequence_of_its_epoch_and_ends_lower_ones():
    state = ProducerState()
    batch = _store(state, 3, 0, 10, 100)

    state.check_marker(ID, 3, 5)
    state.marked(ID, 3, 5, 70)

    assert dict(state.items()) == {ID: Producer(3, 5, 70, (batch,))}
    assert state.find_duplicate(ID, 3, 0, 10) == batch
    assert state.find_duplicate(ID, 3, 10, 1) is None
    state.marked(ID, 4, 5, 80)
    assert dict(state.items()) == {ID: Producer(4, 5, 80, ())}
    assert _refusal(state, 3, 10, 1) == ErrorCode.invalid_producer_epoch
    assert _refusal(state, 4, 1, 1) == ErrorCode.out_of_order_sequence_number
    for epoch, coordinator_epoch, code in (
        (3, 9, ErrorCode.invalid_producer_epoch),
        (4, 4, ErrorCode.transaction_coordinator_fenced),
    ):
        with pytest.raises(RefusedSequenceError) as raised:
            state.check_marker(ID, epoch, coordinator_epoch)
        assert raised.value.code == code
    _store(state, 4, 0, 1, 200)
    assert dict(state.items())[ID].coordinator_epoch == 5


_STEPS = st.tuples(
    st.integers(0, 3),  # producer
    st.integers(0, 2),  # epoch
    st.none() | st.integers(0, 3),  # coordinator epoch of a marker; None: a batch
    st.integers(-1, 2**62),  # time
)


@given(st.lists(_STEPS, max_size=40))
def test_a_snapshot_gives_back_any_state(steps):
    state = ProducerState()
    for offset, (producer_id, epoch, coordinator_epoch, time_ms) in enumerate(steps):
        if coordinator_epoch is None:
            batch = SequencedBatch(offset, offset, offset, offset, time_ms)
            state.stored(producer_id, epoch, batch)
        else:
            state.marked(producer_id, epoch, coordinator_epoch, time_ms)

    copy = ProducerState.from_bytes(state.to_bytes(8), 8)

    assert list(copy.items()) == list(state.items())


def test_a_snapshot_gives_back_the_same_state():
    state = ProducerState()
    for number in range(7):
        _store(state, 2, number, 1, number)
    state.stored(9, 0, SequencedBatch(5, 5, 7, 7, 50))

    copy = ProducerState.from_bytes(state.to_bytes(8), 8)

    assert copy.to_bytes(8) == state.to_bytes(8)
    assert copy.find_duplicate(ID, 2, 6, 1) == SequencedBatch(6, 6, 6, 6, 50)


def test_no_damage_to_a_snapshot_passes():
    state = ProducerState()
    _store(state, 0, 0, 10, 100)
    data = state.to_bytes(110)

    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        with pytest.raises(CorruptionError):
            ProducerState.from_bytes(bytes(damaged), 110)
    for size in range(len(data)):
        with pytest.raises(CorruptionError):
            ProducerState.from_bytes(data[:size], 110)


def test_a_snapshot_of_another_offset_is_refused():
    with pytest.raises(CorruptionError) as raised:
        ProducerState.from_bytes(ProducerState().to_bytes(5), 6)

    assert raised.value.facts == {"expected": 6, "found": 5}
