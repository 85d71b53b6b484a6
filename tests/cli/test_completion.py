"""Completion: what bash, zsh and fish offer after `logmirror` and Tab.

Method: the shells themselves, each with the script that `logmirror completion` prints. bash runs
the script's function as it does at a Tab; fish prints what it would offer; zsh has no such command,
so it gets keys through a terminal.
"""

from __future__ import annotations

import os
import pty
import select
import shlex
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kit.servers.machine import program
from logmirror.cli import commands

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to type in: `logmirror` lies in its `bin`, configurations in it and in `more`."""
    command = tmp_path / "bin" / "logmirror"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m logmirror "$@"\n')
    command.chmod(0o755)
    (tmp_path / "more").mkdir()
    for name in ("orders.yaml", "other.yml", "notes.txt", "more/bills.yaml"):
        (tmp_path / name).touch()
    for shell in ("bash", "zsh", "fish"):
        result = CliRunner().invoke(commands.build(), ["completion", shell])
        (tmp_path / f"script.{shell}").write_text(result.output, encoding="utf-8")
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(folder), "TERM": "dumb"}


def run(folder: Path, *command: str) -> list[str]:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_bash_offers_what_may_follow(folder):
    def offered(*words: str) -> set[str]:
        typed = " ".join(shlex.quote(word) for word in ("logmirror", *words))
        script = f"""
            source script.bash
            COMP_WORDS=({typed}) COMP_CWORD={len(words)}
            "$(complete -p logmirror | sed 's/.* -F \\([^ ]*\\) .*/\\1/')" logmirror
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        return set(run(folder, program("bash"), "--norc", "-c", script)) - {""}

    assert {"validate", "run", "status", "verify", "policy", "completion"} <= offered("")
    assert offered("verify", "--de") == {"--deep"}
    assert offered("status", "--format", "") == {"table", "json"}
    assert offered("policy", "print", "-c", "") == {"orders.yaml", "other.yml"}
    assert offered("run", "--config", "more/") == {"more/bills.yaml"}
    assert offered("run", "-c", "mo") == set()  # bash completes more/ by itself


def test_fish_offers_what_may_follow(folder):
    def offered(line: str) -> set[str]:
        script = f"source script.fish; complete -C {shlex.quote(line)}"
        found = run(folder, program("fish"), "--no-config", "-c", script)
        return {candidate.partition("\t")[0] for candidate in found}

    assert {"validate", "run", "status", "verify", "policy"} <= offered("logmirror ")
    assert offered("logmirror run -c ") == {"orders.yaml", "other.yml"}


def test_zsh_completes_what_is_typed(folder):
    terminal, inside = pty.openpty()
    shell = subprocess.Popen(
        [program("zsh"), "-f", "-i"],
        cwd=folder,
        env=environment(folder),
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)

    def typed(keys: str, *, until: str) -> None:
        os.write(terminal, keys.encode())
        seen, deadline = "", time.monotonic() + 60
        while until not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 65536).decode(errors="replace")

    try:
        typed(
            "autoload -U compinit; compinit -u -D; source script.zsh; echo re''ady\n",
            until="ready",
        )
        # Ctrl-A goes to the line's beginning, where `echo` makes the result a line of output.
        typed("logmirror verify --dee\t\x01echo GO''T \n", until="GOT logmirror verify --deep")
        typed("logmirror run -c ord\t\x01echo GO''T \n", until="GOT logmirror run -c orders.yaml")
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
