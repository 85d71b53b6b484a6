"""No kernel reads or writes outside its buffers, for any batch.

Method: another process places every buffer against an inaccessible page and feeds a million damaged
batches to scan, decode, NDJSON, encode and patch, all in compiled code. An access one byte beyond
ends that process, which is shown first.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("hostile_kernels.py")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_a_read_one_byte_beyond_ends_the_process():
    ended = run("100", "beyond")
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


@pytest.mark.gate("minutes of damaged input")
def test_a_million_damaged_batches_touch_nothing_outside_of_the_buffers():
    ended = run("1000000")
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["canaries"] is True
    # The damage reached everywhere: much was refused at each stage, and much got through.
    assert report["rounds"] == sum(report["scan"].values()) == sum(report["decode"].values())
    assert min(report["scan"].values()) > 10_000
    assert min(report["decode"]["done"], report["decode"]["refused"]) > 50_000
    assert report["decode"]["full"] > 100
    assert report["with rows"] > 100_000
