#!/usr/bin/env python3
"""Simulate every cell of the fault matrix, then write docs/faults.md.

    python scripts/write_faults.py [RUNS]       runs of each cell; default 1

Exit code 1, and no page, if a run has an anomaly or its fault did not happen.
"""

import sys
from pathlib import Path

from logmirror.simulation.matrix import cells, page, run_cell

PAGE = Path(__file__).resolve().parent.parent / "docs" / "faults.md"
_STEP = 1000
"""Distance between the first seeds of two runs of a cell."""


def main(runs: int = 1) -> int:
    """Write the page; returns the exit code."""
    failed = 0
    for number in range(runs):
        for cell in cells():
            found = run_cell(cell, _STEP * number)
            if found.result.anomalies or not found.is_covered:
                failed += 1
                why = found.result.anomalies or "the fault did not happen"
                print(cell, found.result.plan, why, sep=": ", file=sys.stderr)  # noqa: T201  # a script
    if failed:
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
