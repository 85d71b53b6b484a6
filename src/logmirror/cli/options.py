"""Options that several commands have, and the file that most of them read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from logmirror.cluster.properties import property_problems
from logmirror.config.settings import Settings, load
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_YAML: Final = (".yaml", ".yml")


def yaml_files(incomplete: str) -> list[str]:
    """YAML files that a half-typed path may mean; none: the shell offers what it finds itself."""
    typed = Path(incomplete)
    folder = typed if incomplete.endswith("/") or not incomplete else typed.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in _YAML)
    except OSError:
        return []  # the shell knows what to do where there is no such folder
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
FormatOption = Annotated[
    Literal["table", "json"], typer.Option("--format", help="For people, or for programs.")
]
MirrorOption = Annotated[
    list[str] | None,
    typer.Option("--mirror", help="Only this mirror; may be given again.", show_default=False),
]
LogLevelOption = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="What stderr shows.")
]
LogFormatOption = Annotated[
    Literal["text", "json"], typer.Option(help="How stderr shows it: for people, or for programs.")
]


def settings_of(
    path: Path, only: list[str] | None = None, *, needs_variables: bool = True
) -> Settings:
    """The configuration in a file.

    Args:
        path: The file.
        only: Names of the mirrors to keep; empty or None: all.
        needs_variables: Whether variables that the file names for later must be set now.

    Raises:
        UsageError: The file has problems, or lacks one of these mirrors.
    """
    settings = load(path, check_properties=_property_problems, needs_variables=needs_variables)
    if not only:
        return settings
    known = [mirror.name for mirror in settings.mirrors]
    for name in only:
        if name not in known:
            raise UsageError("there is no such mirror in the file", mirror=name, mirrors=known)
    chosen = tuple(mirror for mirror in settings.mirrors if mirror.name in only)
    return dataclasses.replace(settings, mirrors=chosen)


def _property_problems(properties: Mapping[str, str]) -> list[tuple[str, str, str]]:
    found = property_problems("localhost:9092", properties)
    return [(problem.name, problem.message, problem.suggestion) for problem in found]
