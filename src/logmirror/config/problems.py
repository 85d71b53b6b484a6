"""Problems of a configuration and their places in the file, as every check reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a configuration, and its place in the file."""

    path: str
    """Dotted path such as `mirrors[0].flush.max-bytes`; empty for the whole file."""

    line: int | None
    """Line of the setting, counted from 1; None for a problem of the whole file."""

    column: int | None
    """Column of the setting in characters, counted from 1; None like `line`."""

    message: str
    """The problem: lower case, no full stop. The only values that it shows are names and paths."""

    suggestion: str = ""
    """What to write instead; empty if unknown."""

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}: " if self.line is not None else ""
        path = f"{self.path}: " if self.path else ""
        suggestion = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}{path}{self.message}{suggestion}"


class ConfigError(UsageError):
    """The configuration cannot be used. Facts: `file`, `problems` (a tuple of `Problem`)."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, in the order of the file."""
        problems = self.facts.get("problems", ())
        return problems if isinstance(problems, tuple) else ()

    def __str__(self) -> str:
        lines = [f"{self.message} [file={self.facts.get('file')!r}]"]
        return "\n  ".join(lines + [str(problem) for problem in self.problems])


def config_error(name: str, problems: Iterable[Problem]) -> ConfigError:
    """Return the error that carries these problems, sorted by their place in the file.

    Args:
        name: The file as the user named it.
        problems: At least one.
    """
    ordered = tuple(sorted(set(problems), key=lambda p: (p.line or 0, p.column or 0, p.path)))
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return ConfigError(f"the configuration has {count}", file=name, problems=ordered)


class Locations:
    """Line and column of each setting in the file; picklable.

    Args:
        places: Line and column by dotted path; kept, not copied.
    """

    def __init__(self, places: Mapping[str, tuple[int, int]]) -> None:
        self._places = places

    def place_of(self, path: str) -> tuple[int, int] | None:
        """Return line and column of a dotted path, both from 1.

        An absent setting has the place of its nearest parent. None for the whole file, and for
        paths of which no part exists.
        """
        while path:
            if path in self._places:
                return self._places[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None

    def line_of(self, path: str) -> int | None:
        """Return the line of a dotted path, from 1; see `place_of`."""
        place = self.place_of(path)
        return place[0] if place else None

    def problem(self, path: str, message: str, suggestion: str = "") -> Problem:
        """Return a problem at the place of `path`."""
        line, column = self.place_of(path) or (None, None)
        return Problem(path, line, column, message, suggestion)
