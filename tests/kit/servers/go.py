"""Programs that Go's tools build from published modules, once per machine.

`python -m kit.servers.go` builds all of them, with any Python. It takes minutes, so
`scripts/setup.sh tests` does it while packages are downloaded.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from typing import TYPE_CHECKING, Final

from kit.servers.machine import cache_folder, program

if TYPE_CHECKING:
    from pathlib import Path


_PROGRAMS: Final = {
    # Go of 1.17 and later builds it, which every distribution has.
    "toxiproxy": "github.com/Shopify/toxiproxy/v2/cmd/server@v2.5.0",
    "versitygw": "github.com/versity/versitygw/cmd/versitygw@v1.8.0",
}
"""What to build, as `go install` takes it; the program bears the last name of its path."""


def go_program(name: str) -> Path:
    """Return one of the programs; the first use on a machine builds it."""
    package = _PROGRAMS[name]
    path, _, version = package.partition("@v")
    home = cache_folder() / f"{name}-{version}"
    found = home / path.rpartition("/")[2]
    if not found.exists():
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
            if not found.exists():
                environment = {**os.environ, "GOBIN": str(home)}
                subprocess.run([program("go"), "install", package], env=environment, check=True)
    return found


if __name__ == "__main__":
    for each in _PROGRAMS:
        go_program(each)
