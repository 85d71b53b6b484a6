"""Programs that Go's own tools build from published modules, once a machine."""

from __future__ import annotations

import fcntl
import os
import subprocess
from typing import TYPE_CHECKING

from kit.machine import cache_folder, program

if TYPE_CHECKING:
    from pathlib import Path


def go_program(name: str, package: str) -> Path:
    """Return the program; the first use on a machine builds it.

    Args:
        name: Of the folder that keeps it, its version included.
        package: What to build, as `go install` takes it; the program bears its last name.
    """
    home = cache_folder() / name
    found = home / package.partition("@")[0].rpartition("/")[2]
    if not found.exists():
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
            if not found.exists():
                environment = {**os.environ, "GOBIN": str(home)}
                subprocess.run([program("go"), "install", package], env=environment, check=True)
    return found
