"""One successor per position, for two writers in any order of steps (I2).

Method: two writers publish through one MemoryStore, each in its own thread, and a scheduler lets
exactly one of them take its next step at a time. All schedules are run. After each, at most one
object begins at the position, and both writers know its range.
"""

import contextlib
import itertools
import json
import pickle
import threading
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from logmirror.archive.claims import (
    KEEP_MS,
    Claim,
    ClaimTakenError,
    claim_name,
    latest_claim,
    publish_object,
    read_claim,
    sweep_claims,
)
from logmirror.archive.naming import format_name
from logmirror.errors import (
    CorruptionError,
    LogmirrorError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.model import OFFSET_MAX, Decided, Gap, GapCause, OffsetRange, Trigger
from logmirror.testing import MemoryStore

FOLDER = "orders/3"


def claim_of(first, last, data=b"", **changes):
    fields = {
        "covered": OffsetRange(first=first, last=last),
        "digest": f"xxh3:{xxhash.xxh3_128(data).hexdigest()}",
        "writer": "h.1.a",
        "topic": "orders",
        "topic_id": "ab" * 16,
        "partition": 3,
        "created_ms": 1_000,
        "record_count": 3,
        "trigger": Trigger.MAX_BYTES,
    }
    return Claim(**(fields | changes))


def stage(store, data):
    staged = store.stage("x")
    staged.write(data)
    return staged.finish("f/a", travels=False)


def publish(store, first, last, data, **changes):
    return publish_object(
        store,
        token=stage(store, data),
        folder=FOLDER,
        extension="batches",
        claim=claim_of(first, last, data, **changes),
    )


def objects(store):
    return list(store.names(FOLDER))


def test_a_published_object_has_a_claim_that_promised_it():
    store = MemoryStore()
    published = publish(store, 100, 199, b"data")
    name = format_name(OffsetRange(first=100, last=199), "batches")
    assert (published.name, published.existed) == (f"{FOLDER}/{name}", False)
    assert objects(store) == [name]
    assert read_claim(store, "orders", 3, 100) == claim_of(100, 199, b"data")
    assert store.staged == {}


def test_publishing_again_is_harmless():
    store = MemoryStore()
    publish(store, 0, 9, b"data")
    assert publish(store, 0, 9, b"data", writer="h.2.b").existed
    assert len(objects(store)) == 1
    assert store.staged == {}
    assert read_claim(store, "orders", 3, 0).writer == "h.1.a"


def test_an_object_that_compact_replaces_during_the_comparison_is_planned_again():
    store = MemoryStore()
    name = publish(store, 0, 9, b"data").name

    def replaced(operation, asked):
        if (operation, asked) == ("open", name):
            store.objects.pop(name, None)

    store.before = replaced
    with pytest.raises(UnavailableError, match="merged") as caught:
        publish(store, 0, 9, b"data", writer="h.2.b")
    assert caught.value.facts["name"] == name


def test_a_claim_whose_object_is_missing_is_kept_by_the_next_writer():
    store = MemoryStore()
    store.create(claim_name("orders", 3, 0), claim_of(0, 9, b"data").to_bytes())
    with pytest.raises(ClaimTakenError) as caught:
        publish(store, 0, 7, b"less")
    assert caught.value.claim == claim_of(0, 9, b"data")
    assert caught.value.facts["claimed_last"] == 9
    assert caught.value.facts["last"] == 7
    assert objects(store) == []
    assert publish(store, 0, 9, b"data").existed
    assert len(objects(store)) == 1


def test_the_winning_claim_crosses_a_process_boundary():
    store = MemoryStore()
    publish(store, 0, 9, b"data", topic="größe")
    with pytest.raises(ClaimTakenError) as caught:
        publish(store, 0, 7, b"less")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.claim == claim_of(0, 9, b"data", topic="größe")
    assert isinstance(copy, PositionError)


def test_other_content_under_the_same_range_stops_with_both_digests():
    store = MemoryStore()
    store.create(claim_name("orders", 3, 0), claim_of(0, 9, b"theirs").to_bytes())
    with pytest.raises(PositionError, match="claimed with other content") as caught:
        publish(store, 0, 9, b"ours")
    assert not isinstance(caught.value, ClaimTakenError)
    assert caught.value.facts["expected"] == claim_of(0, 9, b"ours").digest
    assert caught.value.facts["found"] == claim_of(0, 9, b"theirs").digest
    assert objects(store) == []


def test_a_foreign_object_under_our_name_is_not_taken_for_ours():
    store = MemoryStore()
    name = f"{FOLDER}/{format_name(OffsetRange(first=0, last=9), 'batches')}"
    store.create(name, b"foreign")
    with pytest.raises(PositionError, match="other content") as caught:
        publish(store, 0, 9, b"ours")
    assert caught.value.facts == {
        "name": name,
        "expected": claim_of(0, 9, b"ours").digest,
        "found": claim_of(0, 9, b"foreign").digest,
    }
    assert store.read(name) == b"foreign"


# --- two writers, every schedule


class Baton:
    """Lets exactly one of two threads run at a time, in the order of `schedule`.

    A thread that has ended, or a schedule that is used up, lets the other run on.
    """

    def __init__(self, schedule):
        self.schedule = list(schedule)
        self.running = {0, 1}
        self.condition = threading.Condition()
        self.local = threading.local()

    def before(self, _operation, _name):
        me = getattr(self.local, "number", None)
        if me is None:
            return
        with self.condition:
            assert self.condition.wait_for(lambda: self._turn() in (me, None), timeout=10)
            if self.schedule:
                self.schedule.pop(0)
            self.condition.notify_all()

    def _turn(self):
        while self.schedule and self.schedule[0] not in self.running:
            self.schedule.pop(0)
        return self.schedule[0] if self.schedule else min(self.running, default=None)

    def run(self, number, action):
        self.local.number = number
        try:
            action()
        finally:
            with self.condition:
                self.running.discard(number)
                self.condition.notify_all()


def race(schedule, attempts):
    """Two writers with attempts [(last, data), ...] at position 0; returns store and outcomes."""
    baton, store, outcomes = Baton(schedule), MemoryStore(), [None, None]
    store.create(f"{FOLDER}/{format_name(OffsetRange(first=10, last=19), 'other')}", b"")
    store.before = baton.before

    def write(number):
        last, data = attempts[number]
        try:
            outcomes[number] = publish(store, 0, last, data, writer=f"h.{number}.x")
        except LogmirrorError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=baton.run, args=(n, lambda n=n: write(n))) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    store.before = lambda *_: None
    return store, outcomes


# stage, write, finish, create, then read or publish, open, discard: seven steps at most each; from
# `create` on the order matters, which is four steps.
SCHEDULES = [
    [0] * 3 + [1] * 3 + [0 if n in picked else 1 for n in range(8)]
    for picked in itertools.combinations(range(8), 4)
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: "".join(map(str, s[6:])))
def test_two_writers_with_two_cuts_leave_one_object_and_the_loser_knows(schedule):
    store, outcomes = race(schedule, [(9, b"nine"), (7, b"seven")])
    losers = [o for o in outcomes if isinstance(o, ClaimTakenError)]
    winners = [o for o in outcomes if not isinstance(o, Exception)]
    assert (len(losers), len(winners)) == (1, 1), outcomes
    ours = [n for n in objects(store) if n.startswith(f"{0:020d}")]
    assert [f"{FOLDER}/{n}" for n in ours] == [winners[0].name]
    winner = losers[0].claim
    assert store.read(winners[0].name) == (b"nine" if winner.covered.last == 9 else b"seven")


def test_the_schedules_let_either_writer_win():
    outcomes = [race(schedule, [(9, b"nine"), (7, b"seven")])[1] for schedule in SCHEDULES]
    assert {isinstance(first, Exception) for first, _ in outcomes} == {True, False}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: "".join(map(str, s[6:])))
def test_two_writers_with_one_cut_both_succeed_with_one_object(schedule):
    store, outcomes = race(schedule, [(9, b"same"), (9, b"same")])
    assert outcomes[0].name == outcomes[1].name
    assert [o.existed for o in outcomes].count(True) in (
        1,
        2,
    )  # 2: one claimed, the other published
    ours = [n for n in objects(store) if n.startswith(f"{0:020d}")]
    assert len(ours) == 1
    assert store.staged == {}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: "".join(map(str, s[6:])))
def test_two_writers_with_different_content_never_both_succeed(schedule):
    _, outcomes = race(schedule, [(9, b"one"), (9, b"other")])
    assert sorted(type(o).__name__ for o in outcomes) == ["PositionError", "Published"]


# --- reading and sweeping


gaps = st.builds(
    lambda first, more, cause: Gap(first=first, last=first + more, cause=cause),
    st.integers(0, 2**40),
    st.integers(0, 100),
    st.sampled_from(GapCause),
)


@given(
    st.integers(0, OFFSET_MAX),
    st.text(max_size=20),
    st.tuples(
        st.none() | st.integers(0, 2**31),
        st.none() | st.tuples(st.lists(st.integers(0, 2**62)), st.lists(st.integers(0, 2**62))),
    ),
    st.lists(gaps, max_size=5),
    st.sampled_from(Trigger),
)
def test_claims_round_trip(first, topic, optional, runs, trigger):
    epoch, ended = optional
    claim = claim_of(
        first,
        OFFSET_MAX,
        topic=topic,
        leader_epoch=epoch,
        gaps=tuple(runs),
        trigger=trigger,
        decided=() if ended is None else (Decided(OFFSET_MAX, *map(tuple, ended)),),
    )
    name = claim_name("orders", 3, first)
    assert Claim.from_bytes(claim.to_bytes(), name=name) == claim


def test_the_bytes_of_a_claim_are_pinned():
    claim = claim_of(
        5,
        9,
        leader_epoch=2,
        gaps=(Gap(first=6, last=7, cause=GapCause.CONTROL),),
        gap_counts={GapCause.CONTROL: 2, GapCause.ABORTED: 0},
        topic="größe",
    )
    native = replace(claim, decided=(Decided(9, (4000,), (1, 7)),)).to_bytes().decode()
    assert native.partition(',"check"')[0] == (
        claim.to_bytes().decode().partition(',"check"')[0] + ',"decided":[[9,[4000],[1,7]]]'
    )
    assert claim.to_bytes().decode() == (
        '{"version":1,"from":5,"to":9,"digest":"xxh3:99aa06d3014798d86001c324468d497f",'
        '"writer":"h.1.a","topic":"größe","topic_id":"abababababababababababababababab",'
        '"partition":3,"created_ms":1000,"record_count":3,"trigger":"max-bytes",'
        '"leader_epoch":2,"holes":[[6,7,"control"]],"hole_counts":{"control":2},'
        '"check":"xxh3:a23dfe7b4f66569f684297190ff0de5e"}\n'
    )


def test_any_flipped_bit_of_a_claim_is_found_or_changes_nothing_it_says():
    claim = claim_of(5, 9, gaps=(Gap(first=6, last=7, cause=GapCause.CONTROL),))
    name, data = claim_name("orders", 3, 5), claim.to_bytes()
    unnoticed = 0
    for at, bit in itertools.product(range(len(data)), range(8)):
        damaged = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
        with contextlib.suppress(CorruptionError, UsageError):
            assert Claim.from_bytes(damaged, name=name) == claim
            unnoticed += 1
    assert unnoticed <= 8 * len("check")  # without it, a claim is one of those that never had it


GOOD = json.loads(claim_of(5, 9).to_bytes())
del GOOD["check"]  # what is wrong is to be found without it too

BAD = {
    "empty": b"",
    "its checksum": json.dumps(GOOD | {"check": "xxh3:" + "0" * 32}).encode(),
    "a number for its checksum": json.dumps(GOOD | {"check": 1}).encode(),
    "cut": claim_of(5, 9).to_bytes()[:40],
    "not UTF-8": b'{"version":"\xff"}',
    "a list": b"[]",
    "no version": json.dumps({k: v for k, v in GOOD.items() if k != "version"}).encode(),
    "no digest": json.dumps({k: v for k, v in GOOD.items() if k != "digest"}).encode(),
    "version as text": json.dumps(GOOD | {"version": "1"}).encode(),
    "version 0": json.dumps(GOOD | {"version": 0}).encode(),
    "backwards": json.dumps(GOOD | {"to": 4}).encode(),
    "a fraction": json.dumps(GOOD | {"to": 9.5}).encode(),
    "a truth value": json.dumps(GOOD | {"record_count": True}).encode(),
    "a number for a text": json.dumps(GOOD | {"writer": 5}).encode(),
    "unknown trigger": json.dumps(GOOD | {"trigger": "whim"}).encode(),
    "unknown cause": json.dumps(GOOD | {"holes": [[6, 7, "moths"]]}).encode(),
    "half a gap": json.dumps(GOOD | {"holes": [[6]]}).encode(),
    "another position": json.dumps(GOOD | {"from": 6}).encode(),
    "another partition": json.dumps(GOOD | {"partition": 4}).encode(),
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_an_unreadable_claim_is_corruption_and_never_overruled(data):
    store = MemoryStore()
    store.create(claim_name("orders", 3, 5), data)
    for attempt in [
        lambda: latest_claim(store, "orders", 3),
        lambda: publish(store, 5, 9, b""),
    ]:
        with pytest.raises(CorruptionError, match="unreadable claim") as caught:
            attempt()
        assert caught.value.facts["name"] == claim_name("orders", 3, 5)
        assert caught.value.hint
    assert objects(store) == []


def test_a_claim_of_a_newer_version_asks_for_an_upgrade():
    store = MemoryStore()
    store.create(claim_name("orders", 3, 5), b'{"version":2}')
    with pytest.raises(UsageError, match="newer version") as caught:
        latest_claim(store, "orders", 3)
    assert "upgrade" in caught.value.hint


def test_another_file_among_the_claims_is_corruption():
    store = MemoryStore()
    store.create(".logmirror/claims/orders/3/notes.txt", b"")
    with pytest.raises(CorruptionError) as caught:
        latest_claim(store, "orders", 3)
    assert caught.value.facts["name"].endswith("notes.txt")


def test_the_latest_claim_is_the_one_with_the_highest_offset():
    store = MemoryStore()
    assert latest_claim(store, "orders", 3) is None
    for first in [10, 0, 5]:
        store.create(claim_name("orders", 3, first), claim_of(first, first + 4).to_bytes())
    assert latest_claim(store, "orders", 3) == claim_of(10, 14)
    assert latest_claim(store, "orders", 4) is None


def claimed(store):
    return [int(name) for name in store.names(".logmirror/claims/orders/3")]


def store_with_claims(*created_ms):
    store = MemoryStore()
    for number, created in enumerate(created_ms):
        claim = claim_of(number * 10, number * 10 + 9, created_ms=created)
        store.create(claim_name("orders", 3, number * 10), claim.to_bytes())
    return store


def sweep(store, position, now_ms):
    return sweep_claims(store, "orders", 3, position=position, now_ms=now_ms)


def test_old_claims_that_have_served_are_swept_but_for_the_newest():
    store = store_with_claims(0, 0, 0)
    assert sweep(store, 30, KEEP_MS) == 0
    assert sweep(store, 30, KEEP_MS + 1) == 2
    assert claimed(store) == [20]
    assert sweep(store, 30, KEEP_MS * 9) == 0


def test_a_claim_that_is_young_or_not_passed_stays():
    store = store_with_claims(0, KEEP_MS, 0, 0)
    assert sweep(store, 40, KEEP_MS + 1) == 1
    assert claimed(store) == [10, 20, 30]
    store = store_with_claims(0, 0, 0)
    assert sweep(store, 19, KEEP_MS + 1) == 1  # position 19: offset 19 is not archived
    assert claimed(store) == [10, 20]
    assert sweep(MemoryStore(), 0, 0) == 0
