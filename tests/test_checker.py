"""The judge is judged: every planted fault is found under its code, and clean copies have none.

Method: draw a history with holes, plant one known fault at a drawn place, and expect exactly that
anomaly. The faults are those a mirror can commit: drop, swap, repeat, invent, change, miscover.
"""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from logmirror.archive.naming import format_name
from logmirror.model import OffsetRange
from logmirror.testing import Row, check_tiles, compare

KEYS = [None, b"", b"key"]
HEADERS = [(), ((b"h", None),), ((b"h", b""), (b"h", b"1"))]


@st.composite
def histories(draw, *, min_size=0):
    """Rows by ascending offset, with holes, also before the first."""
    steps = draw(st.lists(st.sampled_from([1, 2, 5]), min_size=min_size, max_size=6))
    return [
        Row(
            sum(steps[: n + 1]) - 1,
            n % 4 - 1,
            n % 2,
            KEYS[n % 3],
            b"%d" % n if n else None,
            HEADERS[n % 3],
        )
        for n in range(len(steps))
    ]


def codes(truth, copy):
    return {anomaly.code: anomaly.count for anomaly in compare(truth, copy)}


@given(histories())
def test_an_exact_copy_has_no_anomaly(rows):
    assert compare(iter(rows), iter(list(rows))) == []


@given(histories(min_size=2), st.data())
def test_a_dropped_record_is_lost(rows, data):
    at = data.draw(st.integers(0, len(rows) - 2))
    assert codes(rows, rows[:at] + rows[at + 1 :]) == {"A1": 1}


@given(histories(min_size=1), st.data())
def test_a_missing_end_is_unseen(rows, data):
    at = data.draw(st.integers(0, len(rows) - 1))
    assert codes(rows, rows[:at]) == {"A2": len(rows) - at}


@given(histories(min_size=2), st.data())
def test_two_swapped_records_are_a_reorder(rows, data):
    at = data.draw(st.integers(0, len(rows) - 2))
    swapped = [*rows[:at], rows[at + 1], rows[at], *rows[at + 2 :]]
    assert codes(rows, swapped) == {"A12": 1}


@given(histories(min_size=2), st.data())
def test_a_record_written_far_too_late_is_a_reorder(rows, data):
    at = data.draw(st.integers(0, len(rows) - 2))
    assert codes(rows, [*rows[:at], *rows[at + 1 :], rows[at]]) == {"A12": 1}


@given(histories(min_size=1), st.data())
def test_a_record_written_twice_is_a_duplicate(rows, data):
    at = data.draw(st.integers(0, len(rows) - 1))
    assert codes(rows, [*rows[: at + 1], *rows[at:]]) == {"A3": 1}


@given(histories(min_size=2), st.data())
def test_a_replayed_batch_is_duplicates(rows, data):
    first = data.draw(st.integers(0, len(rows) - 2))
    end = data.draw(st.integers(first + 1, len(rows)))
    assert codes(rows, [*rows[:end], *rows[first:]]) == {"A3": end - first}


@given(histories(min_size=1))
def test_a_whole_copy_written_twice_is_duplicates(rows):
    assert codes(rows, rows + rows) == {"A3": len(rows)}


CHANGES = {
    "timestamp": lambda r: r._replace(timestamp_ms=r.timestamp_ms + 1),
    "timestamp type": lambda r: r._replace(timestamp_type=1 - r.timestamp_type),
    "key": lambda r: r._replace(key=b"other"),
    "value": lambda r: r._replace(value=b"other"),
    "null key for an empty one": lambda r: r._replace(key=None if r.key == b"" else b""),
    "null value for an empty one": lambda r: r._replace(value=None if r.value == b"" else b""),
    "a header more": lambda r: r._replace(headers=(*r.headers, (b"x", None))),
    "null header for an empty one": lambda r: r._replace(
        headers=tuple((k, None if v == b"" else b"") for k, v in r.headers)
    ),
    "headers turned round": lambda r: r._replace(headers=r.headers[::-1]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@given(histories(min_size=1), st.data())
def test_a_changed_field_is_a_mutation(change, rows, data):
    at = data.draw(st.integers(0, len(rows) - 1))
    rows[at] = rows[at]._replace(key=b"", value=b"", headers=((b"h", b""), (b"h", b"1")))
    changed = change(rows[at])
    assert codes(rows, [*rows[:at], changed, *rows[at + 1 :]]) == {"A13": 1}


@given(histories(min_size=2), st.data())
def test_values_that_changed_places_are_mutations(rows, data):
    at = data.draw(st.integers(0, len(rows) - 2))
    a, b = rows[at], rows[at + 1]
    swapped = [a._replace(value=b.value), b._replace(value=a.value)]
    assert codes(rows, [*rows[:at], *swapped, *rows[at + 2 :]]) == {"A13": 2}


@given(histories(min_size=1), st.data())
def test_an_invented_record_is_a_phantom(rows, data):
    taken = {row.offset for row in rows}
    free = [offset for offset in range(rows[-1].offset + 3) if offset not in taken]
    invented = rows[0]._replace(offset=data.draw(st.sampled_from(free)))
    copy = sorted([*rows, invented], key=lambda row: row.offset)
    assert codes(rows, copy) == {"A14": 1}
    assert codes(rows, [*rows, invented]) == {"A14": 1}


@given(histories(min_size=1))
def test_offsets_counted_anew_show_as_lost_and_invented(rows):
    moved = [row._replace(offset=row.offset + 1) for row in rows]
    assert codes(rows, moved)["A14"] >= 1


@given(histories(min_size=1))
def test_an_empty_source_makes_every_record_a_phantom(rows):
    assert codes([], rows) == {"A14": len(rows)}


def test_several_faults_are_told_apart_with_their_first_example():
    rows = [Row(n, 0, 0, None, b"%d" % n) for n in range(10)]
    copy = [
        rows[0],
        rows[2],
        rows[2],
        rows[5]._replace(key=b"x"),
        rows[4],
        rows[6]._replace(offset=99),
    ]
    found = {anomaly.code: anomaly for anomaly in compare(rows, copy)}
    assert {code: anomaly.count for code, anomaly in found.items()} == {
        "A1": 6,  # 1, 3, 6, 7, 8, 9
        "A3": 1,
        "A12": 1,
        "A13": 1,
        "A14": 1,
    }
    assert "offset=1," in found["A1"].example
    assert "offset=99," in found["A14"].example


def test_a_source_that_does_not_ascend_judges_nothing():
    rows = [Row(1, 0, 0, None, None), Row(1, 0, 0, None, None)]
    with pytest.raises(ValueError, match="offset 1 of the source comes after 1"):
        compare(rows, rows)


# --- names


@st.composite
def tilings(draw):
    start = draw(st.integers(0, 100))
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    names, first = [], start
    for size in sizes:
        names.append((first, first + size - 1))
        first += size
    return start, first, names


def named(ranges, extension="parquet"):
    return [format_name(OffsetRange(first=a, last=b), extension) for a, b in ranges]


def found_in(names, start, end):
    anomalies = check_tiles(names, start, end)
    assert all(anomaly.code == "A15" for anomaly in anomalies)
    return anomalies


@given(tilings(), st.randoms(use_true_random=False))
def test_objects_that_tile_the_range_have_no_anomaly(tiling, rnd):
    start, end, ranges = tiling
    names = named(ranges)
    rnd.shuffle(names)
    assert check_tiles(names, start, end) == []
    assert check_tiles([], start, start) == []


@given(tilings(), st.data())
def test_a_lost_object_is_found(tiling, data):
    start, end, ranges = tiling
    ranges.pop(data.draw(st.integers(0, len(ranges) - 1)))
    assert found_in(named(ranges), start, end)


@given(tilings(), st.data(), st.sampled_from([-1, 1]))
def test_a_wrong_end_in_a_name_is_found(tiling, data, by):
    start, end, ranges = tiling
    at = data.draw(st.integers(0, len(ranges) - 1))
    first, last = ranges[at]
    assume(last + by >= first)
    ranges[at] = (first, last + by)
    assert found_in(named(ranges), start, end)


@given(tilings(), st.data())
def test_a_second_object_over_the_same_offsets_is_found(tiling, data):
    start, end, ranges = tiling
    first, last = data.draw(st.sampled_from(ranges))
    assert found_in(named([*ranges, (first, last + 1)]), start, end)
    assert found_in([*named(ranges), *named([(first, last)], "ndjson")], start, end)


@given(tilings())
def test_a_strange_name_is_found(tiling):
    start, end, ranges = tiling
    assert "README" in found_in([*named(ranges), "README"], start, end)[0].example


@given(tilings())
def test_a_chain_that_ends_or_begins_elsewhere_is_found(tiling):
    start, end, ranges = tiling
    assert found_in(named(ranges), start, end + 1)
    assert found_in(named(ranges), start + 1, end)
