"""Goal: a move is only ever in a state that may follow the one before, and no error lasts for ever.

Method: every pair of states, against a table that is written here by hand; errors at given times.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logmirror.broker.moves.move import Move, MoveState, Trouble
from logmirror.errors import InternalError, UnavailableError

WAYS: dict[str, list[str]] = {
    "copying": [],
    "following": ["following"],
    "moved": ["following", "moved"],
    "failed": ["failed"],
    "cancelled": ["cancelled"],
}
"""How a move gets into each state."""

#                copying  following  moved  failed  cancelled
ALLOWED = """
    copying       yes      yes        no     yes     yes
    following     yes      no         yes    yes     yes
    moved         no       no         no     no      no
    failed        no       no         no     no      yes
    cancelled     no       no         no     yes     no
"""
ROWS = [line.split() for line in ALLOWED.strip().splitlines()]
PAIRS = [
    (row[0], to[0], row[1 + number] == "yes") for row in ROWS for number, to in enumerate(ROWS)
]


def move_in(state: str) -> Move:
    log: Any = SimpleNamespace(segments=[], size_bytes=7, log_end=3)
    move = Move((bytes(16), 0), log, Path("b"), "0", followed_bytes=5)
    for name in WAYS[state]:
        move.enter(MoveState(name))
    assert move.state is MoveState(state)
    return move


def seen(move: Move) -> dict[str, object]:
    return {name: getattr(move, name) for name in Move.__slots__}


def test_the_table_has_every_state():
    assert [row[0] for row in ROWS] == [state.value for state in MoveState]
    assert {len(row) for row in ROWS} == {1 + len(MoveState)}


@pytest.mark.parametrize(("now", "to", "is_allowed"), PAIRS)
def test_a_state_follows_only_those_in_the_table(now, to, is_allowed):
    move = move_in(now)
    before, failure = seen(move), UnavailableError("away") if to == "failed" else None
    if is_allowed:
        move.enter(MoveState(to), failure)
        assert move.state is MoveState(to)
        assert move.failure is failure
        assert move.failed_bytes == (5 if (now, to) == ("following", "failed") else 0)
    else:
        with pytest.raises(InternalError, match=r"a move cannot enter this state") as caught:
            move.enter(MoveState(to), failure)
        assert caught.value.facts == {"state": now, "wanted": to}
        assert seen(move) == before


def test_nothing_else_sets_the_state():
    move = move_in("copying")
    with pytest.raises(AttributeError):
        move.state = MoveState.MOVED  # type: ignore[misc]  # that is the test


LIMIT_MS = 600


@pytest.mark.parametrize(
    ("errors", "since_ms"),
    [
        ([(0, 0)], 0),
        ([(0, 0), (300, 0), (590, 0)], 0),
        ([(0, 3), (500, 3), (1_000, 3), (1_500, 3)], 0),  # as long as they come again and again
        ([(0, 3), (500, 4), (590, 4)], 500),  # a segment was copied in between
        ([(0, 3), (601, 3)], 601),  # none for a long time
    ],
)
def test_errors_that_may_pass_are_counted_from_the_first(
    errors: list[tuple[int, int]], since_ms: int
) -> None:
    trouble = Trouble(errors[0][0], errors[0][0], errors[0][1])
    for now_ms, copied in errors:
        trouble = trouble.again(now_ms, copied, LIMIT_MS)
    assert trouble == (since_ms, *errors[-1])
