"""What can be wrong with a configuration, and where: the words in which every check reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a configuration, and where."""

    path: str
    """Dotted path such as `mirrors[0].flush.max-bytes`; empty for the whole file."""

    line: int | None
    """Line of the setting, counted from 1; None when no single line is to blame."""

    column: int | None
    """Column of the setting in characters, counted from 1; None like `line`."""

    message: str
    """What is wrong: lower case, no full stop; of values it shows only names and folders."""

    suggestion: str = ""
    """What to write instead, when we know it."""

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}: " if self.line is not None else ""
        path = f"{self.path}: " if self.path else ""
        suggestion = f" ({self.suggestion})" if self.suggestion else ""
        return f"{place}{path}{self.message}{suggestion}"


class ConfigError(UsageError):
    """The configuration cannot be used. Facts: `file`, `problems` (a tuple of `Problem`)."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is wrong, in the order of the file."""
        problems = self.facts.get("problems", ())
        return problems if isinstance(problems, tuple) else ()

    def __str__(self) -> str:
        lines = [f"{self.message} [file={self.facts.get('file')!r}]"]
        return "\n  ".join(lines + [str(problem) for problem in self.problems])


def config_error(name: str, problems: Iterable[Problem]) -> ConfigError:
    """The error that carries all these problems, sorted by their place in the file.

    Args:
        name: The file as the user named it.
        problems: At least one.
    """
    ordered = tuple(sorted(set(problems), key=lambda p: (p.line or 0, p.column or 0, p.path)))
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    return ConfigError(f"the configuration has {count}", file=name, problems=ordered)


class Locations:
    """Where each setting stands in the file; picklable.

    Args:
        places: Line and column by dotted path; kept, not copied.
    """

    def __init__(self, places: Mapping[str, tuple[int, int]]) -> None:
        self._places = places

    def place_of(self, path: str) -> tuple[int, int] | None:
        """Line and column of a dotted path, both from 1; of its nearest parent if it is absent.

        None for the whole file and for paths of which no part exists.
        """
        while path:
            if path in self._places:
                return self._places[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None

    def line_of(self, path: str) -> int | None:
        """Line of a dotted path, from 1; see `place_of`."""
        place = self.place_of(path)
        return place[0] if place else None

    def problem(self, path: str, message: str, suggestion: str = "") -> Problem:
        """A problem at the place of `path`."""
        line, column = self.place_of(path) or (None, None)
        return Problem(path, line, column, message, suggestion)
