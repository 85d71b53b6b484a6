"""When the check of records loads the compiler: for a large batch, and at a high rate."""

from __future__ import annotations

import pytest

from logmirror.wire import record_check
from logmirror.wire.batch_header import HEADER_SIZE
from logmirror.wire.record_check import RecordCheck
from logmirror.wire.records import Record, encode_reference

BATCH = encode_reference([Record(n, 1000, 0, b"key", b"value", ()) for n in range(100)])


@pytest.fixture
def check():
    return RecordCheck()


def test_it_begins_without_a_compiler(check):
    assert check.count_sound(BATCH, HEADER_SIZE, 100) == 100
    assert not check.is_compiled


def test_many_records_in_a_second_call_once_for_the_kernel(check, monkeypatch):
    monkeypatch.setattr(record_check, "KERNEL_RECORDS_PER_S", 200)
    calls = []
    check.on_busy = lambda: calls.append(check.is_compiled)
    for _ in range(3):
        check.count_sound(BATCH, HEADER_SIZE, 100)
        check.begin_second()
    assert calls == []
    for _ in range(5):
        check.count_sound(BATCH, HEADER_SIZE, 100)
    assert calls == [False]

    check.compile()

    assert check.is_compiled
    assert check.count_sound(BATCH, HEADER_SIZE, 100) == 100


def test_a_large_batch_loads_the_kernel(check, monkeypatch):
    monkeypatch.setattr(record_check, "KERNEL_BATCH_RECORDS", 100)
    assert check.count_sound(BATCH, HEADER_SIZE, 100) == 100
    assert check.is_compiled


def test_an_empty_body_has_no_records(check):
    for _ in range(2):
        assert check.count_sound(b"", 0, 1) == 0
        check.compile()


def test_a_count_that_the_bytes_cannot_hold_loads_nothing(check):
    check.on_busy = pytest.fail
    assert check.count_sound(BATCH, HEADER_SIZE, 2**31 - 1) == 100
    assert not check.is_compiled
