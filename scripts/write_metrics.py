#!/usr/bin/env python3
"""Generate the tables of `docs/metrics.md` from the catalogue of metrics.

    python scripts/write_metrics.py

A test fails if the page is out of date.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.monitoring.broker_metrics import BROKER_CATALOGUE
from logmirror.monitoring.derived_metrics import AGGREGATES, MIRROR_V3_CATALOGUE
from logmirror.monitoring.metrics import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.monitoring.metrics import Metric

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
BEGIN: Final = "<!-- metrics: written by `make schema` -->"
END: Final = "<!-- end of metrics -->"


def page_text(page: str) -> str:
    """`page` with its generated part replaced.

    Raises:
        ValueError: The page lacks one of its markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        message = f"{PAGE.name} lacks the marks {BEGIN!r} and {END!r}"
        raise ValueError(message)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return one table for each part of the catalogue."""
    flows = [metric for metric in CATALOGUE if "partition" in metric.labels]
    others = [metric for metric in CATALOGUE if "partition" not in metric.labels]
    parts = (
        ("Single partitions", flows),
        ("Mirror and destination, and process", [*others, *AGGREGATES]),
        ("With `metrics-prefix: mirror_v3`", MIRROR_V3_CATALOGUE),
        ("Embedded broker", BROKER_CATALOGUE),
    )
    return "\n".join(f"### {heading}\n\n{_table(metrics)}" for heading, metrics in parts)


def _table(metrics: Sequence[Metric]) -> str:
    lines = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        meaning = metric.meaning
        if metric.buckets:
            meaning += f" Buckets: {', '.join(str(bound) for bound in metric.buckets)}."
        lines.append(f"| `{metric.name}` | {metric.kind} | {metric.unit} | {labels} | {meaning} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page_text(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
