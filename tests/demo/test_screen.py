"""The demo's output on a terminal. Method: a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from typing import Final

ON_SCREEN: Final = """
from logmirror.demo.screen import Screen
screen = Screen()
with screen.step("copying", total=100) as step:
    step.show(50)
    step._progress.refresh()
    step.done("Copied.")
"""
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*(3[0-9]|9[0-9])[0-9;]*m")


def on_terminal(**environment: str) -> str:
    controller, terminal = pty.openpty()
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    subprocess.run(
        [sys.executable, "-c", ON_SCREEN],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        timeout=60,
        env={**variables, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
        check=True,
    )
    output = os.read(controller, 1 << 16).decode()
    os.close(terminal)
    os.close(controller)
    return output


def test_a_terminal_shows_a_progress_bar_and_no_color_is_obeyed() -> None:
    coloured, plain = on_terminal(), on_terminal(NO_COLOR="1")

    for output in (coloured, plain):
        assert "50 of 100" in output
        assert "Copied." in output.splitlines()[-1]
    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)
