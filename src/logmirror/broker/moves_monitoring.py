"""What the monitoring port shows of moves between log directories. Safe from any thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.broker.moves.move import MoveState
from logmirror.monitoring import broker_metrics as catalogue
from logmirror.monitoring.metrics import Distribution

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.moves.move import Move
    from logmirror.broker.moves.mover import Moves
    from logmirror.monitoring.metrics import Labels, Metric


def move_numbers(moves: Moves | None, metric: Metric) -> list[tuple[Labels, float]]:
    """Return the value of a gauge or counter of `catalogue.MOVE_CATALOGUE`.

    Args:
        moves: The moves of the broker. None: it has no log directories.
        metric: The metric.
    """
    if moves is None:
        return []
    active = [move for move in moves.all if move.is_active]
    values = {
        catalogue.MOVES: lambda: len(active),
        catalogue.MOVES_FAILED: lambda: sum(one.state is MoveState.FAILED for one in moves.all),
        catalogue.MOVE_BYTES_LEFT: lambda: sum(move.left_bytes for move in active),
        catalogue.MOVE_BYTES_COPIED: lambda: moves.counts.copied_bytes,
        catalogue.SWAPS: lambda: sum(moves.counts.swaps),
    }
    return [((), values[metric]())]


def swap_seconds(moves: Moves | None) -> list[tuple[Labels, Distribution]]:
    """Return how long swaps held the event loop."""
    if moves is None:
        return []
    return [((), Distribution(tuple(moves.counts.swaps), moves.counts.swaps_total_s))]


def move_status(moves: Moves | None) -> list[dict[str, object]]:
    """Return the moves that are in progress, or failed."""
    shown = [] if moves is None else [move for move in moves.all if move.is_shown]
    return [] if moves is None else [_status(move, moves.name_of) for move in shown]


def _status(move: Move, name_of: Callable[[Path], str]) -> dict[str, object]:
    folder = move.log.folder
    return {
        "partition": f"{folder.parent.name}-{folder.name}",
        "from": name_of(folder.parent.parent),
        "to": name_of(move.target),
        "state": move.state.value,
        "left_bytes": move.left_bytes,
        "offset_lag": move.lag,
        "failure": None if move.failure is None else str(move.failure),
    }
