"""How moves are shown: bars on a terminal, lines in a pipe, JSON; and how a wait is interrupted."""

from __future__ import annotations

import io
import json
import sys

import pytest
import typer

from logmirror.cli import moves as commands
from logmirror.cli.moves_view import (
    following,
    move_json,
    move_line,
    moves_table,
    size_text,
    time_text,
)
from logmirror.cli.output import stdout
from logmirror.errors import UsageError
from logmirror.move_reports import MovedReplica, MoveSample, MoveStatus

ONE = MovedReplica("orders", 3, 1)


def move(copied=3 << 20, total=4 << 20, rate: float | None = 1 << 20, lag=120, broker=1):
    return MoveStatus(
        replica=ONE._replace(broker=broker),
        source="/disk-1",
        target="/disk-2",
        copied_bytes=copied,
        total_bytes=total,
        offset_lag=lag,
        bytes_per_second=rate,
    )


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:  # as `isatty` returns it
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def screen_of(monkeypatch, *, is_terminal: bool) -> Screen:
    found = Screen(is_terminal)
    monkeypatch.setattr(sys, "stdout", found)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    return found


def test_sizes_and_times_are_for_people():
    texts = [size_text(size) for size in (0, 1023, 1024, 12_939_428, 5 << 30, 3 << 50)]
    assert texts == ["0 B", "1023 B", "1.0 KiB", "12.3 MiB", "5.0 GiB", "3072.0 TiB"]
    texts = [time_text(seconds) for seconds in (None, 0.0, 59.4, 200, 7_500)]
    assert texts == ["-", "0 s", "59 s", "3 min 20 s", "2 h 5 min"]


def test_a_line_has_everything():
    assert move_line(move()) == (
        "orders-3: /disk-1 -> /disk-2: 3.0 MiB of 4.0 MiB, 75 %, 1.0 MiB/s, 1 s left, "
        "120 offsets behind"
    )
    assert ", 0 %, -, - left," in move_line(move(copied=0, rate=None))
    assert ", 100 %, 0 B/s, 0 s left," in move_line(move(copied=5 << 20, rate=0))


def test_json_has_everything():
    assert move_json(move()) == {
        "topic": "orders",
        "partition": 3,
        "broker": 1,
        "from": "/disk-1",
        "to": "/disk-2",
        "copied_bytes": 3 << 20,
        "total_bytes": 4 << 20,
        "bytes_per_second": 1 << 20,
        "eta_seconds": 1.0,
        "offset_lag": 120,
    }
    assert move_json(move(rate=None))["eta_seconds"] is None


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_table_has_bars_on_a_terminal_only(monkeypatch, is_terminal):
    screen = screen_of(monkeypatch, is_terminal=is_terminal)
    out = stdout()
    out.print(moves_table([move(), move(broker=2)], has_bars=out.is_terminal))
    text = screen.getvalue()
    assert ("[###############-----]" in text) == is_terminal
    assert ("75" in text, "BROKER" in text) == (True, True)


def test_a_pipe_gets_a_line_from_time_to_time_and_one_at_the_end(monkeypatch):
    screen = screen_of(monkeypatch, is_terminal=False)
    with following("table") as show:
        for _ in range(11):
            show(MoveSample(moves=(move(),)))
        show(MoveSample(moves=(), ended=((ONE, "/disk-2"),)))
    assert screen.getvalue().splitlines() == [
        move_line(move()),
        move_line(move()),
        "orders-3: moves no longer; it is in /disk-2",
    ]


def test_a_terminal_shows_one_table_that_is_updated(monkeypatch):
    screen = screen_of(monkeypatch, is_terminal=True)
    with following("table") as show:
        show(MoveSample(moves=(move(copied=1 << 20),)))
        show(MoveSample(moves=(), ended=((ONE, ""),)))
    text = screen.getvalue()
    assert "[#####---------------]" in text
    assert "orders-3: moves no longer; it is in no log directory" in text


def test_json_is_a_line_for_each_sample(monkeypatch):
    screen = screen_of(monkeypatch, is_terminal=True)
    with following("json") as show:
        show(MoveSample(moves=(move(),)))
        show(MoveSample(moves=()))
    assert [len(json.loads(line)) for line in screen.getvalue().splitlines()] == [1, 0]


class Watched:
    """As `Moves`, until Ctrl-C."""

    def watch(self, wanted, *, timeout_s):
        yield MoveSample(moves=(move(),))
        raise KeyboardInterrupt


def test_an_interrupted_wait_says_that_the_moves_continue(monkeypatch, capsys):
    screen_of(monkeypatch, is_terminal=False)
    with pytest.raises(typer.Exit) as ended:
        commands._follow(Watched(), None, 60, "table")  # noqa: SLF001  # the part that waits
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "stopped; the moves continue\n"


def test_the_file_of_properties(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "open_moves", lambda bootstrap, found: (bootstrap, found))
    file = tmp_path / "client.conf"
    file.write_text("# of alice\n\nsasl.username = alice\nsasl.password=a=b\n")
    found = commands._open("k:9092", file)  # noqa: SLF001  # what all of them do
    assert found == ("k:9092", {"sasl.username": "alice", "sasl.password": "a=b"})
    file.write_text("a=b\nsecret\n")
    with pytest.raises(UsageError, match="not NAME=VALUE") as refused:
        commands._open("k:9092", file)  # noqa: SLF001  # the same
    assert refused.value.facts == {"path": str(file), "line": 2}
    with pytest.raises(UsageError, match="cannot read the file"):
        commands._open("k:9092", tmp_path / "none")  # noqa: SLF001  # the same
