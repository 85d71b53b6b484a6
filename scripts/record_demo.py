#!/usr/bin/env python3
"""Record `logmirror demo` in a pseudo-terminal, and write the session as docs/assets/demo.svg.

    python scripts/record_demo.py

Every line is real output at its real time, except that the playback is faster: its first line says
by how much. The picture is animated with CSS. It shows the last screen where animation is off. The
demo's closing suggestions are left out, because they name files of this machine.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

FILE: Final = Path(__file__).resolve().parent.parent / "docs" / "assets" / "demo.svg"
COMMAND: Final = ("logmirror", "demo")
SUGGESTIONS: Final = "Try next"
"""The first line that is not shown."""
COLUMNS: Final = 84
ROWS: Final = 80
"""Rows of the terminal; more than the demo prints, so that nothing scrolls."""
PLAYED_S: Final = 24.0
"""Seconds that the playback takes."""
HELD_S: Final = 12.0
"""Seconds that the last screen stays, before the playback starts again."""
STEP_S: Final = 0.4
"""Seconds of the playback between two samples of the screen."""

CELL_WIDTH: Final = 8.4
LINE_HEIGHT: Final = 19
MARGIN: Final = 18
TITLE_HEIGHT: Final = 34
_COLOURS: Final = {
    "30": "#484f58",
    "31": "#ff7b72",
    "32": "#56d364",
    "33": "#e3b341",
    "34": "#79c0ff",
    "35": "#d2a8ff",
    "36": "#56d4dd",
    "37": "#c9d1d9",
    "90": "#6e7681",
    "91": "#ffa198",
    "92": "#7ee787",
}
_SEQUENCE: Final = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Style(NamedTuple):
    """How characters are drawn."""

    colour: str = ""
    bold: bool = False
    dim: bool = False

    def changed(self, codes: str) -> Style:
        """Return the style after a sequence `ESC [ codes m`."""
        style = self
        for code in codes.split(";"):
            if code in {"", "0"}:
                style = Style()
            elif code == "1":
                style = style._replace(bold=True)
            elif code == "2":
                style = style._replace(dim=True)
            elif code == "22":
                style = style._replace(bold=False, dim=False)
            elif code == "39":
                style = style._replace(colour="")
            elif code in _COLOURS:
                style = style._replace(colour=_COLOURS[code])
            else:
                raise ValueError(f"no rule for SGR code {code}")
        return style


Row = tuple[tuple[str, Style], ...]
"""Runs of text that share a style."""


class Terminal:
    """The part of a terminal that the demo uses: lines, cursor up, erase line, colours."""

    def __init__(self) -> None:
        self._rows: list[list[tuple[str, Style]]] = [[]]
        self._row = self._column = 0
        self._style = Style()
        self._rest = ""

    def feed(self, text: str) -> None:
        """Carry out what a program wrote; an incomplete sequence waits for the next call."""
        text = self._rest + text
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                sequence = _SEQUENCE.match(text, at)
                if sequence is None:
                    break
                self._control(sequence[1], sequence[2])
                at = sequence.end()
            else:
                self._put(text[at])
                at += 1
        self._rest = text[at:]

    def rows(self) -> list[Row]:
        """Return the screen, without spaces at line ends."""
        return [_runs(row) for row in self._rows]

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row += 1
            if self._row == len(self._rows):
                self._rows.append([])
        else:
            row = self._rows[self._row]
            row.extend([(" ", Style())] * (self._column + 1 - len(row)))
            row[self._column] = (character, self._style)
            self._column += 1

    def _control(self, codes: str, kind: str) -> None:
        if kind == "m":
            self._style = self._style.changed(codes)
        elif kind == "A":
            self._row = max(0, self._row - int(codes or 1))
        elif kind == "K" and codes == "2":
            self._rows[self._row] = []
        elif kind not in {"h", "l"}:  # the cursor shows or not
            raise ValueError(f"no rule for ESC [ {codes} {kind}")


def _runs(cells: list[tuple[str, Style]]) -> Row:
    runs: list[tuple[str, Style]] = []
    for character, style in cells:
        if runs and (runs[-1][1] == style or character == " "):
            runs[-1] = (runs[-1][0] + character, runs[-1][1])
        else:
            runs.append((character, style))
    if runs:
        runs[-1] = (runs[-1][0].rstrip(), runs[-1][1])
    return tuple(run for run in runs if run[0])


def record() -> list[tuple[float, str]]:
    """Run the demo to its end; return what it wrote, in pieces, each with its second."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    process = subprocess.Popen(  # noqa: S603  # a constant
        COMMAND,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=environment | {"TERM": "xterm-16color", "COLORTERM": ""},
    )
    os.close(terminal)
    decoder = codecs.getincrementaldecoder("utf-8")()
    started = time.monotonic()  # noqa: TID251  # real time is what is recorded
    pieces = []
    while True:
        try:
            data = os.read(controller, 65536)
        except OSError:  # Linux, when the last writer has closed
            break
        if not data:
            break
        now = time.monotonic()  # noqa: TID251  # as above
        pieces.append((now - started, decoder.decode(data)))
    if process.wait():
        screen = sample(pieces, speed=1)[-1]
        print("\n".join("".join(text for text, _ in row) for row in screen))  # noqa: T201  # a script
        sys.exit(f"{' '.join(COMMAND)} ended with exit code {process.returncode}")
    return pieces


def sample(pieces: list[tuple[float, str]], speed: float) -> list[list[Row]]:
    """Return the screen after each `STEP_S` of the playback."""
    terminal = Terminal()
    screens: list[list[Row]] = []
    for second, text in pieces:
        while len(screens) * STEP_S < second / speed:
            screens.append(terminal.rows())
        terminal.feed(text)
    return [*screens, terminal.rows()]


def shown(screens: list[list[Row]]) -> list[list[Row]]:
    """Return the screens without `SUGGESTIONS` and what follows."""
    texts = ["".join(text for text, _ in row) for row in screens[-1]]
    if SUGGESTIONS not in texts:
        sys.exit(f"the demo printed no line {SUGGESTIONS!r}")
    rows = texts.index(SUGGESTIONS)
    while not texts[rows - 1]:
        rows -= 1
    return [[*screen[:rows], *[()] * (rows - len(screen))] for screen in screens]


def draw(screens: list[list[Row]], seconds: float) -> str:
    """Return the SVG of a session that took so many seconds."""
    rows = len(screens[0])
    width = round(2 * MARGIN + COLUMNS * CELL_WIDTH)
    height = TITLE_HEIGHT + (rows + 1) * LINE_HEIGHT + 2 * MARGIN
    total = len(screens) * STEP_S + HELD_S
    texts, rules = [_line(0, (("$ " + " ".join(COMMAND), Style(bold=True)),), "")], []
    for number in range(rows):
        changes = _changes([screen[number] for screen in screens])
        for begin, end, row in changes[:-1]:
            if row:
                steps = end - begin
                rules.append(_flash(steps, total))
                style = f' class="t" style="--k:f{steps};--d:{begin * STEP_S:.1f}s"'
                texts.append(_line(number + 1, row, style))
        begin, _, row = changes[-1]
        if row:
            percent = 100 * begin * STEP_S / total
            rules.append(f"@keyframes l{number}{{0%{{opacity:0}}{percent:.2f}%{{opacity:1}}}}")
            texts.append(_line(number + 1, row, f' class="l" style="--k:l{number}"'))
    title = f"{seconds:.0f} s, played at {seconds / PLAYED_S:.1f}x"
    return _PICTURE.format(
        width=width,
        height=height,
        total=f"{total:.1f}",
        rules="\n".join(sorted(set(rules))),
        title=title,
        middle=width / 2,
        texts="\n".join(texts),
    )


def _changes(row: list[Row]) -> list[tuple[int, int, Row]]:
    """Return the contents of one row, each with its first sample and the sample after its last."""
    found: list[tuple[int, int, Row]] = []
    for number, content in enumerate(row):
        if found and found[-1][2] == content:
            found[-1] = (found[-1][0], number + 1, content)
        else:
            found.append((number, number + 1, content))
    return found


def _flash(steps: int, total: float) -> str:
    """Return the animation of text that is visible for some samples."""
    percent = 100 * steps * STEP_S / total
    return f"@keyframes f{steps}{{0%{{opacity:1}}{percent:.2f}%{{opacity:0}}}}"


def _line(number: int, row: Row, attributes: str) -> str:
    length = sum(len(text) for text, _ in row)
    spans = "".join(_span(text, style) for text, style in row)
    y = TITLE_HEIGHT + MARGIN + (number + 0.75) * LINE_HEIGHT
    size = f'x="{MARGIN}" y="{y:.0f}" textLength="{length * CELL_WIDTH:.1f}"'
    return f"<text {size}{attributes}>{spans}</text>"


def _span(text: str, style: Style) -> str:
    attributes = f' fill="{style.colour}"' if style.colour else ""
    attributes += ' font-weight="700"' if style.bold else ""
    attributes += ' fill-opacity=".6"' if style.dim else ""
    return f"<tspan{attributes}>{escape(text)}</tspan>" if attributes else escape(text)


_PICTURE: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" \
height="{height}" role="img" aria-label="A recorded run of logmirror demo">
<style>
text{{font:14px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;fill:#e6edf3;\
white-space:pre}}
.t{{opacity:0}}
@media (prefers-reduced-motion:no-preference){{
.t{{animation:var(--k) {total}s step-end var(--d) infinite}}
.l{{animation:var(--k) {total}s step-end infinite}}
{rules}
}}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>
<circle cx="20" cy="18" r="6" fill="#ff5f57"/><circle cx="40" cy="18" r="6" fill="#febc2e"/>\
<circle cx="60" cy="18" r="6" fill="#28c840"/>
<text x="{middle}" y="23" text-anchor="middle"><tspan fill="#8b949e">{title}</tspan></text>
{texts}
</svg>
"""


def main() -> None:
    """Record, and write the picture."""
    pieces = record()
    seconds = pieces[-1][0]
    screens = shown(sample(pieces, seconds / PLAYED_S))
    FILE.write_text(draw(screens, seconds), encoding="utf-8")
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")  # noqa: T201  # a script


if __name__ == "__main__":
    main()
