"""docs/expectations.md has a row for each of the 28 features; `yes` names tests that show it.

Method: pytest collects the files that the page names. Every test that is named must be collected;
every file and link must exist.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kit.judges.collected import GROUP, functions

pytestmark = GROUP

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "expectations.md"
COUNT: Final = 28
_ROW: Final = re.compile(r"^\| (\d+) \| (.+?) \| (\w+) \| (.*?) \| (.*?) \|$", re.MULTILINE)
_TEST: Final = re.compile(r"`(tests/[\w/]+\.py::test_\w+)`")


def test_every_feature_has_a_verdict_and_what_covers_it() -> None:
    rows = _ROW.findall(PAGE.read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, COUNT + 1))
    for number, _, verdict, covers, lacks in rows:
        assert verdict in {"yes", "partly", "no"}, number
        assert covers != "-" or verdict == "no", number
        assert lacks != "-" or verdict == "yes", number
        assert _TEST.search(covers) or verdict != "yes", number


def test_every_named_test_is_collected() -> None:
    named = _TEST.findall(PAGE.read_text())
    assert len(named) > 20
    assert set(named) - functions().keys() == set()


def test_every_named_file_exists() -> None:
    text = PAGE.read_text()
    places = [PAGE.parent / link for link in re.findall(r"\]\(([^)#]+)\)", text)]
    places += [ROOT / place for place in re.findall(r"`((?:tests|schemas)/[^`:]*)", text)]
    assert len(places) > 30
    assert [place for place in places if not place.exists()] == []
