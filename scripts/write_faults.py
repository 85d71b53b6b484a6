#!/usr/bin/env python3
"""Simulate every cell of the fault matrix and write docs/faults.md; exit 1 on an anomaly.

python scripts/write_faults.py [RUNS]       runs of each cell, 1 unless said
"""

import sys
from pathlib import Path

from logmirror.simulation.matrix import cells, page, run_cell

_STEP = 1000
"""Between the seeds of two runs of a cell."""


def main() -> int:
    """Write the page; returns the exit code."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    found = [run_cell(cell, _STEP * number) for number in range(runs) for cell in cells()]
    (Path(__file__).parent.parent / "docs" / "faults.md").write_text(page(found))
    wrong = [each for each in found if each.result.anomalies or not each.is_covered]
    for each in wrong:
        print(each.result.plan, each.result.anomalies or "not covered", file=sys.stderr)  # noqa: T201  # a script
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
