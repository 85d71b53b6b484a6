"""The command line end to end: what is printed where, and the exit code (CLI-01 to CLI-04).

Method: the program's own `main`, in this process, with arguments as a shell would give them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Final

import pytest

from kit.runs.commands import mirror, write_config
from kit.runs.configs import with_files
from kit.servers.machine import HOST, free_ports
from logmirror.app import status as app_status
from logmirror.cli import commands, main

EXAMPLES: Final = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


@pytest.fixture
def logmirror(monkeypatch, capsys):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)  # which `main` else leaves behind

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["logmirror", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def away(monkeypatch, tmp_path) -> Path:
    """A mirror whose cluster does not respond."""
    monkeypatch.setattr(app_status, "COMMAND_BUDGET_MS", 200)
    return write_config(
        tmp_path / "mirror.yaml",
        mirror("orders", f"{HOST}:{free_ports(1)[0]}", tmp_path / "archive", name="orders"),
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_cli_01_validate_accepts_each_example(logmirror, example, tmp_path):
    code, out, errors = logmirror("validate", "-c", with_files(example, tmp_path))

    assert (code, errors) == (0, "")
    assert out.startswith("OK: ")


def test_cli_02_validate_refuses_an_invalid_file(logmirror, tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("mirrors:\n  - name: orders\n    topix: orders\n", encoding="utf-8")

    code, out, errors = logmirror("validate", "-c", bad)

    assert (code, out) == (2, "")
    first, *problems = errors.splitlines()
    assert first.endswith(f"problems: {bad}")
    assert any("3:5: mirrors[0].topix: " in problem for problem in problems)


@pytest.mark.jvm
def test_cli_03_status_of_a_cluster_that_is_away_is_a_row_and_a_failure(logmirror, away):
    code, out, errors = logmirror("status", "-c", away)

    assert (code, errors) == (1, "")
    assert out.splitlines()[1].split() == [*["orders"] * 3, "all", "-", "-", "-", "unavailable"]
    assert "no broker could be reached" in out
    assert "see docs/errors.md#unavailable" in out


@pytest.mark.jvm
def test_cli_04_status_as_json_is_json_also_of_a_cluster_that_is_away(logmirror, away):
    code, out, errors = logmirror("status", "-c", away, "--format", "json")
    (row,) = json.loads(out)

    assert (code, errors) == (1, "")
    assert (row["mirror"], row["position"], row["lag"]) == ("orders", None, None)
    assert row["error"]["kind"] == "unavailable"


@pytest.mark.jvm
def test_an_error_ends_the_program_with_the_code_of_its_kind(logmirror, away):
    code, out, errors = logmirror("status", "-c", away, "--mirror", "ordres")

    assert (code, out) == (2, "")
    assert errors.splitlines()[0] == "error (usage): no such mirror in the configuration"
    assert errors.splitlines()[-1] == "  see docs/errors.md#usage"


def test_ctrl_c_ends_a_command_without_a_traceback(logmirror, monkeypatch):
    def interrupted(_words):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "run_plain", interrupted)
    assert logmirror("broker", "--log-dir", "d") == (130, "", "")
