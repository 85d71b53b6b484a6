"""The next record of a copy is found behind MirrorMaker's last run, whatever it repeated before.

Method: sources and targets are drawn as MirrorMaker would write them: in runs, each from any
earlier offset, killed anywhere, with equal records, offset gaps, aborted transactions and
compaction. Where all records differ the result is known exactly; where some are equal, a plain
reader checks what a consumer gets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.to_kafka.takeover_walk import Continued, Tail, Unexplained, continued


class Rec(NamedTuple):
    """One record of a source or a target."""

    offset: int
    content: int
    key: int = 0
    value: bool = True
    aborted: bool = False


def tail(records: list[Rec]) -> Tail:
    def digests(numbers: list[int]) -> Any:
        found = np.zeros((len(numbers), 2), np.int64)
        found[:, 1] = numbers
        return found

    return Tail(
        np.array([one.offset for one in records], np.int64),
        digests([one.content for one in records]),
        digests([one.key for one in records]),
        np.array([not one.value for one in records], bool),
        np.array([one.aborted for one in records], bool),
        np.array([one.content for one in records], np.int64),
    )


def found(source: list[Rec], target: list[Rec], anchor: int = 0, *, compacted: bool = False) -> Any:
    return continued(tail(source), tail(target), anchor, compacted=compacted)


def at(contents: str) -> list[Rec]:
    """Records at offsets from 0 on; each letter is a content, a space an offset without record."""
    return [Rec(n, ord(one), ord(one)) for n, one in enumerate(contents) if one != " "]


def copied(records: list[Rec]) -> list[Rec]:
    """The same records in a target."""
    return [one._replace(offset=n, aborted=False) for n, one in enumerate(records)]


@st.composite
def copies(draw: Any, contents: Any = None) -> tuple[list[Rec], list[Rec], int]:
    """A source with gaps, MirrorMaker's copy of it, and where its last run ended."""
    count = draw(st.integers(1, 30))
    gaps = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    offsets = np.cumsum(np.array(gaps) + 1) - 1
    drawn = [n if contents is None else draw(contents) for n in range(count)]
    source = [Rec(int(o), c, c) for o, c in zip(offsets, drawn, strict=True)]
    place = end = draw(st.integers(1, count))
    target = source[:end]
    for _ in range(draw(st.integers(0, 4))):
        first = draw(st.integers(0, place - 1))
        end = draw(st.integers(first + 1, count))
        target += source[first:end]
        place = max(place, end)
    return source, copied(target), end


@given(copies())
def test_the_copy_continues_behind_the_last_run(drawn):
    source, target, last = drawn
    result = found(source, target, source[0].offset)

    assert isinstance(result, Continued)
    assert result.next_offset == source[last - 1].offset + 1
    distinct = {one.content for one in target}
    assert result.repeated == len(target) - len(distinct)
    assert result.behind == len(distinct) - last


@given(copies(contents=st.integers(0, 2)))
def test_with_equal_records_nothing_is_lost_and_all_of_the_last_run_is_continued(drawn):
    source, target, _ = drawn
    result = found(source, target, source[0].offset)

    assert isinstance(result, Continued)
    rest = [one.content for one in source if one.offset >= result.next_offset]
    whole = [one.content for one in target] + rest
    reader = iter(whole)
    assert all(one.content in reader for one in source)
    # What is continued was read there: the last record is the one before the next.
    before = [one for one in source if one.offset < result.next_offset]
    assert before[-1].content == target[-1].content


@given(copies(), st.data())
def test_a_foreign_record_is_never_skipped(drawn, data):
    source, target, _ = drawn
    place = data.draw(st.integers(0, len(target)))
    target = copied([*target[:place], Rec(0, 1_000, 1_000), *target[place:]])
    result = found(source, target, source[0].offset)

    assert isinstance(result, Unexplained)
    assert result.offset <= place


@given(st.integers(3, 30), st.data())
def test_a_gap_in_the_target_is_an_error(count, data):
    source = [Rec(n, n, n) for n in range(count)]
    gap = data.draw(st.integers(1, count - 2))
    result = found(source, copied(source[:gap] + source[gap + 1 :]))

    assert isinstance(result, Unexplained)
    assert result.missing_from == gap


@given(copies(), st.data(), st.booleans())
def test_aborted_records_are_in_the_target_or_not(drawn, data, reads_uncommitted):
    source, _, _ = drawn
    flags = data.draw(st.lists(st.booleans(), min_size=len(source), max_size=len(source)))
    source = [one._replace(aborted=flag) for one, flag in zip(source, flags, strict=True)]
    seen = [one for one in source if reads_uncommitted or not one.aborted]
    if not seen:
        return
    end = data.draw(st.integers(1, len(seen)))
    result = found(source, copied(seen[:end]), source[0].offset)

    assert isinstance(result, Continued)
    assert result.repeated == 0
    rest = [one for one in seen[end:] if not one.aborted]
    assert [o for o in source if not o.aborted and o.offset >= result.next_offset] == rest


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("abc", "abc", 3),
        ("a b  c d", "ab", 3),
        ("abcdefg", "abcdbc", 3),  # `d` is repeated again: a group may be at the second `b`
        ("aaaaaaaa", "aaaaa", 5),
        ("aaab", "aaaab", 4),
        ("abab", "aba", 3),
        ("xabaz", "xabxa", 2),
        ("abcd", "abcdabcdab", 2),
    ],
)
def test_examples(source, target, expected):
    result = found(at(source), at(target))

    assert isinstance(result, Continued)
    assert result.next_offset == expected


def test_what_the_last_run_repeats_may_be_before_the_anchor():
    source = at("abcdefgh")
    without = found(source[4:], at("efbc"), anchor=4)
    result = found(source, at("efbc"), anchor=4)

    assert isinstance(without, Unexplained)
    assert without.first_ms == ord("b")
    assert isinstance(result, Continued)
    assert (result.next_offset, result.repeated, result.behind) == (3, 2, 3)


class TestCompacted:
    """Either log may lack records that a newer one of their key replaces."""

    def keyed(self, text: str) -> list[Rec]:
        """`k1 k2 -` : key, version; `-` an offset without record; `k!` a tombstone."""
        return [
            Rec(n, int.from_bytes(word.encode()), ord(word[0]), value=word[1] != "!")
            for n, word in enumerate(text.split())
            if word != "-"
        ]

    def next(self, source: str, target: str) -> Any:
        return found(self.keyed(source), copied(self.keyed(target)), compacted=True)

    @pytest.mark.parametrize(
        ("source", "target", "expected"),
        [
            ("a1 b1 a2 c1", "a1 b1 a2", 3),
            ("- b1 a2 c1", "a1 b1 a2", 3),  # removed at the source since
            ("a1 b1 a2 c1", "b1 a2", 3),  # removed at the target
            ("- b1 a2 c1 d1", "a1 b1 a2 c1", 4),
            ("a1 b1 a! c1", "b1 c1", 4),  # the tombstone is gone as well
            ("- b1 - c1", "b1 a! c1", 4),
            ("a1 b1 a2 b2", "a1 b1 a2 a1", 1),  # its last value is the older one
        ],
    )
    def test_examples(self, source, target, expected):
        result = self.next(source, target)

        assert isinstance(result, Continued), result
        assert result.next_offset == expected

    @pytest.mark.parametrize("target", ["a1 b1 x1", "a1 c1"])
    def test_what_compaction_does_not_explain_is_an_error(self, target):
        assert isinstance(self.next("a1 b1 a2 c1", target), Unexplained)
