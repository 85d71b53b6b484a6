"""A chain longer than one listing: what is broken anywhere in it is found, in bounded steps.

Method: chains of names in a store in memory, of which a listing shows ten; the end of a listing is
its last ten names, as in a bucket its last page. Each request takes 50 ms of a stepped clock.
"""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.fakes.scripted import SteppingClock, archive_spec
from kit.runs.objects import FOLDER, make_object, merge_all, odd_records
from logmirror.archive.naming import format_name
from logmirror.errors import CorruptionError, UnavailableError
from logmirror.mirror.ports import FlowId
from logmirror.model import OffsetRange
from logmirror.stores.base import Tail
from logmirror.testing import MemoryStore
from logmirror.to_archive import whole_chain as module
from logmirror.to_archive.destination import ArchiveDestination
from logmirror.to_archive.positions import whole_chain
from logmirror.to_archive.whole_chain import LongChains

PAGE = 10
REQUEST_MS = 50
FLOW = FlowId(mirror="m", destination="orders", topic="t", partition=3)
SPEC = archive_spec(drift_check_ms=60_000)


class Listed(MemoryStore):
    """Lists `PAGE` names for each request, and takes its time."""

    def __init__(self, names=()):
        super().__init__()
        self.clock, self.requests = SteppingClock(), 0
        for name in names:
            self.objects[f"{FOLDER}/{name}"] = b""

    def names(self, folder, after=""):
        for number, name in enumerate(super().names(folder, after)):
            if number % PAGE == 0:
                self.clock.sleep_ms(REQUEST_MS)
                self.requests += 1
            yield name

    def tail(self, folder, after=""):
        names = list(MemoryStore.names(self, folder, after))
        if after or len(names) <= PAGE:
            return Tail(names[:PAGE], is_whole=not after)
        return Tail(names[-PAGE:], is_whole=False)


@pytest.fixture(autouse=True)
def _pages(monkeypatch):
    monkeypatch.setattr(module, "STEP", PAGE)


def chain_of(count):
    return [format_name(OffsetRange(first=n * 5, last=n * 5 + 4), "parquet") for n in range(count)]


def broken(count, kind, at):
    names = chain_of(count)
    if kind == "gap":
        del names[at]
    elif kind == "overlap":
        inside = OffsetRange(first=at * 5 + 2, last=at * 5 + 6)
        names.insert(at + 1, format_name(inside, "parquet"))
    elif kind == "inside":
        inside = OffsetRange(first=at * 5 + 1, last=at * 5 + 2)
        names.insert(at + 1, format_name(inside, "parquet"))
    elif kind == "format":
        names[at] = names[at].replace("parquet", "ndjson")
    else:
        names.append({"early": "00-notes.txt", "late": "notes.txt"}[kind])
    return names


def destination(store, listing_ms=None):
    long_chains = LongChains(store.clock, listing_ms)
    return ArchiveDestination(SPEC, lambda _: store, None, store.clock, long_chains=long_chains)


def position(copies):
    return copies.positions([FLOW], None)[FLOW]


KINDS = ["gap", "overlap", "inside", "format", "early", "late"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 9, 10, 11, 50, 88])
def test_what_is_broken_anywhere_is_found_before_a_position_is_returned(kind, at):
    found = position(destination(Listed(broken(100, kind, at))))
    assert isinstance(found, CorruptionError)


def test_a_long_chain_that_does_not_begin_at_its_start_is_found():
    assert isinstance(position(destination(Listed(chain_of(100)[1:]))), CorruptionError)


def test_an_unbroken_chain_is_listed_once_in_a_process():
    store = Listed(chain_of(100))
    copies = destination(store, listing_ms=60_000)
    assert position(copies) == 500
    assert 10 <= store.requests <= 12
    store.requests = 0
    assert position(copies) == 500
    assert not copies.drifted(state_of(copies))
    assert store.requests == 0


def state_of(copies):
    newest = copies._newest[FLOW]  # noqa: SLF001  # as `begin` returns it
    return SimpleNamespace(flow=FLOW, newest=newest)


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_a_start_that_would_take_too_long_leaves_the_rest_to_drift_checks(kind, caplog):
    """And each of these takes no longer than its share of the interval."""
    caplog.set_level("INFO", "logmirror.mirror")
    count = 3000
    store = Listed(broken(count, kind, 2500) if kind else chain_of(count))
    copies = destination(store, listing_ms=1000)

    began_ms = store.clock.ms
    found = position(copies)
    assert store.clock.ms - began_ms <= 1000 + 2 * REQUEST_MS
    if kind == "early":  # among the names that the start checks
        assert isinstance(found, CorruptionError)
        return
    if kind == "late":  # on the last page
        assert isinstance(found, CorruptionError)
        return
    assert found == count * 5
    (record,) = caplog.records
    assert record.facts["checked"] in chain_of(count)[150:250], "20 requests of ten names"
    assert record.facts["end"] == chain_of(count)[-1]

    state, checks, error = state_of(copies), 0, None
    while error is None and checks < 100:
        began_ms, checks = store.clock.ms, checks + 1
        before = store.requests
        try:
            assert not copies.drifted(state)
        except CorruptionError as caught:
            error = caught
        assert store.clock.ms - began_ms <= 1000 + 2 * REQUEST_MS
        if store.requests == before:
            break
    assert (error is not None) == bool(kind)
    assert checks < 40, "a second of each minute, of 15 s, or 30 s if it is read twice"


def test_many_long_chains_share_the_time_of_drift_checks():
    store = Listed(chain_of(3000))
    flows = [FLOW] + [
        FlowId(mirror=f"m{n}", destination="orders", topic="t", partition=3) for n in range(19)
    ]
    copies = destination(store, listing_ms=0)
    assert set(copies.positions(flows, None).values()) == {15_000}
    state, began_ms = state_of(copies), store.clock.ms
    assert not copies.drifted(state)
    assert store.clock.ms - began_ms <= 60_000 / 10 / 20 + REQUEST_MS


def test_a_check_that_was_interrupted_continues_where_it_was():
    store = Listed(chain_of(100))
    names = whole_chain(store, FLOW, SPEC, None)
    for _ in range(5):
        names.step()
    assert names.checked_name >= chain_of(100)[44]

    def fail(*_):
        raise UnavailableError("down")

    store.before = fail
    with pytest.raises(UnavailableError):
        names.step()
    store.before, store.requests = lambda *_: None, 0
    while not names.is_checked:
        names.step()
    assert store.requests <= 7
    assert names.checked_name == chain_of(100)[-1]


@given(st.randoms(use_true_random=False), st.integers(2, 7))
def test_names_are_judged_as_in_one_listing(chooser, step):
    """Whatever the size of a step: a chain is accepted if it is accepted as a whole."""
    names, at = [], 0
    while len(names) < 40:
        size = chooser.randrange(1, 4)
        names.append(format_name(OffsetRange(first=at, last=at + size - 1), "parquet"))
        at += size
    if chooser.random() < 0.5:
        del names[chooser.randrange(1, 39)]
    store = Listed(names)
    expected = isinstance(position(destination(store)), CorruptionError)
    chain = whole_chain(store, FLOW, SPEC, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP", step)
        try:
            while not chain.is_checked:
                chain.step()
            found = False
        except CorruptionError:
            found = True
    assert found == expected == (len(names) < 40)


def test_a_chain_is_unbroken_at_every_moment_of_a_compaction(monkeypatch):
    """Passes in small steps, with some of the compaction between any two."""
    monkeypatch.setattr(module, "STEP", 3)
    for seed in range(20):
        chooser, store = random.Random(seed), MemoryStore()
        for first in range(0, 77, 7):
            covered = OffsetRange(first=first, last=first + 6)
            name, data, _ = make_object(
                "parquet", odd_records(7, first=first, seed=first), covered=covered
            )
            store.create(f"{FOLDER}/{name}", data)
        chain = whole_chain(store, FLOW, SPEC, None)
        is_inside = False

        def advance(_operation, _name, chooser=chooser, store=store):
            nonlocal is_inside, chain
            if is_inside or chooser.random() < 0.7:
                return
            is_inside = True
            chain.step()
            if chain.is_checked:
                chain = whole_chain(store, FLOW, SPEC, None)
            is_inside = False

        store.before = advance
        merge_all(store)
        store.before = lambda *_: None
        while not chain.is_checked:
            chain.step()


def test_the_archives_of_a_lane_share_the_time_limit_of_a_start():
    store = Listed(chain_of(3000))
    long_chains = LongChains(store.clock, 1000)
    began_ms = store.clock.ms
    for _ in range(3):
        copies = ArchiveDestination(
            SPEC, lambda _: store, None, store.clock, long_chains=long_chains
        )
        assert position(copies) == 15_000
    assert store.clock.ms - began_ms <= 1000 + 4 * REQUEST_MS
