"""The checker finds every planted fault under its code, and no anomaly in an exact replica.

Method: generate records with offset gaps, plant one fault at a random place, and expect exactly
that anomaly. The faults are those of a mirror: records dropped, swapped, duplicated, invented or
changed, and wrong object names. The table `PLANTED` at the end covers whole histories.
"""

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from logmirror.archive.naming import format_name
from logmirror.model import OffsetRange
from logmirror.testing import History, Row, Truth, check_tiles, compare

KEYS = [None, b"", b"key"]
HEADERS = [(), ((b"h", None),), ((b"h", b""), (b"h", b"1"))]


@st.composite
def histories(draw, *, min_size=0):
    """Rows in ascending offset order, with offset gaps, also before the first."""
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
def test_a_record_moved_to_the_end_is_a_reorder(rows, data):
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
def test_swapped_values_are_mutations(rows, data):
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
def test_shifted_offsets_are_phantoms(rows):
    moved = [row._replace(offset=row.offset + 1) for row in rows]
    assert codes(rows, moved)["A14"] >= 1


@given(histories(min_size=1))
def test_an_empty_source_makes_every_record_a_phantom(rows):
    assert codes([], rows) == {"A14": len(rows)}


def test_several_faults_are_counted_separately_with_their_first_example():
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


def test_a_source_that_does_not_ascend_is_refused():
    rows = [Row(1, 0, 0, None, None), Row(1, 0, 0, None, None)]
    with pytest.raises(ValueError, match="the source has offset 1 after 1"):
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
def test_a_name_that_is_no_object_name_is_found(tiling):
    start, end, ranges = tiling
    assert "README" in found_in([*named(ranges), "README"], start, end)[0].example


@given(tilings())
def test_a_chain_that_ends_or_begins_elsewhere_is_found(tiling):
    start, end, ranges = tiling
    assert found_in(named(ranges), start, end + 1)
    assert found_in(named(ranges), start + 1, end)


# --- whole histories


LATER = {n: Row(n, 9_000 + n, 0, b"k", b"recreated-%d" % n) for n in range(20)}
ABORTED = {8: Row(8, 1_008, 0, b"k", b"never"), 9: Row(9, 1_009, 0, b"k", b"never")}
ROWS = tuple(
    Row(n, 1_000 + n, n % 2, KEYS[n % 3], b"%d" % n, ((b"a", b"1"), (b"b", None)))
    for n in range(20)
    if n not in {8, 9, 10, 15, 19}  # aborted, its marker, compacted away, a commit marker
)
TRUTH = Truth(rows=ROWS, end=20, aborted=ABORTED, may_lack={16}, later=LATER)
BORDERS = (0, 4, 11, 16, 20)


def cover(*borders):
    return named([(a, b - 1) for a, b in itertools.pairwise(borders)])


class Observed:
    """A history without a fault: four objects, two runs with a crash between them, and reports."""

    def __init__(self):
        self.copy = list(ROWS)
        self.looks = [cover(*BORDERS[:n]) for n in range(1, len(BORDERS))]
        self.names = cover(*BORDERS)
        self.reports = [("one", 4, 100, 0, 4), ("one", 11, 200, 0, 11), ("two", 11, 400, 300, 11)]
        self.reports += [("two", 16, 500, 300, 16), ("two", 20, 600, 300, 20)]
        self.reread = list(ROWS)
        self.stuck = ""
        self.wrong_pair = ""

    def at(self, offset):
        return next(n for n, row in enumerate(self.copy) if row.offset == offset)

    def change(self, offset, **fields):
        at = self.at(offset)
        self.copy[at] = self.copy[at]._replace(**fields)
        self.reread = list(self.copy)

    def judge(self):
        history = History()
        for look in self.looks:
            history.listed(look)
        history.read(self.reread)
        for run, position, at_ms, began_ms, durable in self.reports:
            history.reported(run, position, at_ms=at_ms, began_ms=began_ms, durable=durable)
        if self.stuck:
            history.stuck(self.stuck)
        if self.wrong_pair:
            history.mistranslated(self.wrong_pair)
        return history.judge(TRUTH, self.copy, names=self.names)


def _drop_one(seen):
    del seen.copy[seen.at(5)]


def _drop_the_last(seen):
    del seen.copy[-1]


def _swap_two(seen):
    seen.copy[2], seen.copy[3] = seen.copy[3], seen.copy[2]


def _replay_a_batch(seen):
    seen.copy[6:6] = seen.copy[2:6]


def _wrong_to(seen):
    seen.names[1] = cover(4, 12)[0]


def _commit_before_put(seen):
    seen.reports[3] = ("two", 20, 500, 300, 16)


def _flip_in_key(seen):
    seen.change(2, key=b"kex")


def _flip_in_value(seen):
    seen.change(2, value=b"3")


def _flip_in_header(seen):
    seen.change(2, headers=((b"a", b"0"), (b"b", None)))


def _swap_headers(seen):
    seen.change(2, headers=((b"b", None), (b"a", b"1")))


def _null_for_empty(seen):
    seen.change(1, key=None)


def _empty_for_null(seen):
    seen.change(3, key=b"")


def _shift_a_timestamp(seen):
    seen.change(4, timestamp_ms=1_005)


def _change_timestamp_type(seen):
    seen.change(4, timestamp_type=1)


def _copy_an_aborted_record(seen):
    seen.copy.insert(8, ABORTED[8])
    seen.reread = list(seen.copy)


def _skip_a_control_record(seen):
    seen.names[1:3] = cover(4, 10) + cover(11, 16)


def _lose_an_object(seen):
    del seen.names[1]


def _overlap_two_objects(seen):
    seen.names += cover(4, 11, 13)[1:]


def _leave_a_foreign_object(seen):
    seen.names.append("notes.txt")


def _bring_an_old_object_back(seen):
    seen.looks[3:3] = [cover(0, 4)]


def _report_ahead(seen):
    seen.reports.append(("two", 21, 700, 300, 20))


def _step_back(seen):
    seen.reports.append(("two", 16, 700, 300, 20))


def _forget_over_a_restart(seen):
    seen.reports[2] = ("two", 4, 400, 300, 11)


def _join_another_generation(seen):
    seen.copy[-1] = LATER[18]
    seen.reread = list(seen.copy)


def _change_over_time(seen):
    seen.reread[5] = seen.reread[5]._replace(value=b"before")


def _invent(seen):
    seen.copy.append(Row(25, 1, 0, b"k", b"v"))


def _make_no_progress(seen):
    seen.stuck = "no progress for 60 s"


def _sync_two_different_records(seen):
    seen.wrong_pair = "7 maps to 9, which holds the record of offset 8"


PLANTED = {
    "drop one record": (_drop_one, {"A1": 1}),
    "drop the last": (_drop_the_last, {"A2": 1}),
    "swap two": (_swap_two, {"A12": 1}),
    "replay a batch": (_replay_a_batch, {"A3": 4}),
    "a name that covers more than the object has": (_wrong_to, {"A15": 1}),
    "commit before PUT": (_commit_before_put, {"A16": 1}),
    "byte flipped in a key": (_flip_in_key, {"A13": 1}),
    "byte flipped in a value": (_flip_in_value, {"A13": 1}),
    "byte flipped in a header": (_flip_in_header, {"A13": 1}),
    "headers in another order": (_swap_headers, {"A13": 1}),
    "null for empty": (_null_for_empty, {"A13": 1}),
    "empty for null": (_empty_for_null, {"A13": 1}),
    "timestamp off by one": (_shift_a_timestamp, {"A13": 1}),
    "timestamp type changed": (_change_timestamp_type, {"A13": 1}),
    "aborted record copied": (_copy_an_aborted_record, {"A5": 1}),
    "control record not accounted for": (_skip_a_control_record, {"A15": 1}),
    "gap in the names": (_lose_an_object, {"A15": 1}),
    "two objects overlap": (_overlap_two_objects, {"A15": 1}),
    "foreign object": (_leave_a_foreign_object, {"A15": 1}),
    "an old object comes back": (_bring_an_old_object_back, {"A20": 1}),
    "position ahead of what is durable": (_report_ahead, {"A16": 1}),
    "position decreases": (_step_back, {"A19": 1}),
    "position decreases over a restart": (_forget_over_a_restart, {"A19": 1}),
    "two generations of a topic joined": (_join_another_generation, {"A2": 1, "A21": 1}),
    "another content at another time": (_change_over_time, {"A4": 1}),
    "invented record": (_invent, {"A14": 1}),
    "an offset sync of two different records": (_sync_two_different_records, {"A17": 1}),
    "no progress after the faults": (_make_no_progress, {"A22": 1}),
}


def test_a_history_without_a_fault_has_no_anomaly():
    assert Observed().judge() == []
    lacking = Observed()
    del lacking.copy[lacking.at(16)]  # compacted at the source meanwhile
    assert lacking.judge() == []


@pytest.mark.parametrize(("plant", "found"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found_under_its_code(plant, found):
    seen = Observed()
    plant(seen)
    anomalies = seen.judge()
    assert {anomaly.code: anomaly.count for anomaly in anomalies} == found
    assert all(anomaly.example for anomaly in anomalies)
