"""Names alone: which objects count while a compaction runs, and which objects may be merged.

Method: a chain and a tree of merged objects over its cells are drawn. Any mixture that merging can
leave behind must resolve to a cover of the same offsets; any other mixture is an error. Any two
groups that may be chosen are disjoint or nested.
"""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from logmirror.archive.chain import ArchiveObject, chain
from logmirror.archive.cover import cells, cover
from logmirror.archive.naming import format_name
from logmirror.errors import CorruptionError
from logmirror.model import OffsetRange

EXT = "parquet"


def obj(first, last):
    return ArchiveObject(format_name(OffsetRange(first=first, last=last), EXT), first, last)


@st.composite
def chains(draw, *, min_links=2):
    """The links of a chain."""
    first = draw(st.integers(0, 300))
    objects = []
    for size in draw(st.lists(st.integers(1, 40), min_size=min_links, max_size=40)):
        objects.append(obj(first, first + size - 1))
        first += size
    return objects


def merged(group):
    return obj(group[0].first, group[-1].last)


@given(chains(), st.data())
def test_whatever_merging_leaves_covers_the_same_offsets(objects, data):
    now, listed = list(objects), {one.name for one in objects}
    for _ in range(data.draw(st.integers(1, 4))):
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(now), max_size=len(now)))
        groups = cells(now, sizes, target_bytes=data.draw(st.integers(2, 300)), min_objects=2)
        assume(groups)
        group = data.draw(st.sampled_from(groups))
        listed.add(merged(group).name)
        # Parts go from left to right, or some come back.
        for gone in data.draw(st.sets(st.sampled_from(group))):
            listed.discard(gone.name)
        now = [one for one in now if one not in group]
        now = sorted([*now, merged(group)], key=lambda one: one.first)
    shuffled = data.draw(st.permutations(sorted(listed)))

    found = cover(shuffled, extension=EXT, start=objects[0].first)

    assert list(found.objects) == now
    assert found.next_offset == objects[-1].last + 1
    inside = {one.name for group in found.replaced.values() for one in group}
    assert inside == listed - {one.name for one in now}
    for around, group in found.replaced.items():
        assert all(around.first <= one.first <= one.last <= around.last for one in group)


@given(chains(min_links=3), st.data())
def test_a_lost_object_that_nothing_replaces_is_an_error(objects, data):
    lost = data.draw(st.integers(0, len(objects) - 2))
    listed = [one.name for one in objects if one is not objects[lost]]

    with pytest.raises(CorruptionError, match=r"gap in the chain|does not begin at"):
        cover(listed, extension=EXT, start=objects[0].first)


@given(chains(min_links=3), st.data())
def test_half_an_overlap_is_an_error(objects, data):
    at = data.draw(st.integers(0, len(objects) - 2))
    left, right = objects[at], objects[at + 1]
    first = data.draw(st.integers(left.first, left.last))
    last = data.draw(st.integers(right.first, right.last))
    assume(first != left.first and last != right.last)
    names = [one.name for one in (*objects, obj(first, last))]

    with pytest.raises(CorruptionError, match="overlap in the chain"):
        cover(names, extension=EXT, start=objects[0].first)


@given(chains())
def test_without_merged_objects_a_cover_is_the_chain(objects):
    names = [one.name for one in objects]
    found = cover(names, extension=EXT, start=objects[0].first)
    verified = chain(names, extension=EXT, start=objects[0].first)

    assert (found.objects, found.next_offset) == (verified.objects, verified.next_offset)
    assert not found.replaced


@pytest.mark.parametrize("name", ["README.md", f"{0:020d}-{9:020d}.ndjson"])
def test_other_names_and_formats_are_refused_as_in_a_chain(name):
    with pytest.raises(CorruptionError, match=r"unknown object|mixed formats") as caught:
        cover([obj(0, 9).name, name], extension=EXT, start=0)
    assert caught.value.facts["name"] == name


@given(chains(), st.data())
def test_groups_of_any_two_looks_are_disjoint_or_nested(objects, data):
    def look():
        """The end of the chain at some moment, and limits of a merge."""
        seen = objects[: data.draw(st.integers(2, len(objects)))]
        sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(seen), max_size=len(seen)))
        return cells(seen, sizes, target_bytes=data.draw(st.integers(2, 300)), min_objects=2)

    for one in look():
        for other in look():
            common = set(one) & set(other)
            assert common in (set(), set(one), set(other))


@given(chains(min_links=1), st.integers(2, 300), st.integers(2, 9), st.data())
def test_groups_are_small_objects_up_to_the_target_and_never_the_last(objects, target, least, data):
    sizes = data.draw(st.lists(st.integers(1, 200), min_size=len(objects), max_size=len(objects)))
    size_of = dict(zip(objects, sizes, strict=True))

    groups = cells(objects, sizes, target_bytes=target, min_objects=least)

    for group in groups:
        assert len(group) >= least
        assert sum(size_of[one] for one in group) <= target
        assert max(size_of[one] for one in group) * 2 < target
        assert objects[-1] not in group
        at = objects.index(group[0])
        assert tuple(objects[at : at + len(group)]) == group


def test_a_long_chain_of_small_objects_becomes_few():
    objects = [obj(n * 10, n * 10 + 9) for n in range(10_000)]

    groups = cells(objects, [1000] * 10_000, target_bytes=1_000_000, min_objects=8)

    left = 10_000 - sum(map(len, groups)) + len(groups)
    assert left < 40
