"""A plain command line means the same with and without typer's parser.

Method: lines are drawn from words that fit, nearly fit and do not fit. Where the plain reader takes
a line, typer's parser must call the command with the same arguments.
"""

from __future__ import annotations

import functools

import typer
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from logmirror.cli import commands
from logmirror.cli.broker import broker
from logmirror.cli.plain_line import arguments_of

WORDS = st.sampled_from(
    (
        *(
            "--stop-with-stdin",
            "--no-stop-with-stdin",
            "-c",
            "--config",
            "-cx",
            "-c=x",
            "--topic",
            "--topic=a:1",
            "-x",
        ),
        *("--log-dir", "--log-dir=data", "data", "--listen", "--listen=", "127.0.0.1:0"),
        *("--auto-create", "--no-auto-create", "--no-auto-create=1", "--partitions", "0", "3"),
        *("--partitions=007", "--log-level", "--log-level=error", "debug", "loud"),
        *("--accept-data-loss", "--accept-data-loss=a-0", "b-1", "--", "-h", "--help", "--part"),
    )
)


def typers_arguments(words):
    """The arguments with which typer calls the command; None: it refuses the line."""
    calls = []

    @functools.wraps(broker)
    def called(**arguments):
        calls.append(arguments)

    app = typer.Typer(rich_markup_mode=None)
    app.command()(called)
    CliRunner().invoke(app, words)
    return calls[0] if calls else None


@given(st.lists(WORDS, max_size=5))
@example(["--log-dir", "data", "--listen=[::1]:9092", "--accept-data-loss=a-0", "--no-auto-create"])
def test_a_line_that_the_plain_reader_takes_means_the_same_to_typer(words):
    found = arguments_of(broker, words)

    assert found is None or found == typers_arguments(words)


def test_common_lines_are_plain():
    for line in (
        "--log-dir broker-data",
        "--log-dir broker-data --listen 127.0.0.1:0 --partitions 3",
        "--log-dir=data --no-auto-create --log-level warning --accept-data-loss orders-0",
    ):
        assert arguments_of(broker, line.split()) == typers_arguments(line.split()) is not None


def test_what_is_not_plain_is_left_to_typer():
    for line in (
        "--help",
        "-c",
        "-c=x",
        "--log-dir",
        "--log-dir x --partitions 0",
        "--log-dir x y",
    ):
        assert arguments_of(broker, line.split()) is None
    assert not commands.run_plain([])
    assert not commands.run_plain(["validate", "-c", "mirror.yaml"])
