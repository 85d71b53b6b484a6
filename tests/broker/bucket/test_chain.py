"""The bytes of commit objects and the rules of their chain."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.broker.bucket import bundles
from logmirror.broker.bucket.bundles import Bundle, Bundler, chosen
from logmirror.broker.bucket.chain import SNAPSHOT_COMMITS, Coverage, commit_name, needed
from logmirror.broker.bucket.chain_writer import ChainWriter
from logmirror.broker.bucket.commit_format import Commit, Entry, Kind, decode, encode, of_database
from logmirror.broker.bucket.journal import Journal, Submission
from logmirror.broker.bucket.recovery import take_over
from logmirror.broker.bucket.tails import Piece, Stretch, Tail
from logmirror.clock import Chooser, Clock, driven
from logmirror.errors import (
    CorruptionError,
    FencedError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.stores.base import Tail as Listed

TOPIC = b"t" * 16

entries = st.builds(
    Entry,
    st.sampled_from(Kind),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.binary(max_size=50),
)
commits = st.builds(
    Commit,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=8, max_size=8),
    st.lists(entries, max_size=5).map(tuple),
    st.integers(0, 2**63 - 1),
)


def data(first: int, after: int, body: bytes = b"x") -> Entry:
    return Entry(Kind.DATA, TOPIC, 0, first, after, body)


@given(commits)
def test_what_is_encoded_is_decoded(commit):
    assert decode(encode(commit)) == commit


@given(commits, st.data())
def test_each_changed_bit_is_noticed(commit, chosen):
    damaged = bytearray(encode(commit))
    at = chosen.draw(st.integers(0, len(damaged) * 8 - 1))
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(CorruptionError):
        decode(bytes(damaged))


@given(commits, st.data())
def test_each_missing_end_is_noticed(commit, chosen):
    whole = encode(commit)
    with pytest.raises(CorruptionError):
        decode(whole[: chosen.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CorruptionError):
        decode(whole + b"\0")


def test_a_number_is_given_once():
    store = MemoryStore()
    old, new = ChainWriter(store, b"o" * 8), ChainWriter(store, b"n" * 8)
    old.take_over()
    assert old.create(old.packed([data(0, 1)], 0)) == 1
    new.take_over()

    with pytest.raises(FencedError):
        old.create(old.packed([data(1, 2)], 0))
    with pytest.raises(FencedError):
        old.check()
    assert (old.epoch, new.epoch) == (1, 2)
    assert new.create(new.packed([data(1, 3)], 0)) == 3
    new.check()


class Overtaken(MemoryStore):
    """A store in which objects are created while the end of the chain is listed."""

    def __init__(self) -> None:
        super().__init__()
        self.meanwhile: list[Callable[[], object]] = []

    def tail(self, folder: str, after: str = "") -> Listed:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().tail(folder, after)


def test_what_an_owner_creates_while_it_checks_is_not_taken_for_another_owners():
    """A start checks while the database's changes are written by the thread of the commits."""
    store = Overtaken()
    owner = ChainWriter(store, b"o" * 8)
    owner.take_over()
    store.meanwhile = [lambda: owner.create(owner.packed([data(0, 1)], 0))]
    owner.check()
    next_one = owner.packed([data(1, 2)], 0)
    store.meanwhile = [lambda: store.create(commit_name(owner.next_sequence), next_one)]
    owner.check()  # the response has not come yet
    assert owner.create(next_one) == 2

    store.meanwhile = [lambda: ChainWriter(store, b"n" * 8).take_over()]
    with pytest.raises(FencedError):
        owner.check()


def test_a_later_owner_is_noticed_behind_what_an_owner_creates_while_it_checks():
    store = Overtaken()
    owner, other = ChainWriter(store, b"o" * 8), ChainWriter(store, b"n" * 8)
    owner.take_over()

    def both() -> None:
        store.create(commit_name(owner.next_sequence), owner.packed([data(0, 1)], 0))
        other.take_over()

    store.meanwhile = [both]
    with pytest.raises(FencedError):
        owner.check()


def test_what_was_removed_while_an_owner_checks_was_another_owners(monkeypatch):
    """Only a later owner removes what is behind the end that this one knows (K5)."""
    store = MemoryStore()
    owner = ChainWriter(store, b"o" * 8)
    owner.take_over()
    store.create(commit_name(owner.next_sequence), owner.packed([data(0, 1)], 0))

    def gone(name: str) -> bytes:
        raise KeyError(name)

    monkeypatch.setattr(store, "read", gone)
    with pytest.raises(FencedError):
        owner.check()


def test_a_lost_response_is_looked_up():
    store = MemoryStore()
    writer = ChainWriter(store, b"w" * 8)
    writer.take_over()
    packed = writer.packed([data(0, 1)], 0)
    store.create(commit_name(1), packed)

    assert writer.create(packed) == 1


def test_an_error_is_not_an_outcome():
    def lose(operation: str, name: str) -> None:
        if operation == "create" and name == commit_name(1):
            raise OutcomeUnknownError("lost")

    store = MemoryStore(before=lose)
    writer = ChainWriter(store, b"w" * 8)
    writer.take_over()
    with pytest.raises(OutcomeUnknownError):
        writer.create(writer.packed([data(0, 1)], 0))
    assert writer.next_sequence == 1


def test_a_fence_at_a_number_that_was_removed_does_not_count():
    store = MemoryStore()
    owner = ChainWriter(store, b"o" * 8)
    owner.take_over()

    def go_on(operation: str, name: str) -> None:
        if operation == "create" and name == commit_name(1):
            store.before = lambda *_: None
            for _ in range(2):
                owner.create(owner.packed([], 0))
            store.delete(commit_name(1))

    store.before = go_on
    late = ChainWriter(store, b"l" * 8)
    late.take_over()
    assert late.next_sequence == 4
    with pytest.raises(FencedError):
        owner.create(owner.packed([], 0))


class Busy(MemoryStore):
    """A store whose owner creates an object before some of the requests of others."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.owner = ChainWriter(self, b"o" * 8)
        self.owner.take_over()
        self.count, self._every = 0, every
        self.before = self._meet

    def _meet(self, *_: str) -> None:
        self.count += 1
        if self.count % self._every == 0:
            self.before = lambda *_: None
            with contextlib.suppress(FencedError):
                self.commit()
            self.before = self._meet

    def commit(self) -> None:
        number = self.owner.next_sequence
        self.owner.create(self.owner.packed([data(number - 1, number, b"%d" % number)], 0))


def test_an_owner_that_writes_during_each_request_or_two_is_taken_over(tmp_path):
    """What it writes between the listing and the fence is a part of the chain."""
    store = Busy(every=2)
    new, found = take_over(store, b"n" * 8, tmp_path)
    with pytest.raises(FencedError):
        store.commit()
    pieces = found.tails[TOPIC, 0].pieces
    assert [one.next for one in pieces] == list(range(1, new.next_sequence - 1))
    assert len(pieces) > 1


def test_a_takeover_ends_though_its_owner_is_always_faster():
    store = Busy(every=1)
    with pytest.raises(UnavailableError, match="others write to it faster"):
        ChainWriter(store, b"n" * 8).take_over()
    store.before = lambda *_: None
    store.commit()


def test_the_epoch_of_a_late_fence_is_higher_than_those_that_it_has_not_read():
    """Numbers 1 and 2 are fences of others, created behind the listing."""
    store = MemoryStore()
    ChainWriter(store, b"o" * 8).take_over()
    others = [ChainWriter(store, letter * 8) for letter in (b"a", b"b")]

    def take_over_first(operation: str, _: str) -> None:
        if operation == "create":
            store.before = lambda *_: None
            for other in others:
                other.take_over()

    store.before = take_over_first
    late = ChainWriter(store, b"l" * 8)
    late.take_over()
    last = ChainWriter(store, b"z" * 8)
    last.take_over()
    commits = [decode(store.objects[commit_name(number)]) for number in range(5)]
    epochs = [one.epoch for one in commits]
    assert epochs == sorted(set(epochs))
    assert epochs[3:] == [late.epoch, last.epoch]
    assert (commits[3].writer, late.next_sequence, last.next_sequence) == (b"l" * 8, 4, 5)
    for former in (*others, late):
        with pytest.raises(FencedError):
            former.create(former.packed([], 0))


def test_a_fence_whose_response_was_lost_stops_the_former_owner_too():
    class Repeating(MemoryStore):
        """Repeats a request without a response, and finds what the first one has created."""

        def create(self, name: str, data: bytes) -> None:
            super().create(name, data)
            if name == commit_name(2):
                super().create(name, data)

    store = Repeating()
    owner, new = ChainWriter(store, b"o" * 8), ChainWriter(store, b"n" * 8)
    owner.take_over()
    owner.create(owner.packed([data(0, 1)], 0))
    new.take_over()
    new.create(new.packed([data(1, 2)], 0))
    assert list(new.commits()) == list(range(new.next_sequence))
    with pytest.raises(FencedError):
        owner.create(owner.packed([data(1, 2)], 0))


def test_a_gap_in_the_chain_is_an_error():
    assert needed([3, 4, 5], lambda _: False) == [3, 4, 5]
    with pytest.raises(CorruptionError):
        needed([3, 5], lambda _: False)
    assert needed([1, 3, 5, 6], {1, 3}.__contains__) == [5, 6]


def test_a_fence_stays_for_those_that_wake_late():
    coverage = Coverage()
    for sequence in range(3):
        coverage.add(sequence, [], 0, is_fence=sequence == 1)
    coverage.add(3, [], 0)
    assert coverage.take_removable() == [0, 2]
    assert coverage.oldest == 3


def test_commits_are_needed_until_all_of_them_is_elsewhere():
    coverage = Coverage()
    coverage.add(0, [data(0, 5), of_database(Kind.CHANGE, "broker", b"a")], 0)
    coverage.add(1, [data(5, 9)], 0)
    coverage.add(2, [], 0)
    coverage.covered((TOPIC, 0), 9)
    assert coverage.take_removable() == []
    coverage.add(3, [of_database(Kind.SNAPSHOT, "broker", b"b")], 0)
    assert coverage.take_removable() == [0, 1, 2]
    assert coverage.take_removable() == []
    coverage.add(4, [], 0)
    assert coverage.take_removable() == []
    coverage.add(5, [of_database(Kind.SNAPSHOT, "broker", b"c")], 0)
    assert coverage.take_removable() == [3, 4]


def test_a_deleted_topic_needs_nothing():
    coverage = Coverage()
    coverage.add(0, [data(0, 5)], 0)
    coverage.add(1, [data(5, 7)], 0)
    coverage.gone(TOPIC)
    assert coverage.take_removable() == [0]


def test_a_snapshot_is_due_after_some_commits_and_a_large_one_after_more():
    def first_due(snapshot_bytes: int, commit_bytes: int = 0) -> int:
        coverage = Coverage()
        coverage.add(0, [of_database(Kind.SNAPSHOT, "broker", bytes(snapshot_bytes))], 0)
        for sequence in range(1, 5_000):
            coverage.add(sequence, [data(sequence, sequence + 1, bytes(commit_bytes))], 0)
            if "broker" in coverage.holding(0, most=10_000).names:
                return sequence
        return 0

    assert first_due(10) == SNAPSHOT_COMMITS + 1
    assert first_due(10_000_000) == 10_000_000 // 8192 + 1
    assert 60 <= first_due(10, 1 << 20) <= 70


def test_commits_of_many_bytes_are_sealed_early():
    coverage = Coverage()
    for sequence in range(10):
        coverage.add(sequence, [data(sequence, sequence + 1, bytes(100))], 0)
    assert coverage.holding(0, most=10, most_bytes=1_000) == ({}, set())
    assert coverage.holding(0, most=10, most_bytes=600) == ({(TOPIC, 0): 4}, set())


@given(st.integers(0, 2**60), st.lists(st.binary(max_size=50), max_size=5))
def test_a_bundle_is_decoded_as_it_was_encoded(first, bodies):
    whole = bundles.encode(first, bodies)
    assert bundles.decode(whole) == dict(enumerate(bodies, first))
    damaged = bytearray(whole)
    damaged[len(whole) - len(b"".join(bodies)) - 1] ^= 1
    with pytest.raises(CorruptionError):
        bundles.decode(bytes(damaged))


def test_a_start_reads_bundles_where_there_are_any():
    one, two = Bundle(3, 5), Bundle(9, 10)
    assert chosen([two, one], range(2, 12)) == [2, one, 6, 7, 8, two, 11]
    assert chosen([two, one], [5, 6, 10]) == [one, 6, two]
    assert chosen([], [1]) == [1]


def test_what_is_not_small_is_not_bundled():
    bundler = Bundler(least=2, most=3)
    assert [bundler.add(number, b"x") for number in range(3)] == [None] * 3
    assert bundler.add(3, b"x") == (Bundle(0, 2), bundles.encode(0, [b"x"] * 3))
    assert bundler.add(4, bytes(bundles.MOST_BYTES)) is None
    assert bundler.add(5, b"x") is None
    assert bundler.add(7, b"x") is None  # a number of another owner is between


@pytest.mark.parametrize("damage", ["removed", "cut", "changed"])
def test_a_bundle_that_is_missing_or_damaged_costs_requests_only(tmp_path, damage):
    store = MemoryStore()
    owner = ChainWriter(store, b"o" * 8)
    owner.take_over()
    bundler = Bundler(least=2, most=10)
    due = None
    for number in range(11):
        packed = owner.packed([data(number, number + 1, b"%d" % number)], 0)
        due = bundler.add(owner.create(packed), packed)
    assert due is not None
    bundles.create(store, *due)
    name = due[0].name
    if damage == "removed":
        store.before = lambda *at: store.objects.pop(name, None) if at == ("read", name) else None
    elif damage == "cut":
        store.objects[name] = store.objects[name][:-5]
    else:
        store.objects[name] = due[1][:-1] + b"?"
    _, found = take_over(store, b"n" * 8, tmp_path)
    pieces = found.tails[TOPIC, 0].pieces
    assert [one.file.read_bytes() for one in pieces] == [b"%d" % number for number in range(11)]


def test_what_holds_old_commits_is_known():
    coverage = Coverage()
    coverage.add(0, [data(0, 5), of_database(Kind.CHANGE, "broker", b"a")], 0)
    coverage.add(1, [data(5, 9)], 100)
    assert coverage.holding(50, most=10) == ({(TOPIC, 0): 5}, {"broker"})
    assert coverage.holding(0, most=10) == ({}, set())
    assert coverage.holding(0, most=0) == ({(TOPIC, 0): 9}, {"broker"})


def piece(first: int, after: int) -> Piece:
    return Piece(first, after, Path("spool"), 0, 1)


def test_a_tail_is_rebuilt_with_its_cuts():
    tail = Tail([piece(0, 3), piece(3, 5), piece(5, 6), piece(6, 8)], {0: 5})
    sealed, rest = (piece(0, 3), piece(3, 5)), (piece(5, 6), piece(6, 8))
    assert tail.stretches(None, 0) == [Stretch(0, 5, sealed), Stretch(5, None, rest)]
    assert tail.stretches(5, 0) == [Stretch(5, None, rest)]
    assert tail.stretches(8, 0) == []
    assert [one.is_before(5) for one in tail.stretches(None, 5)] == [True, False]


def test_missing_pieces_are_an_error():
    with pytest.raises(CorruptionError):
        Tail([piece(0, 3), piece(4, 5)]).stretches(None, 0)
    with pytest.raises(CorruptionError):
        Tail([piece(4, 5)]).stretches(3, 0)
    with pytest.raises(CorruptionError):
        Tail([piece(4, 5)]).stretches(None, 0)
    with pytest.raises(CorruptionError):
        Tail([piece(2, 5)]).stretches(3, 0)


class _Moved(Clock):
    ms = 0

    def monotonic_ms(self) -> int:
        return self.ms


def test_an_outage_begins_with_the_first_request_that_fails_and_not_with_its_end():
    class Slow(MemoryStore):
        def create(self, name: str, data: bytes) -> None:
            clock.ms += 10_000
            if clock.ms < 25_000:
                raise UnavailableError("no response")
            super().create(name, data)

    clock, store = _Moved(), Slow()
    owner = ChainWriter(store, b"12345678")
    journal = Journal(owner, Coverage(), interval_ms=0)
    since: list[int | None] = []
    journal.pause = lambda _: since.append(journal.failing_since_ms)
    with driven(clock, Chooser(1)):
        journal.submit(Submission(1, lambda: [data(0, 1)], lambda *_: None))
        journal.commit()
    assert since == [0, 0]
    assert journal.failing_since_ms is None


def test_a_check_of_the_owner_that_is_cancelled_ends_nothing_else():
    """A client may be gone, or its request be over, before the bucket responds."""
    held = threading.Event()

    class Slow(MemoryStore):
        def tail(self, folder, after=""):
            assert held.wait(20)
            return super().tail(folder, after)

    owner = ChainWriter(store := Slow(), b"12345678")
    held.set()
    owner.take_over()
    held.clear()
    journal = Journal(owner, Coverage(), interval_ms=0)
    journal.start()
    try:
        cancelled, kept = journal.confirm(), journal.confirm()
        assert cancelled.cancel()
        held.set()
        assert kept.result(20) is None
        stored = threading.Event()
        journal.submit(Submission(1, lambda: [data(0, 1)], lambda *_: stored.set()))
        assert stored.wait(20)
        ChainWriter(store, b"87654321").take_over()
        with pytest.raises(FencedError):
            journal.confirm().result(20)
    finally:
        held.set()
        journal.close(20)
