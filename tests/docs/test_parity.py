"""docs/mirror-v3-parity.md lists every test of mirror-v3 once, and names tests that show its rows.

Method: pytest collects the files that the page names. A row stands if each of its tests is
collected, and if together they carry all of its IDs: by a `mirror_v3` marker, or in the name, the
docstring or the parameters. That an ID occurs somewhere in a file proves nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kit.judges.collected import GROUP, functions

pytestmark = GROUP

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "mirror-v3-parity.md"

LIST: Final = {
    "CFG": 40,
    "ENA": 8,
    "ENV": 19,
    "DAY": 4,
    "KNB": 2,
    "NCF": 21,
    "RUN": 16,
    "NOT": 8,
    "OBS": 5,
    "ACK": 6,
    "TEE": 14,
    "SUP": 4,
    "CAC": 26,
    "ENC": 12,
    "CRY": 4,
    "KEY": 3,
    "NAM": 5,
    "FS": 23,
    "FSM": 18,
    "FSL": 5,
    "S3": 21,
    "KAF": 5,
    "CLI": 4,
    "E2E": 31,
}
"""How many tests of each kind there are; their numbers begin at 1."""

SHOWN: Final = {"same", "differs", "partly"}
"""Verdicts that need a test. `not offered` may name the test that shows the refusal."""

_ROW: Final = re.compile(
    r"^\| ([A-Z0-9]+-\d\d(?:\.\.\d\d)?) \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE
)
_TEST: Final = re.compile(r"tests/[\w/]+\.py::test_\w+")


class Row(NamedTuple):
    """A row of the page's tables."""

    ids: list[str]
    verdict: str
    tests: list[str]
    remark: str


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """All rows of the page."""
    found = [
        Row(_ids(ids), verdict, re.findall(r"`([^`]+)`", tests), remark)
        for ids, _, verdict, tests, remark in _ROW.findall(PAGE.read_text())
    ]
    assert len(found) > 100
    return found


def _ids(text: str) -> list[str]:
    kind, _, numbers = text.rpartition("-")
    first, _, last = numbers.partition("..")
    return [f"{kind}-{n:02d}" for n in range(int(first), int(last or first) + 1)]


@pytest.fixture(scope="module")
def carried() -> dict[str, set[str]]:
    """The IDs that each collected test carries."""
    return functions()


def test_every_test_of_the_list_is_on_the_page_once(rows: list[Row]) -> None:
    listed = [f"{kind}-{n:02d}" for kind, count in LIST.items() for n in range(1, count + 1)]
    assert sorted(found for row in rows for found in row.ids) == sorted(listed)


def test_every_verdict_has_a_test_or_a_reason(rows: list[Row]) -> None:
    for row in rows:
        assert row.verdict in {*SHOWN, "not offered"}, row
        assert row.tests or row.verdict not in SHOWN, row
        assert row.remark or row.verdict == "same", row


def test_every_named_test_is_collected_and_carries_an_id_of_its_row(
    rows: list[Row], carried: dict[str, set[str]]
) -> None:
    wrong = [
        (row.ids[0], test)
        for row in rows
        for test in row.tests
        if not _TEST.fullmatch(test) or not carried.get(test, set()).intersection(row.ids)
    ]
    assert wrong == []


def test_every_id_is_carried_by_a_test_of_its_row(
    rows: list[Row], carried: dict[str, set[str]]
) -> None:
    missing = [
        one
        for row in rows
        if row.tests
        for one in row.ids
        if not any(one in carried.get(test, ()) for test in row.tests)
    ]
    assert missing == []


def test_an_id_in_a_comment_shows_nothing() -> None:
    here = "tests/docs/test_parity.py"
    found = {one: ids for one, ids in functions().items() if one.startswith(here)}  # RUN-04
    assert f"{here}::test_an_id_in_a_comment_shows_nothing" in found
    assert not any(found.values())
