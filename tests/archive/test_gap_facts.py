"""Offset gaps and their causes: array code gives the same result as sets, for any chunking of rows.

Method: drawn records and known gaps; the result is compared with one computed offset by offset.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.archive import gap_facts
from logmirror.archive.gap_facts import (
    GapFacts,
    GapWalk,
    Witness,
    by_cause,
    check_listed,
    explained,
    merged,
)
from logmirror.errors import CorruptionError
from logmirror.model import Gap, GapCause, OffsetRange

CONTROL, ABORTED, COMPACTED = GapCause.CONTROL, GapCause.ABORTED, GapCause.COMPACTED
KINDS = ["record", CONTROL, ABORTED, "unknown"]


def gaps_of(kinds, first):
    """The runs of a list with a kind for each offset, and those nothing is known of."""
    single = [
        Gap(first=first + at, last=first + at, cause=kind)
        for at, kind in enumerate(kinds)
        if isinstance(kind, GapCause)
    ]
    return list(merged(single))


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=40),
    st.integers(0, 5),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_each_missing_offset_has_its_cause_or_none(kinds, first, cuts):
    covered = OffsetRange(first=first, last=first + len(kinds) - 1)
    walk, known = GapWalk(covered), by_cause(gaps_of(kinds, first))
    edges = sorted({0, len(kinds), *(cut for cut in cuts if cut <= len(kinds))})
    for start, stop in pairwise(edges):
        offsets = [first + at for at in range(start, stop) if kinds[at] == "record"]
        walk.step(np.array(offsets, np.int64), known, reached=first + stop)

    found = walk.finish(known)

    assert list(found.runs) == gaps_of(kinds, first)
    for cause in (CONTROL, ABORTED):
        assert found.count(cause) == kinds.count(cause)
    rest = [o for run in found.unexplained for o in range(run.first, run.last + 1)]
    assert rest == [first + at for at, kind in enumerate(kinds) if kind == "unknown"]
    assert found.unexplained_count == len(rest)
    assert found.offset_count == len(kinds) - kinds.count("record")


def gap(first, last, cause):
    return Gap(first=first, last=last, cause=cause)


FOUND = GapFacts(
    counts={CONTROL: 1},
    runs=(gap(5, 5, CONTROL),),
    unexplained_count=4,
    unexplained=(OffsetRange(first=1, last=3), OffsetRange(first=6, last=6)),
)


def test_a_witness_gives_the_rest_its_cause():
    witness = Witness(runs=(), counts={CONTROL: 1, COMPACTED: 4})
    reported = explained(FOUND, witness, name="n")
    assert reported.runs == (gap(1, 3, COMPACTED), gap(5, 5, CONTROL), gap(6, 6, COMPACTED))
    assert (reported.counts, reported.unexplained_count) == ({CONTROL: 1, COMPACTED: 4}, 0)


def test_a_witness_with_few_runs_still_gives_the_counts():
    witness = Witness(runs=(), counts={CONTROL: 2, COMPACTED: 3})
    reported = explained(FOUND, witness, name="n")
    assert reported.runs == FOUND.runs
    assert (reported.counts, reported.unexplained_count) == ({CONTROL: 2, COMPACTED: 3}, 0)


@pytest.mark.parametrize("counts", [{}, {COMPACTED: 5}, {CONTROL: 1, COMPACTED: 5}, {CONTROL: 9}])
def test_a_witness_that_contradicts_what_was_found_is_corruption(counts):
    with pytest.raises(CorruptionError) as caught:
        explained(FOUND, Witness(runs=(), counts=counts), name="n")
    assert caught.value.facts["name"] == "n"


def test_a_listed_gap_at_the_offset_of_a_record_is_corruption():
    listed = by_cause([gap(2, 4, ABORTED)])
    walk = GapWalk(OffsetRange(first=0, last=5))
    walk.step(np.array([0, 1, 3, 5]), listed)
    with pytest.raises(
        CorruptionError, match="records at offsets that its footer or claim lists as gaps"
    ):
        check_listed(listed, walk.finish(listed), name="n")


def test_very_many_runs_are_counted_and_the_first_are_kept(monkeypatch):
    monkeypatch.setattr(gap_facts, "RUNS_KEPT", 3)
    covered = OffsetRange(first=0, last=99)
    walk = GapWalk(covered)
    for start in range(0, 100, 10):
        walk.step(np.arange(start, start + 10, 2), {})
    found = walk.finish()
    assert (found.unexplained_count, len(found.unexplained)) == (50, 3)
    reported = explained(found, Witness(runs=(), counts={COMPACTED: 50}), name="n")
    assert reported.runs == tuple(gap(at, at, COMPACTED) for at in (1, 3, 5))
