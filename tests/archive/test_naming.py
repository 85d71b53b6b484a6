"""A name gives the offsets that an object covers; no other name is accepted.

Method: properties over valid names and names one edit away from valid; names that such a search has
found are pinned in `OTHER_NAMES`.
"""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logmirror.archive.naming import (
    NATIVE,
    NDJSON,
    PARQUET,
    format_name,
    parse_name,
    partition_folder,
    split_name,
)
from logmirror.model import OFFSET_MAX, OffsetRange


def test_a_name_is_two_padded_offsets_and_a_format():
    name = format_name(OffsetRange(first=100, last=199), PARQUET)
    assert name == "00000000000000000100-00000000000000000199.parquet"
    assert partition_folder("orders", 7) == "orders/7"


@given(
    st.integers(0, OFFSET_MAX),
    st.integers(0, OFFSET_MAX),
    st.sampled_from([NATIVE, NDJSON, PARQUET, "ndjson.zst"]),
)
@pytest.mark.mirror_v3("NAM-01")
def test_names_round_trip(a, b, extension):
    covered = OffsetRange(first=min(a, b), last=max(a, b))
    assert parse_name(format_name(covered, extension)) == (covered, extension)


@given(st.integers(0, OFFSET_MAX), st.integers(0, OFFSET_MAX))
@pytest.mark.mirror_v3("NAM-04")
def test_the_order_of_names_is_the_order_of_offsets(a, b):
    names = [format_name(OffsetRange(first=x, last=OFFSET_MAX), PARQUET) for x in (a, b)]
    assert (names[0] < names[1]) == (a < b)


@st.composite
def near_misses(draw):
    """One edit away from a valid name: random text never gets near enough to fool a parser."""
    first = draw(st.integers(0, 2**40))
    name = format_name(OffsetRange(first=first, last=first), NDJSON)
    at = draw(st.integers(0, len(name)))
    keep = draw(st.sampled_from([at, at + 1]))  # insert, or replace (with "" it deletes)
    return name[:at] + draw(st.sampled_from(["", *"09-./aZ\n\u0663"])) + name[keep:]


@given(st.text(max_size=60) | near_misses())
@example(f"{5:020d}-{5:020d}.ndjson\n")
def test_what_we_parse_is_what_we_would_write(name):
    parsed = parse_name(name)
    assert parsed is None or format_name(*parsed) == name
    assert (parsed is None) == (split_name(name) is None)


OTHER_NAMES = {
    "not a name": "x",
    "empty": "",
    "temporary": ".tmp",
    "short first": f"5-{5:020d}.ndjson",
    "short last": f"{5:020d}-5.ndjson",
    "long first": f"{5:021d}-{5:020d}.ndjson",
    "backwards": f"{5:020d}-{4:020d}.ndjson",
    "beyond int64": f"{2**63:020d}-{2**63:020d}.ndjson",
    "trailing": f"{0:020d}-{0:020d}.ndjson~",
    "trailing line feed": f"{0:020d}-{0:020d}.ndjson\n",
    "upper case": f"{0:020d}-{0:020d}.NDJSON",
    "no extension": f"{0:020d}-{0:020d}",
    "empty extension": f"{0:020d}-{0:020d}.",
    "foreign digits": f"{0:020d}-{0:020d}.ndjson".replace("0", "\u0660"),
    "with folder": f"0/{0:020d}-{0:020d}.ndjson",
}


@pytest.mark.parametrize("name", OTHER_NAMES.values(), ids=OTHER_NAMES)
@pytest.mark.mirror_v3("NAM-02")
def test_other_names_are_not_object_names(name):
    assert parse_name(name) is None
    assert split_name(name) is None
