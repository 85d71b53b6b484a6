"""What `logmirror validate` prints, with and without `--check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from logmirror.cli.screen import table_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.table import Table

    from logmirror.app.preflight import CheckRow
    from logmirror.config.settings import Settings


def summary(settings: Settings) -> Iterator[str]:
    """What a file without problems holds, line by line."""
    enabled = sum(mirror.enabled for mirror in settings.mirrors)
    disabled = len(settings.mirrors) - enabled
    counts = f" ({enabled} enabled, {disabled} disabled)" if disabled else ""
    destinations = sum(len(mirror.destinations) for mirror in settings.mirrors)
    yield f"OK: {len(settings.mirrors)} mirror(s){counts}, {destinations} destination(s) total"
    for mirror in settings.mirrors:
        names = ", ".join(f'"{d.name}"' for d in mirror.destinations)
        state = "" if mirror.enabled else " [DISABLED]"
        yield f'mirror "{mirror.name}"{state}: destinations = [{names}]'
    for name in settings.unset_variables:
        yield f"note: the environment variable {name} is not set here, and `run` needs it"


def settings_json(settings: Settings) -> dict[str, object]:
    """The same for programs."""
    mirrors = [
        {
            "mirror": mirror.name,
            "enabled": mirror.enabled,
            "destinations": [destination.name for destination in mirror.destinations],
        }
        for mirror in settings.mirrors
    ]
    return {"mirrors": mirrors, "unset_variables": list(settings.unset_variables)}


def checks_table(rows: Iterable[CheckRow]) -> Table:
    """All that was looked at."""
    table = table_of("MIRROR", "DESTINATION", "", "WHAT", "FOUND", "TO DO")
    for row in rows:
        cells = (row.mirror, row.destination or "(source)", row.severity, row.what)
        table.add_row(*cells, escape(row.found), escape(row.advice))
    return table
