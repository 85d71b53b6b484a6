"""The fault matrix: every crash point, fault, destination and format that go together.

A cell is one run in which that fault happened at that point, among further faults that are drawn.
`run_cell` looks for such a run and judges it; `write_page` puts what was found into a page.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.clock import Chooser
from logmirror.failpoints import POINTS
from logmirror.simulation.faults import FAULTS, Destination, Directive, FaultClass, Format
from logmirror.simulation.simulate import Plan, Result, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

FORMATS: Final[dict[Destination, tuple[Format, ...]]] = {
    "files": ("native", "parquet", "ndjson", "snapshots"),
    "S3": ("native", "parquet", "ndjson", "snapshots"),
    "Kafka": ("-", "translate"),
}

_DRIVER: Final = (
    *("plan.positions", "plan.dispatch", "commit.received", "commit.done"),
    "translate.owned",
)
_ALL: Final = (*_DRIVER[:4], "fetch.answered")
_ARCHIVE: Final = (
    *("stage.opened", "stage.written", "stage.finished"),
    *("claim.created", "publish.linked", "publish.done"),
    *("compact.staged", "compact.recorded", "compact.published"),
    *("compact.proven", "compact.deleted"),
)
_CLUSTER: Final = (
    *("head.filled", "head.deleted"),
    *("hole.begin", "hole.joined", "hole.marked", "hole.filled"),
    *("produce.prepared", "produce.sent", "produce.answered"),
)
_TRANSLATED: Final = (
    *("translate.owned", "translate.taken", "translate.joined"),
    *("translate.sent", "translate.noted", "translate.committed"),
)

_DRAWN: Final = ("kill", "stop", "source-down", "source-changes", "refused", "executor-lost")
_DRAWN_AT: Final[dict[Destination, tuple[str, ...]]] = {
    "files": ("io-error", "power"),
    "S3": ("lost-answer", "late", "down"),
    "Kafka": ("lost-answer", "late", "down"),
}
_TRIES: Final = 12
"""Seeds that are tried until the directed fault has happened."""

_NTHS: Final = (1, 2, 3)


class Cell(NamedTuple):
    """One combination."""

    point: str
    fault: str
    destination: Destination
    form: Format

    def __str__(self) -> str:
        form = "" if self.form == "-" else f" {self.form}"
        return f"{self.fault} at {self.point}, {self.destination}{form}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell that was tried."""

    cell: Cell
    result: Result
    """Of the seed in which the fault happened, or of the last one that was tried."""

    @property
    def is_covered(self) -> bool:
        """Whether the fault happened at the point."""
        return self.result.fired > 0


def simulated_points(destination: Destination, form: Format) -> tuple[str, ...]:
    """The crash points on the way to a destination."""
    own: tuple[str, ...] = _CLUSTER if destination == "Kafka" else _ARCHIVE
    if form == "translate":
        own = _TRANSLATED
    if form == "snapshots":  # each is whole: nobody merges them
        own = tuple(point for point in own if not point.startswith("compact."))
    return tuple(point for point in POINTS if point in _ALL or point in own)


def why_not(point: str, fault: FaultClass, destination: Destination) -> str:
    """Why a combination cannot be; empty: it can."""
    if destination not in fault.where:
        return fault.why_not
    if fault.name == "executor-lost" and point in _DRIVER:
        return "the driver reaches this point, no worker does"
    return ""


def cells(faults: Iterable[str] | None = None) -> list[Cell]:
    """All cells that can be, in the order of the page.

    Args:
        faults: Only these classes; None: all.
    """
    wanted = None if faults is None else set(faults)
    return [
        Cell(point, fault.name, destination, form)
        for destination, forms in FORMATS.items()
        for form in forms
        for point in simulated_points(destination, form)
        for fault in FAULTS
        if (wanted is None or fault.name in wanted) and not why_not(point, fault, destination)
    ]


def plan_of(cell: Cell, seed: int) -> Plan:
    """A run that is to cover a cell; two more faults are drawn."""
    chooser = Chooser(f"{cell} {seed}")
    return Plan(
        seed=seed,
        destination=cell.destination,
        form=cell.form,
        directive=Directive(cell.point, cell.fault, chooser.choice(_nths(cell.point))),
        drawn=_draw(chooser, cell.destination, 2),
    )


def _nths(point: str) -> tuple[int, ...]:
    if point.startswith("head."):
        return (1,)  # a log has one head
    return _NTHS[:2] if point.startswith("compact.") else _NTHS


def _draw(chooser: Chooser, destination: Destination, count: int) -> tuple[str, ...]:
    return tuple(chooser.choice((*_DRAWN, *_DRAWN_AT[destination])) for _ in range(count))


def random_plan(
    seed: int,
    faults: Sequence[str] | None = None,
    kinds: Sequence[tuple[Destination, Format]] | None = None,
) -> Plan:
    """A run whose every fault is drawn: at least three of them.

    Args:
        seed: Decides everything.
        faults: Draw from these classes; None: from all.
        kinds: Copy to one of these; None: to any.
    """
    chooser = Chooser(f"random {seed}")
    among = _among(tuple(faults) if faults else None, tuple(kinds) if kinds else None)
    cell = chooser.choice(among)
    drawn = _draw(chooser, cell.destination, chooser.randint(2, 4))
    if faults:
        drawn = tuple(fault for fault in drawn if fault in faults)
    return Plan(
        seed=seed,
        destination=cell.destination,
        form=cell.form,
        directive=Directive(cell.point, cell.fault, chooser.randint(1, 6)),
        drawn=drawn,
    )


@functools.cache
def _among(
    faults: tuple[str, ...] | None, kinds: tuple[tuple[Destination, Format], ...] | None
) -> list[Cell]:
    found = cells(faults)
    chosen = [cell for cell in found if kinds is None or (cell.destination, cell.form) in kinds]
    return chosen or found


def run_cell(cell: Cell, seed: int) -> CellResult:
    """Simulate until the cell's fault has happened, or an anomaly is found, or seeds run out."""
    for number in range(_TRIES):
        result = simulate(plan_of(cell, seed + number))
        if result.fired or result.anomalies:
            break
    return CellResult(cell, result)


# -- the page ------------------------------------------------------------------------------------


def page(results: Iterable[CellResult]) -> str:
    """The page of the matrix: Markdown."""
    found = list(results)
    lines = [
        *("# Fault matrix", ""),
        "Written by `make faults`, which simulates every cell: the product's own code in a made-up",
        "world with virtual time, in which one fault happens at one crash point, and two more at",
        "moments that are drawn. [How to read it](torture.md). A number is how many runs had that",
        "fault at that point without an anomaly; a letter says why there is none.",
        "",
        *_faults_table(),
        *(line for destination in FORMATS for line in _tables(destination, found)),
    ]
    return "\n".join(lines)


def _faults_table() -> Iterator[str]:
    yield from ("| fault | what happens |", "|---|---|")
    for fault in FAULTS:
        yield f"| `{fault.name}` | {fault.meaning} |"
    yield ""


def _tables(destination: Destination, found: Sequence[CellResult]) -> Iterator[str]:
    counts: Counter[Cell] = Counter()
    wrong: dict[Cell, str] = {}
    for each in found:
        if each.result.anomalies:
            wrong[each.cell] = "+".join(anomaly.code for anomaly in each.result.anomalies)
        elif each.is_covered:
            counts[each.cell] += 1
    reasons: dict[str, str] = defaultdict(lambda: chr(ord("a") + len(reasons)))
    for form in FORMATS[destination]:
        yield from (f"## {destination}{'' if form == '-' else f', {form}'}", "")
        yield f"| crash point | {' | '.join(fault.name for fault in FAULTS)} |"
        yield f"|---|{'---|' * len(FAULTS)}"
        for point in simulated_points(destination, form):
            shown = []
            for fault in FAULTS:
                cell = Cell(point, fault.name, destination, form)
                if why := why_not(point, fault, destination):
                    shown.append(f"{reasons[why]}")
                else:
                    shown.append(wrong.get(cell) or str(counts[cell]))
            yield f"| `{point}` | {' | '.join(shown)} |"
        yield ""
    yield from (f"- {letter}: {why}" for why, letter in reasons.items())
    yield ""
