"""`logmirror broker --explain-cost`: requests to the bucket in a month, and their price."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from logmirror.broker.options import BrokerOptions
    from logmirror.reports import CostReport

KINDS: Final = ("put", "get", "list", "delete")
_MB: Final = 1_000_000
_MOST: Final = 1e9
"""Of a rate and of a price: figures beyond are no numbers of a bill."""

ExplainCostOption = Annotated[
    bool,
    typer.Option(
        "--explain-cost",
        help="Print how many requests to the bucket a month takes with these settings, and stop. "
        "Nothing is connected to.",
    ),
]
WriteRateOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=_MOST,
        help="For --explain-cost: MB per second of all producers, as stored.",
    ),
]
ReadRateOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=_MOST,
        help="For --explain-cost: MB per second of old records, which are not on this machine.",
    ),
]
PriceOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND=PRICE",
        help="For --explain-cost: price of 1,000 requests of a kind: put, get, list or delete. "
        "Repeatable.",
        show_default=False,
    ),
]


def explain(
    options: BrokerOptions, rates_mb: tuple[float, float], prices: Iterable[str], *, as_json: bool
) -> None:
    """Print the requests of a month, at some rates of writing and of reading old records.

    Raises:
        UsageError: The log directory is not in a bucket, a price is not one, or the broker would
            refuse a setting.
    """
    from logmirror.api import explain_cost  # noqa: PLC0415  # only this option needs it
    from logmirror.cli.output import stdout  # noqa: PLC0415  # loads the tables

    if not options.bucket:
        raise UsageError("--explain-cost is for a log directory in a bucket: --log-dir s3://...")
    report = explain_cost(
        options,
        write_bytes_s=rates_mb[0] * _MB,
        read_bytes_s=rates_mb[1] * _MB,
        partitions=sum(count for _, count in options.topics) or options.default_partitions,
        prices=dict(_price(text) for text in prices),
    )
    if as_json:
        typer.echo(json.dumps(report_json(report), indent=2))
    else:
        stdout().print(report_table(report))


def _price(text: str) -> tuple[str, float]:
    kind, _, number = text.partition("=")
    try:
        found = float(number)
    except ValueError:
        found = -1
    if kind not in KINDS or not 0 <= found <= _MOST:
        raise UsageError(
            "--price must be KIND=PRICE, of 1,000 requests", found=text, kinds=", ".join(KINDS)
        )
    return kind, found


def report_json(report: CostReport) -> dict[str, Any]:
    """Return a report as JSON. Fields may be added; none is renamed."""
    found: dict[str, Any] = {
        "seconds": report.seconds,
        "requests": {kind: round(count) for kind, count in report.requests.items()},
        "bytes": {
            "put": round(sum(one.put_bytes for one in report.causes)),
            "get": round(sum(one.get_bytes for one in report.causes)),
        },
        "causes": [
            {"cause": one.cause, **{kind: round(getattr(one, kind)) for kind in KINDS}}
            for one in report.causes
        ],
        "segment_bytes": round(report.segment_bytes),
        "segment_seconds": round(report.segment_s, 3),
    }
    if report.prices:
        found["cost"] = {**report.cost, "total": sum(report.cost.values())}
    return found


def report_table(report: CostReport) -> Table:
    """Return a report as a table."""
    from rich.table import Table  # noqa: PLC0415  # as above

    table = Table(box=None, pad_edge=False)
    table.add_column("REQUESTS IN 30 DAYS")
    for kind in KINDS:
        table.add_column(kind.upper(), justify="right", no_wrap=True)
    for one in report.causes:
        table.add_row(one.cause, *(f"{getattr(one, kind):,.0f}" for kind in KINDS))
    table.add_row("total", *(f"{report.requests[kind]:,.0f}" for kind in KINDS))
    if report.prices:
        cells = [f"{report.cost[kind]:,.2f}" if kind in report.cost else "-" for kind in KINDS]
        table.add_row("price", *cells)
    return table
