"""Parses the text of a configuration file into plain values with their line and column.

The text is YAML 1.2: `yes` and `on` are texts, `010` and `1_000` are not numbers, `12:30` is a
time of day and not 750. References to the environment are resolved after parsing. A value therefore
cannot change the structure of the file, and references in comments are ignored.

Invariants:

1. Every problem is collected with path, line and column. Parsing stops at the first problem only if
   the text is not YAML, or exceeds a limit.
2. No problem shows a value, a default or the content of a file: each may be a secret.
3. `files.MAX_BYTES`, `MAX_DEPTH` and `MAX_NODES` bound time and memory, including for aliases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import yaml

from logmirror.config.files import place_at
from logmirror.config.problems import Locations, Problem
from logmirror.references import Reference, UnreadableError, read_text

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_DEPTH: Final = 32
MAX_NODES: Final = 200_000
"""Limits of nesting levels, and of values after aliases are resolved. Real files need far less."""

MAX_DIGITS: Final = 40
"""Longer digit strings stay text: no setting is that large, and parsing them is quadratic."""


class SourceMap(dict[str, object]):
    """A mapping that also has its scalar values as they were written.

    `texts` holds them with references resolved, but before conversion: a password `007` or `true`
    stays this text.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}


@dataclass(slots=True)
class Source:
    """A parsed file: plain values, their places, and the problems found so far."""

    root: object
    """`SourceMap`, list, str, int, float, bool or None."""

    locations: Locations
    problems: list[Problem] = field(default_factory=list)

    broken: set[str] = field(default_factory=set)
    """Paths whose value is unknown because of a problem. They get no further problems."""

    references: dict[str, Reference] = field(default_factory=dict)
    """By path: what a value that consists of one reference without a default refers to."""

    unset: list[str] = field(default_factory=list)
    """Environment variables that settings name, that are not set and that are not required."""

    def add_problem(self, path: str, message: str, suggestion: str = "") -> None:
        """Record a problem at `path`, unless the value there is unknown."""
        if not self.is_broken(path):
            self.problems.append(self.locations.problem(path, message, suggestion))

    def refuse(self, path: str, message: str, suggestion: str = "") -> None:
        """Record one problem at `path` instead of all present and future ones at and below it."""
        self.problems[:] = [p for p in self.problems if not _is_within(p.path, path)]
        self.broken = {broken for broken in self.broken if not _is_within(broken, path)}
        self.add_problem(path, message, suggestion)
        self.broken.add(path)

    def is_broken(self, path: str) -> bool:
        """Return whether the value at `path`, or a parent of it, is unknown."""
        while path and path not in self.broken:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return path in self.broken


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith((f"{outer}.", f"{outer}["))


# Placeholders of the same length replace references before the text is parsed: `{`, `}` and `:` in
# a reference are not parsed as YAML, and lines and columns stay the same. Placeholders use the end
# of Unicode's last private use plane, which fonts and keyboards do not have.
_PLACEHOLDER: Final = 0x10_F000
_MARK, _PAD, _DOLLAR = chr(_PLACEHOLDER), chr(_PLACEHOLDER + 1), chr(_PLACEHOLDER + 2)
_DIGIT_ZERO: Final = _PLACEHOLDER + 16
_DIGIT_BASE: Final = 2048
_RESERVED = re.compile(f"[{chr(_PLACEHOLDER)}-{chr(0x10_FFFF)}]")
_REFERENCE = re.compile(
    r"\$\$"
    r"|\$\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<default>:-[^}\n\r]*)?\}"
    r"|\$\{file:(?P<file>[^}\n\r]+)\}"
)
_HIDDEN = re.compile(
    f"{_DOLLAR}{{2}}|{_MARK}([{chr(_DIGIT_ZERO)}-{chr(_DIGIT_ZERO + _DIGIT_BASE - 1)}]{{2}}){_PAD}*"
)


class _Reference(NamedTuple):
    name: str | None
    default: str | None
    file: str | None


def _hide_references(text: str) -> tuple[str, list[_Reference]]:
    """Replace every reference by a placeholder of the same length."""
    references: list[_Reference] = []

    def placeholder(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return _DOLLAR * 2
        default = match["default"]
        references.append(
            _Reference(match["name"], None if default is None else default[2:], match["file"])
        )
        high, low = divmod(len(references) - 1, _DIGIT_BASE)
        number = chr(_DIGIT_ZERO + high) + chr(_DIGIT_ZERO + low)
        return (_MARK + number).ljust(len(match[0]), _PAD)

    return _REFERENCE.sub(placeholder, text), references


class _AbortError(Exception):
    """Parsing cannot continue; the problem is already recorded."""


def parse(text: str, *, environ: Mapping[str, str]) -> Source:
    """Parse YAML, resolve references, and record the place of each value.

    Args:
        text: The whole file.
        environ: The variables for `${VAR}`.

    Returns:
        Values and problems. If there are problems, `root` holds the values that could be read.
    """
    builder = _Builder(environ)
    try:
        root = builder.read(text)
    except _AbortError:
        root = None
        builder.broken.add("")
    return Source(root, Locations(builder.places), builder.problems, builder.broken, builder.whole)


class _Builder:
    """Builds values from parser events; one use."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        self.problems: list[Problem] = []
        self.broken: set[str] = set()
        self.whole: dict[str, Reference] = {}
        self._environ = environ
        self._references: list[_Reference] = []
        self._events: list[yaml.Event] = []
        self._anchors: dict[str, int] = {}
        self._node_count = 0
        self._text: str | None = None  # the last node's text; None if not a scalar

    def read(self, text: str) -> object:
        if reserved := _RESERVED.search(text):
            self._abort("a character of Unicode's last private use plane", text, reserved.start())
        hidden, self._references = _hide_references(text)
        self._scan(hidden)
        if len(self._events) == 0:
            self._add_problem("", None, "the file is empty", "see examples/")
            raise _AbortError
        value, _ = self._node(0, "")
        return value

    def _scan(self, text: str) -> None:
        """Fill `_events` with the nodes of one document; abort if it is nested too deeply."""
        depth = documents = 0
        try:
            for event in yaml.parse(text, Loader=yaml.SafeLoader):
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        self._add_problem(
                            "", event, "a second document begins", "use one file per document"
                        )
                        raise _AbortError
                elif isinstance(event, yaml.NodeEvent | yaml.CollectionEndEvent):
                    self._events.append(event)
                    depth += isinstance(event, yaml.CollectionStartEvent)
                    depth -= isinstance(event, yaml.CollectionEndEvent)
                if depth > MAX_DEPTH:
                    self._add_problem("", event, f"nested more than {MAX_DEPTH} levels deep")
                    raise _AbortError
        except yaml.MarkedYAMLError as error:
            self._not_yaml(error)
        except yaml.reader.ReaderError as error:
            self._abort("a character that YAML does not allow", text, int(error.position))
        if len(self._events) == 1 and _is_empty(self._events[0]):
            self._events.clear()

    def _not_yaml(self, error: yaml.MarkedYAMLError) -> None:
        mark = error.problem_mark or error.context_mark
        # The parser may quote the text that it found, which may be part of a password (2).
        parts = [part for part in (error.context, error.problem) if part]
        message = "not YAML: " + re.sub(r" ?'[^']{2,}'", "", ", ".join(parts))
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        suggestion = "quote values with special characters"
        self.problems.append(Problem("", line, column, message, suggestion))
        raise _AbortError

    def _abort(self, message: str, text: str, index: int) -> None:
        line, column = place_at(text, index)
        self.problems.append(Problem("", line, column, message))
        raise _AbortError

    def _add_problem(
        self, path: str, event: yaml.Event | None, message: str, hint: str = ""
    ) -> None:
        mark = event.start_mark if event else None
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        self.problems.append(Problem(path, line, column, message, hint))

    def _node(self, at: int, path: str) -> tuple[object, int]:
        """Return the value that begins with event `at`, and the index of the event after it."""
        event = self._events[at]
        self._node_count += 1
        if self._node_count > MAX_NODES:
            self._add_problem("", event, f"more than {MAX_NODES} values after resolving aliases")
            raise _AbortError
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, path), at + 1
        if not isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            message = f"unexpected event {type(event).__name__}"
            raise TypeError(message)
        if event.tag is not None:
            self._add_problem(path, event, "tags (`!...`) are not supported", "quote the value")
            self.broken.add(path)
        value: object
        if isinstance(event, yaml.ScalarEvent):
            value, after = self._scalar(event, path), at + 1
        elif isinstance(event, yaml.SequenceStartEvent):
            value, after = self._sequence(at, path)
        else:
            value, after = self._mapping(at, path)
        # Defined after the value: an alias inside it finds no anchor and cannot recurse forever.
        if event.anchor is not None and self._anchors.setdefault(event.anchor, at) != at:
            self._add_problem(path, event, "duplicate anchor")
        return value, after

    def _alias(self, event: yaml.AliasEvent, path: str) -> object:
        start = self._anchors.get(str(event.anchor))
        if start is None:
            self._add_problem(path, event, "this alias (`*...`) has no anchor", "quote the value")
            self.broken.add(path)
            return None
        # Built again: each path below has a place, and each value counts toward the limit.
        return self._node(start, path)[0]

    def _sequence(self, at: int, path: str) -> tuple[list[object], int]:
        values: list[object] = []
        at += 1
        while not isinstance(self._events[at], yaml.SequenceEndEvent):
            item = f"{path}[{len(values)}]"
            self._remember(item, self._events[at])
            value, at = self._node(at, item)
            values.append(value)
        self._text = None
        return values, at + 1

    def _mapping(self, at: int, path: str) -> tuple[SourceMap, int]:
        values = SourceMap()
        at += 1
        while not isinstance(self._events[at], yaml.MappingEndEvent):
            event = self._events[at]
            key = self._key(event, path)
            if key is None:
                at = self._after(self._after(at))
                continue
            child = f"{path}.{key}" if path else key
            if key in values:
                self._add_problem(child, event, "duplicate key", "keep one of them")
                at = self._after(at + 1)
                continue
            self._remember(child, event)
            self._text = None
            values[key], at = self._node(at + 1, child)
            if self._text is not None:
                values.texts[key] = self._text
        self._text = None
        return values, at + 1

    def _after(self, at: int) -> int:
        """Return the index of the event after the value that begins with event `at`."""
        depth = 0
        while True:
            depth += isinstance(self._events[at], yaml.CollectionStartEvent)
            depth -= isinstance(self._events[at], yaml.CollectionEndEvent)
            at += 1
            if depth == 0:
                return at

    def _remember(self, path: str, event: yaml.Event) -> None:
        mark = event.start_mark
        if mark is not None:
            self.places[path] = (mark.line + 1, mark.column + 1)

    def _key(self, event: yaml.Event, path: str) -> str | None:
        """Return the key; None, after recording a problem, if it is invalid."""
        if not isinstance(event, yaml.ScalarEvent):
            self._add_problem(path, event, "a key must be a word")
        elif event.tag is not None or _HIDDEN.search(event.value):
            self._add_problem(path, event, "a key must be a plain word, without tag or reference")
        elif event.value == "<<":
            self._add_problem(path, event, "merge keys (`<<`) are not part of YAML 1.2")
        elif not event.value:
            self._add_problem(path, event, "a key is missing before the colon")
        else:
            return str(event.value)
        return None

    def _scalar(self, event: yaml.ScalarEvent, path: str) -> object:
        self._text = text = self._expand(event.value, path)
        match = _HIDDEN.fullmatch(event.value)
        whole = self._reference(match) if match else None
        if whole is not None and whole.default is None:
            self.whole[path] = Reference(whole.name or "", whole.file or "")
        if path in self.broken:
            return None
        return resolve_plain(text) if event.style is None and event.implicit[0] else text

    def _expand(self, text: str, path: str) -> str:
        """Resolve the references of one scalar; the result is not scanned for references."""
        if "${" in text and "}" not in text[text.rindex("${") :]:
            message = "a reference `${` is not closed"
            self._reference_problem(path, message, "write $${ for a literal ${")

        def value_of(match: re.Match[str]) -> str:
            if match[0] == _DOLLAR * 2:
                return "$"
            reference = self._reference(match)
            return match[0] if reference is None else self._value_of(reference, path)

        expanded = _HIDDEN.sub(value_of, text)
        if not expanded.isascii() and any("\ud800" <= c <= "\udfff" for c in expanded):
            self._reference_problem(path, "not valid text: half of a surrogate pair")
        return expanded

    def _reference(self, match: re.Match[str]) -> _Reference | None:
        """Return the reference of a placeholder; None if it is none."""
        if match[1] is None:
            return None
        high, low = (ord(digit) - _DIGIT_ZERO for digit in match[1])
        number = high * _DIGIT_BASE + low
        # An escape in a quoted text may have spelled a placeholder.
        return self._references[number] if number < len(self._references) else None

    def _value_of(self, reference: _Reference, path: str) -> str:
        if reference.file is None:
            value = self._environ.get(reference.name or "", reference.default)
            if value is None:
                self._reference_problem(
                    path,
                    f"the environment variable {reference.name} is not set",
                    f"set it or write ${{{reference.name}:-default}}",
                )
            return value or ""
        try:
            return read_text(Path(reference.file))
        except UnreadableError as error:
            self._reference_problem(path, f"file {reference.file!r}: {error}")
            return ""

    def _reference_problem(self, path: str, message: str, suggestion: str = "") -> None:
        problem = Locations(self.places).problem(path, message, suggestion)
        self.problems.append(problem)
        self.broken.add(path)


def _is_empty(event: yaml.Event) -> bool:
    return isinstance(event, yaml.ScalarEvent) and event.style is None and not event.value


_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_BASED_INTEGER = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")


def resolve_plain(text: str) -> bool | int | float | str | None:
    """Return the value of an unquoted scalar by the core schema of YAML 1.2.

    One deviation: numbers with leading zeros stay text, because YAML 1.1 reads them as octal and
    YAML 1.2 as decimal.
    """
    value: bool | int | float | str | None = text
    if text in _NULLS:
        value = None
    elif text in _TRUE or text in _FALSE:
        value = text in _TRUE
    elif len(text) > MAX_DIGITS:
        pass
    elif _INTEGER.fullmatch(text):
        value = int(text)
    elif _BASED_INTEGER.fullmatch(text):
        value = int(text, 0)
    elif _FLOAT.fullmatch(text) and not re.match(r"[-+]?0[0-9]", text):
        value = float(text)
    return value
