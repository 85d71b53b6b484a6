"""Compaction records as bytes; invalid listings are believed only if two in a row are the same."""

import json

import pytest

from logmirror.archive.compactions import (
    Compaction,
    Part,
    compaction_name,
    confirmed,
    read_compaction,
)
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import Decided, Gap, GapCause, OffsetRange
from logmirror.testing import MemoryStore

RECORD = Compaction(
    covered=OffsetRange(first=10, last=29),
    digest="xxh3:" + "0" * 32,
    record_count=18,
    parts=(
        Part(covered=OffsetRange(first=10, last=19), digest="a"),
        Part(covered=OffsetRange(first=20, last=29), digest="b"),
    ),
    writer="w",
    topic="t",
    topic_id="",
    partition=3,
    created_ms=5,
    gaps=(Gap(first=12, last=13, cause=GapCause.CONTROL),),
    gap_counts={GapCause.CONTROL: 2},
    decided=(Decided(19, (7,), ()), Decided(29, (), (7, 9))),
)


def test_a_record_survives_its_bytes():
    name = compaction_name("orders/3", RECORD.covered)
    assert Compaction.from_bytes(RECORD.to_bytes(), name=name) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"from": 11},
        {"to": 30},
        {"parts": [[10, 29, "a"]]},
        {"parts": [[10, 18, "a"], [20, 29, "b"]]},
        {"digest": None},
        {"partition": 4},
        {"version": 0},
        {"holes": [[1, 2, "because"]]},
        {"decided": [[1]]},
        {"decided": None},
        {"decided": [[29, [], [1]], [19, [], [1]]]},
    ],
)
def test_a_record_that_is_none_is_refused_by_name(change):
    name = compaction_name("orders/3", RECORD.covered)
    store = MemoryStore()
    store.objects[name] = json.dumps(json.loads(RECORD.to_bytes()) | change).encode()
    with pytest.raises(CorruptionError, match="unreadable compaction record") as caught:
        read_compaction(store, "orders/3", RECORD.covered)
    assert caught.value.facts["name"] == name


def test_a_record_of_a_newer_version_is_not_guessed_at():
    data = json.dumps(json.loads(RECORD.to_bytes()) | {"version": 2}).encode()
    with pytest.raises(UsageError, match="newer version"):
        Compaction.from_bytes(data, name=compaction_name("orders/3", RECORD.covered))


def test_a_listing_is_refused_only_when_the_next_one_is_the_same():
    good, bad, worse = ["good"], ["bad"], ["worse"]

    def judge(names):
        if names != good:
            raise CorruptionError("gap", name=names[0])
        return "fine"

    assert confirmed(iter([bad, worse, good]).__next__, judge) == "fine"
    with pytest.raises(CorruptionError) as caught:
        confirmed(iter([bad, worse, worse, good]).__next__, judge)
    assert caught.value.facts["name"] == "worse"
    with pytest.raises(CorruptionError):
        confirmed(iter([bad, worse] * 9).__next__, judge)
