"""`--help` and `--version`: every command explains itself, with examples that are real.

Method: each command's help is rendered as for a terminal of 80 columns. The examples are read out
of it and given to the parser that the command itself uses, which knows options and their values.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Final

import pytest
import typer
from typer.testing import CliRunner

from logmirror.cli import commands

ROOT: Final = Path(__file__).resolve().parents[2]
COLUMNS: Final = 80
PROGRAM: Final = typer.main.get_command(commands.build())
REFUSED: Final = typer.BadParameter.__base__
"""What the parser raises for any line that it does not understand."""


def leaves(command, *names):
    """Each command that does something, by the words that lead to it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return {names: command}
    found = {
        path: leaf for name in inner for path, leaf in leaves(inner[name], *names, name).items()
    }
    return found | {names: command} if command.invoke_without_command else found


COMMANDS: Final = leaves(PROGRAM)


def help_of(names) -> list[str]:
    result = CliRunner().invoke(
        commands.build(), [*names, "--help"], prog_name="logmirror", env={"COLUMNS": str(COLUMNS)}
    )
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def examples_of(names) -> list[str]:
    lines = [line.strip() for line in help_of(names)]
    return [line for line in lines[lines.index("Examples:") + 1 :] if line]


def parse(line: str) -> tuple[str, ...]:
    """Parse a command line as the program would, without running it; returns which command."""
    line = re.sub(r"^source <\((.*)\)$", r"\1", line).partition(" > ")[0]
    program, *words = shlex.split(line)
    assert program == "logmirror"
    names = next(path for path in COMMANDS if tuple(words[: len(path)]) == path)
    COMMANDS[names].make_context("logmirror", words[len(names) :])
    return names


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_each_command_shows_examples_that_its_own_parser_takes(names):
    examples = examples_of(names)

    assert len(examples) >= 2
    assert [parse(example) for example in examples] == [names] * len(examples)


def test_a_line_that_the_parser_does_not_take_is_found():
    with pytest.raises(REFUSED):
        parse("logmirror verify -c mirror.yaml --deeply")
    with pytest.raises(REFUSED):
        parse("logmirror verify --deep")
    with pytest.raises(REFUSED):
        parse("logmirror status -c mirror.yaml --format yaml")
    with pytest.raises(StopIteration):
        parse("logmirror prove -c mirror.yaml")


@pytest.mark.parametrize("names", [(), ("policy",), *COMMANDS], ids=" ".join)
def test_help_fits_into_80_columns(names):
    assert [line for line in help_of(names) if len(line) > COLUMNS] == []
    # Nothing is cut off, but for what the usage line says.
    assert [line for line in help_of(names)[1:] if line.endswith("...")] == []


def test_the_version_is_the_project_s():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    result = CliRunner().invoke(commands.build(), ["--version"])

    assert result.exit_code == 0
    assert result.output == f"logmirror {project['version']}\n"
