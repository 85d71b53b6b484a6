"""What `logmirror groups` shows while it works: a bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import io
import sys

import pytest

from logmirror.cli.group_progress import showing_groups


class Terminal(io.StringIO):
    """A stderr that says whether it is a terminal."""

    def __init__(self, is_terminal: bool) -> None:  # as `isatty` returns it
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def shown(monkeypatch, is_terminal):
    stderr = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    with showing_groups() as on_progress:
        on_progress(250, 1000)
        on_progress(500, 1000)
    return stderr.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_counts_are_shown_on_a_terminal_only(monkeypatch, is_terminal):
    monkeypatch.setenv("TERM", "xterm")

    text = shown(monkeypatch, is_terminal)

    assert ("500/1000" in text and "/s" in text) == is_terminal
    assert bool(text) == is_terminal


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[3" not in shown(monkeypatch, is_terminal=True)  # no colour, 30 to 38
