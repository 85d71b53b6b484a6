"""A chain either verifies to one position or is a typed corruption.

Method: draw a valid chain, then break it in one known way and expect that error. The order of the
listing is always shuffled, because the stores' contract does not fix it.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.archive.chain import chain
from logmirror.archive.naming import format_name
from logmirror.errors import CorruptionError
from logmirror.model import OFFSET_MAX, OffsetRange

EXT = "parquet"


@st.composite
def ranges(draw, *, min_links=0):
    start = draw(st.integers(0, 2**40))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=min_links, max_size=8))
    objects, first = [], start
    for size in sizes:
        objects.append(OffsetRange(first=first, last=first + size - 1))
        first += size
    return start, objects


def names(objects):
    return [format_name(obj, EXT) for obj in objects]


@given(ranges(), st.booleans(), st.randoms(use_true_random=False))
@pytest.mark.mirror_v3("FS-23")
def test_an_unbroken_chain_continues_at_its_end(drawn, declared, rnd):
    start, objects = drawn
    listing = names(objects)
    rnd.shuffle(listing)
    found = chain(listing, extension=EXT, start=start if declared else None)
    assert [obj.covered for obj in found.objects] == objects
    assert [obj.name for obj in found.objects] == names(objects)
    end = objects[-1].next_offset if objects else start if declared else None
    assert found.next_offset == end


@given(ranges(min_links=2), st.data())
def test_a_missing_object_is_a_gap_unless_it_is_an_end(drawn, data):
    start, objects = drawn
    lost = data.draw(st.integers(0, len(objects) - 2))
    kept = objects[:lost] + objects[lost + 1 :]
    if lost == 0:
        with pytest.raises(CorruptionError, match="does not begin at") as caught:
            chain(names(kept), extension=EXT, start=start)
        assert chain(names(kept), extension=EXT, start=None).objects[0].first == kept[0].first
    else:
        with pytest.raises(CorruptionError, match="gap in the chain") as caught:
            chain(names(kept), extension=EXT, start=start)
    assert caught.value.facts == {
        "name": names(kept)[lost],
        "expected": objects[lost].first,
        "found": objects[lost + 1].first,
    }
    assert caught.value.hint


@given(ranges(min_links=1), st.integers(0, 1), st.data())
def test_a_second_writer_shows_as_overlap(drawn, later, data):
    start, objects = drawn
    victim = data.draw(st.sampled_from(objects))
    intruder = OffsetRange(first=min(victim.first + later, victim.last), last=victim.last + 1)
    with pytest.raises(CorruptionError, match="overlap in the chain"):
        chain(names([*objects, intruder]), extension=EXT, start=start)


@given(ranges(min_links=1))
def test_a_chain_that_begins_elsewhere_is_refused(drawn):
    start, objects = drawn
    with pytest.raises(CorruptionError, match="does not begin at") as caught:
        chain(names(objects), extension=EXT, start=start + 1)
    assert (caught.value.facts["expected"], caught.value.facts["found"]) == (start + 1, start)


def test_the_last_offset_of_all_can_be_archived():
    last = OffsetRange(first=OFFSET_MAX, last=OFFSET_MAX)
    assert chain(names([last]), extension=EXT, start=None).next_offset == OFFSET_MAX + 1


@pytest.mark.mirror_v3("NAM-03")
def test_two_formats_in_one_chain_are_refused():
    listing = [
        format_name(OffsetRange(first=0, last=9), EXT),
        format_name(OffsetRange(first=10, last=19), "ndjson"),
    ]
    with pytest.raises(CorruptionError, match="mixed formats") as caught:
        chain(listing, extension=EXT, start=0)
    assert caught.value.facts == {"name": listing[1], "expected": EXT, "found": "ndjson"}


LEFTOVERS = [
    f"{0:020d}-{9:020d}.parquet.tmp.6f1c54ae-93f1-4a1c-8f0e-4b8f8f0f9e6d",
    f"{0:020d}-{9:020d}.parquet.tmp.0",
]


@pytest.mark.parametrize("name", LEFTOVERS)
def test_what_mirror_v3_leaves_behind_is_passed_over(name):
    assert chain([name], extension=EXT, start=5).next_offset == 5


OTHER_NAMES = ["README.md", "x.tmp.1", f"{0:020d}-{9:020d}.parquet~", f"{9:020d}-{0:020d}.parquet"]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_are_refused_by_name(name):
    with pytest.raises(CorruptionError, match="unknown object") as caught:
        chain([name], extension=EXT, start=None)
    assert caught.value.facts == {"name": name}


def test_ten_thousand_names_take_no_time():
    listing = names([OffsetRange(first=i * 10, last=i * 10 + 9) for i in range(10_000)])
    took = []
    for _ in range(3):
        began = time.perf_counter()
        assert chain(listing, extension=EXT, start=0).next_offset == 100_000
        took.append(time.perf_counter() - began)
    assert min(took) < 0.25  # measured: 0.03; the machine may be busy
