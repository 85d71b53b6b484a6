"""docs/mirrormaker-parity.md has every case of its list once, and names tests that show its rows.

Method: as for the page about mirror-v3: pytest collects the files that the page names.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kit.judges.collected import GROUP, functions

pytestmark = GROUP

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "mirrormaker-parity.md"

LIST: Final = [
    *(f"A{number}" for number in range(1, 9)),
    *(f"B{number}" for number in range(1, 5)),
    *(f"MM-{number:02d}" for number in (*range(1, 31), 36, *range(46, 61))),
]
SHOWN: Final = {"same", "better", "partly"}
"""Verdicts that need a test."""

_ROW: Final = re.compile(
    r"^\| ((?:[AB]|MM-)\d+(?:\.\.\d\d)?) \| (.+?) \| (.+?) \| (.*?) ?\| (.*?) ?\|$", re.MULTILINE
)
_NUMBER: Final = re.compile(r"_([ab]\d)(?=_)")


class Row(NamedTuple):
    """A row of the page's tables."""

    ids: list[str]
    verdict: str
    tests: list[str]
    remark: str


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """All rows of the page."""
    return [
        Row(_ids(ids), verdict, re.findall(r"`([^`]+::[^`]+)`", tests), remark)
        for ids, _, verdict, tests, remark in _ROW.findall(PAGE.read_text("utf-8"))
    ]


def _ids(text: str) -> list[str]:
    if not text.startswith("MM-"):
        return [text]
    first, _, last = text.removeprefix("MM-").partition("..")
    return [f"MM-{number:02d}" for number in range(int(first), int(last or first) + 1)]


def test_every_case_of_the_list_is_on_the_page_once(rows: list[Row]) -> None:
    assert sorted(found for row in rows for found in row.ids) == sorted(LIST)


def test_every_verdict_has_a_test_or_a_reason(rows: list[Row]) -> None:
    for row in rows:
        assert row.verdict in {*SHOWN, "does not apply"}, row
        assert bool(row.tests) == (row.verdict in SHOWN), row
        assert row.remark or row.verdict == "same", row


def test_every_named_test_is_collected_and_every_case_carried(rows: list[Row]) -> None:
    carried = functions()
    for test, ids in carried.items():
        ids |= {one.upper() for one in _NUMBER.findall(test.partition("::")[2])}
    for row in rows:
        for test in row.tests:
            assert carried.get(test, set()).intersection(row.ids), (row.ids, test)
        for one in row.ids:
            assert not row.tests or any(one in carried[test] for test in row.tests), one
