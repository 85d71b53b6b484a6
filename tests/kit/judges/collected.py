"""The tests that pytest collects, with the IDs of mirror-v3's tests that they carry.

pytest collects all of them once, in a process of its own, because the calling run may have selected
a few tests only. A test that is skipped, deselected or ignored by a `conftest.py` is not collected.
Tests that use this module belong to the group `GROUP`, so that one process does it for all.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
GROUP: Final = pytest.mark.xdist_group("collected")
_ID: Final = re.compile(r"(?<![A-Z0-9])([A-Z][A-Z0-9]{1,2}-\d\d)(?!\d)")
_ID_IN_NAME: Final = re.compile(r"(?<![a-z0-9])([a-z][a-z0-9]{1,2})_(\d\d)(?![a-z0-9])")


@cache
def collected() -> dict[str, set[str]]:
    """Return the IDs that each collected test carries.

    Returns:
        `file::function[parameters]` to IDs such as `RUN-04`: those of its `mirror_v3` marker, of
        its name, of its docstring and of its parameters.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "kit.judges.collected"],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": str(ROOT / "tests"), "LOGMIRROR_TEST_TIER": "all"},
        capture_output=True,
        text=True,
        check=False,
    )
    *output, found = done.stdout.splitlines() or [""]
    assert done.returncode == 0, "\n".join(output[-40:]) + done.stderr[-4000:]
    return {test: set(ids) for test, ids in json.loads(found).items()}


def functions() -> dict[str, set[str]]:
    """Return the IDs that each test function carries: `file::function` to IDs."""
    found: dict[str, set[str]] = {}
    for test, ids in collected().items():
        found.setdefault(test.partition("[")[0], set()).update(ids)
    return found


class _Collector:
    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if not next(item.iter_markers("skip"), None):
                self.found[item.nodeid] = _ids(item)


def _ids(item: pytest.Item) -> set[str]:
    function = getattr(item, "function", None)
    texts = [item.name, getattr(function, "__doc__", None) or ""]
    texts += [one for marker in item.iter_markers("mirror_v3") for one in marker.args]
    name = getattr(function, "__name__", "")
    return {one for text in texts for one in _ID.findall(text)} | {
        f"{kind.upper()}-{number}" for kind, number in _ID_IN_NAME.findall(name)
    }


def _main() -> int:
    collector = _Collector()
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:randomly"]
    code = pytest.main(options, plugins=[collector])
    print(json.dumps({test: sorted(ids) for test, ids in collector.found.items()}))  # noqa: T201  # the result
    return int(code)


if __name__ == "__main__":
    sys.exit(_main())
