"""No kernel reads or writes a byte outside of its buffers, whatever the batches say.

Method: another process puts every buffer against a page that nobody may touch and feeds a million
damaged batches to scan, decode, NDJSON, encode and patch, all in compiled code; one byte too far
would kill that process. That it would is shown first.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("hostile_kernels.py")


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_the_fence_kills_whoever_reads_one_byte_beyond():
    ended = run("100", "beyond")
    assert ended.returncode == -signal.SIGSEGV, ended.stderr


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
