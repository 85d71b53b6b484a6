"""Programs that Go's tools build, once per machine: from published modules, and the tests' own.

`python -m kit.servers.go` builds all of them, with any Python. It takes minutes, so
`scripts/setup.sh tests` does it before the tests begin.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Final

from kit.servers.machine import cache_folder, program

_PROGRAMS: Final = {
    # Go of 1.17 and later builds it, which every distribution has.
    "toxiproxy": "github.com/Shopify/toxiproxy/v2/cmd/server@v2.5.0",
    "versitygw": "github.com/versity/versitygw/cmd/versitygw@v1.8.0",
}
"""What to build, as `go install` takes it; the program bears the last name of its path."""

_SERVICES: Final = {
    "franz-go": Path(__file__).parents[1] / "judges" / "franz_go_service",
}
"""Modules of the tests, pinned by their `go.sum`; the program bears the name of its folder."""


def go_program(name: str) -> Path:
    """Return one of the programs of published modules; the first use on a machine builds it."""
    package = _PROGRAMS[name]
    path, _, version = package.partition("@v")
    found = cache_folder() / f"{name}-{version}" / path.rpartition("/")[2]
    return _built(found, "install", package)


def go_service(name: str) -> Path:
    """Return one of the tests' own programs; the first use of its present source builds it."""
    source = _SERVICES[name]
    content = b"".join(file.read_bytes() for file in sorted(source.iterdir()))
    digest = hashlib.sha256(content).hexdigest()[:16]
    found = cache_folder() / f"{name}-{digest}" / source.name
    return _built(found, "install", "-mod=readonly", "-buildvcs=false", ".", folder=source)


def _built(found: Path, *arguments: str, folder: Path | None = None) -> Path:
    """Return a program, which `go` with these arguments puts into `GOBIN` unless it is there."""
    if not found.exists():
        found.parent.mkdir(parents=True, exist_ok=True)
        with (found.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
            if not found.exists():
                environment = {**os.environ, "GOBIN": str(found.parent)}
                command = [program("go"), *arguments]
                subprocess.run(command, env=environment, cwd=folder, check=True)
    return found


if __name__ == "__main__":
    for each in _PROGRAMS:
        go_program(each)
    for each in _SERVICES:
        go_service(each)
