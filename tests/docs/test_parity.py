"""docs/mirror-v3-parity.md keeps its word: every test of mirror-v3's list stands on it, once, and
whatever it says is shown by a test names a test that is there and carries the ID.

Method: the page is read as text, tests are searched for the IDs as they are written.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

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

_ROW: Final = re.compile(
    r"^\| ([A-Z0-9]+-\d\d(?:\.\.\d\d)?) \| (.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE
)


class Line(NamedTuple):
    """A line of the page's tables."""

    ids: list[str]
    shown_by: list[str]
    remark: str


def _lines() -> list[Line]:
    found = [
        Line(_ids(ids), re.findall(r"`(tests[^`]*)`", shown_by), remark)
        for ids, _, shown_by, remark in _ROW.findall(PAGE.read_text())
    ]
    assert len(found) > 100
    return found


def _ids(text: str) -> list[str]:
    kind, _, numbers = text.rpartition("-")
    first, _, last = numbers.partition("..")
    return [f"{kind}-{n:02d}" for n in range(int(first), int(last or first) + 1)]


def test_every_test_of_the_list_stands_on_the_page_once() -> None:
    listed = [f"{kind}-{n:02d}" for kind, count in LIST.items() for n in range(1, count + 1)]
    assert sorted(found for line in _lines() for found in line.ids) == sorted(listed)


def test_what_is_not_shown_has_a_reason() -> None:
    assert [line.ids for line in _lines() if not (line.shown_by or line.remark)] == []


def test_what_is_shown_names_a_test_that_carries_the_id() -> None:
    texts = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "tests").rglob("*.py")
        if path != Path(__file__).resolve()
    }
    missing = []
    for line in _lines():
        for place in line.shown_by:
            where, _, name = place.partition("::")
            among = [text for path, text in texts.items() if path.startswith(where)]
            if name and not any(re.search(rf"^def {name}\(", text, re.MULTILINE) for text in among):
                missing.append(place)
            missing += [
                f"{wanted} in {where}"
                for wanted in line.ids
                if not any(re.search(rf"\b{wanted}\b", text) for text in among)
            ]
    assert missing == []
