"""docs/expectations.md has a line for each of the 28 expectations, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "expectations.md"
COUNT: Final = 28
_ROW: Final = re.compile(r"^\| (\d+) \| (.+?) \| (\w+) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def test_every_expectation_has_a_verdict_and_what_stands_behind_it() -> None:
    rows = _ROW.findall(PAGE.read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, COUNT + 1))
    for number, _, verdict, covers, lacks in rows:
        assert verdict in {"yes", "partly", "no"}, number
        assert covers != "-" or verdict == "no", number
        assert lacks != "-" or verdict == "yes", number


def test_what_the_page_names_is_there() -> None:
    text = PAGE.read_text()
    places = [PAGE.parent / link for link in re.findall(r"\]\(([^)#]+)\)", text)]
    places += [ROOT / place for place in re.findall(r"`((?:tests|schemas)/[^`]*)`", text)]
    assert len(places) > 30
    assert [place for place in places if not place.exists()] == []
