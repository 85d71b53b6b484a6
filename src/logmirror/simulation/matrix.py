"""The fault matrix: every possible combination of failpoint, fault, destination and format.

A cell is one combination. `run_cell` simulates it, with two more faults at random moments; `page`
lists all cells as `docs/faults.md`.
"""

from __future__ import annotations

import functools
from collections import defaultdict
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
"""Seeds that `run_cell` simulates at most, until the directed fault has happened."""

_NTHS: Final = (1, 2, 3)
_FORM_TITLES: Final = {"-": "same offsets", "translate": "new offsets"}


class Cell(NamedTuple):
    """One combination of failpoint, fault, destination and format."""

    point: str
    fault: str
    destination: Destination
    form: Format

    def __str__(self) -> str:
        form = "" if self.form == "-" else f" {self.form}"
        return f"{self.fault} at {self.point}, {self.destination}{form}"


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of simulating a cell."""

    cell: Cell
    result: Result
    """The run in which the fault happened, or else the last one."""

    @property
    def is_covered(self) -> bool:
        """Whether the fault happened at the failpoint."""
        return self.result.fired > 0


def simulated_points(destination: Destination, form: Format) -> tuple[str, ...]:
    """Return the failpoints of a flow to a destination, in their order."""
    own: tuple[str, ...] = _CLUSTER if destination == "Kafka" else _ARCHIVE
    if form == "translate":
        own = _TRANSLATED
    if form == "snapshots":  # `compact` does not merge snapshots
        own = tuple(point for point in own if not point.startswith("compact."))
    return tuple(point for point in POINTS if point in _ALL or point in own)


def why_not(point: str, fault: FaultClass, destination: Destination) -> str:
    """Return why a combination is not possible; empty if it is."""
    if destination not in fault.where:
        return fault.why_not
    if fault.name == "executor-lost" and point in _DRIVER:
        return "only the driver reaches this failpoint"
    return ""


def cells(faults: Iterable[str] | None = None) -> list[Cell]:
    """Return all possible cells, in the order of the page.

    Args:
        faults: Names of faults; None: all.
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
    """Return the plan of a run for a cell, with two drawn faults."""
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
        return (1,)  # a log starts once
    return _NTHS[:2] if point.startswith("compact.") else _NTHS


def _draw(chooser: Chooser, destination: Destination, count: int) -> tuple[str, ...]:
    return tuple(chooser.choice((*_DRAWN, *_DRAWN_AT[destination])) for _ in range(count))


def random_plan(
    seed: int,
    faults: Sequence[str] | None = None,
    kinds: Sequence[tuple[Destination, Format]] | None = None,
) -> Plan:
    """Return a random plan: one directed fault and two to four drawn ones.

    Args:
        seed: Determines the plan and the run.
        faults: Names of the faults to choose from; None: all.
        kinds: Destinations and formats to choose from; None: all.
    """
    chooser = Chooser(f"random {seed}")
    among = _candidates(tuple(faults) if faults else None, tuple(kinds) if kinds else None)
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
def _candidates(
    faults: tuple[str, ...] | None, kinds: tuple[tuple[Destination, Format], ...] | None
) -> list[Cell]:
    found = cells(faults)
    chosen = [cell for cell in found if kinds is None or (cell.destination, cell.form) in kinds]
    return chosen or found


def run_cell(cell: Cell, seed: int) -> CellResult:
    """Simulate a cell with seeds from `seed` on, until its fault happens or an anomaly is found."""
    for number in range(_TRIES):
        result = simulate(plan_of(cell, seed + number))
        if result.fired or result.anomalies:
            break
    return CellResult(cell, result)


# -- the page ------------------------------------------------------------------------------------


def page() -> str:
    """Return `docs/faults.md`. It depends on the matrix alone, so a test can compare it exactly."""
    lines = [
        *("# Fault matrix", ""),
        f"{len(cells()):,} combinations of failpoint, fault, destination and format are simulated.",
        "In each, the fault happens at the failpoint, and two more faults happen at random",
        "moments. The checker then compares the replica with the source, record by record:",
        "[torture](torture.md) describes the method.",
        "",
        "| cell | meaning |",
        "|---|---|",
        "| ok | Simulated. The fault happens, and no record is lost, duplicated or changed. |",
        "| a, b, ... | Not possible. The list after the destination's tables has the reason. |",
        "",
        "`make test` runs every ninth combination, `make gate` every third, and `make nightly` all",
        "of them. The test fails if a fault did not happen, if the checker found an anomaly, or if",
        "this page differs from the matrix. `make faults` runs all combinations, then writes this",
        "page.",
        "",
        *_faults_table(),
        *(line for destination in FORMATS for line in _tables(destination)),
    ]
    return "\n".join(lines)


def _faults_table() -> Iterator[str]:
    yield from ("## Faults", "", "| fault | what happens |", "|---|---|")
    for fault in FAULTS:
        yield f"| `{fault.name}` | {fault.meaning} |"
    yield ""


def _tables(destination: Destination) -> Iterator[str]:
    reasons: dict[str, str] = defaultdict(lambda: chr(ord("a") + len(reasons)))
    for form in FORMATS[destination]:
        points = simulated_points(destination, form)
        rows = [[why_not(point, fault, destination) for fault in FAULTS] for point in points]
        simulated = sum(row.count("") for row in rows)
        yield from (f"## {destination}, {_FORM_TITLES.get(form, form)}", "")
        yield f"{simulated} of {len(points) * len(FAULTS)} combinations are simulated."
        yield ""
        yield f"| failpoint | {' | '.join(f'`{fault.name}`' for fault in FAULTS)} |"
        yield f"|---|{'---|' * len(FAULTS)}"
        for point, row in zip(points, rows, strict=True):
            shown = [reasons[why] if why else "ok" for why in row]
            yield f"| `{point}` | {' | '.join(shown)} |"
        yield ""
    yield from (f"- {letter}: {why}" for why, letter in reasons.items())
    yield ""
