"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

_YAML: Final = (".yaml", ".yml")


def yaml_files(incomplete: str) -> list[str]:
    """Return YAML files that complete a path; none: the shell completes by itself."""
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") or not incomplete else typed.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _YAML)
    except OSError:
        return []  # no such folder: the shell completes by itself
    head = incomplete[: incomplete.rfind("/") + 1]
    return [head + name for name in names if (head + name).startswith(incomplete)]


ConfigOption = Annotated[
    Path,
    typer.Option(
        "-c",
        "--config",
        help="The YAML file.",
        show_default=False,
        autocompletion=yaml_files,
    ),
]
FormatOption = Annotated[Literal["table", "json"], typer.Option("--format", help="Output format.")]
MirrorOption = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="Only this mirror; repeatable.", show_default=False),
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="Least severe level on stderr.")
]
LogFormatOption = Annotated[Literal["text", "json"], typer.Option(help="Log format on stderr.")]


def parse_bytes(text: str) -> int:
    """Parse a size: a number of bytes, or 256MiB."""
    from logmirror.config.settings import parse_size  # noqa: PLC0415  # loads the configuration

    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}; for example 256MiB") from error
