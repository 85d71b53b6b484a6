"""docs/testing-with-the-broker.md: its examples run as they are on the page.

Method: the examples for pytest become the `conftest.py` and a test file of a suite of their own,
which pytest runs; the others are programs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = (ROOT / "docs" / "testing-with-the-broker.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONFTEST, SUITE, *PROGRAMS = BLOCKS
TIMEOUT_S: Final = 120
FAILING: Final = """
def test_that_fails(kafka_broker):
    assert kafka_broker.pid is None
"""


def run(*arguments, cwd):
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_the_suite_of_the_page_passes_and_a_failing_test_shows_the_log_of_the_broker(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_orders.py").write_text(SUITE)
    (tmp_path / "test_failing.py").write_text(FAILING)

    result = run("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", cwd=tmp_path)

    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "INFO listening on 127.0.0.1:" in result.stdout.partition("test_that_fails")[2]


def test_the_programs_of_the_page_run(tmp_path):
    assert len(PROGRAMS) == 2
    for program in PROGRAMS:
        result = run("-c", program, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
