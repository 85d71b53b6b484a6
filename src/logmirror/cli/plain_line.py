"""Reads a plain command line without typer's parser, which takes a tenth of a second to load.

The options are those of the command's own annotations. A line that is not plain (`--help`, an
option that the command does not have, a value of the wrong type) is left to typer, which reports
what is wrong with it.
"""

from __future__ import annotations

import inspect
import types
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typer.models import OptionInfo


_DIGITS: Final = 9


class _Reader(NamedTuple):
    """What a flag sets."""

    name: str
    kind: Any
    """The type of its value. None: the flag sets False."""

    option: OptionInfo


class _NotPlainError(Exception):
    """The line needs typer's parser."""


def arguments_of(command: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """Return the arguments with which typer would call a command; None: let typer decide.

    Args:
        command: A function of keyword parameters, each with a default or an option.
        words: The command line behind the command's name.
    """
    try:
        found = _found(_readers(command), list(reversed(words)))
    except _NotPlainError:
        return None
    for name, parameter in inspect.signature(command).parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in found:
            return None
        found.setdefault(name, parameter.default)
    return found


def _readers(command: Callable[..., None]) -> dict[str, _Reader]:
    """Return the options by flag."""
    hints = typing.get_type_hints(command, include_extras=True)
    del hints["return"]
    readers = {}
    for name, hint in hints.items():
        kind, option = typing.get_args(hint)[:2]
        if typing.get_origin(kind) in {types.UnionType, typing.Union}:
            (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        for flag in _flags(option) or (f"--{name.replace('_', '-')}",):
            yes, _, no = flag.partition("/")
            readers[yes] = _Reader(name, kind, option)
            if kind is bool and (no or not _flags(option)):
                readers[no or f"--no-{yes[2:]}"] = _Reader(name, None, option)
    return readers


def _flags(option: OptionInfo) -> list[str]:
    """Return the flags that an option names; typer keeps the first one as its default."""
    return [flag for flag in (option.default, *(option.param_decls or ())) if isinstance(flag, str)]


def _found(readers: Mapping[str, _Reader], left: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while left:
        flag, separator, value = left.pop().partition("=")
        reader = readers.get(flag)
        if reader is None or (separator and not flag.startswith("--")):  # "-c=x" means "=x"
            raise _NotPlainError
        if reader.kind in {bool, None}:
            if separator:
                raise _NotPlainError
            found[reader.name] = reader.kind is bool
            continue
        if not separator:
            if not left or left[-1].startswith("-"):
                raise _NotPlainError
            value = left.pop()
        _read(found, reader, value)
    return found


def _read(found: dict[str, Any], reader: _Reader, text: str) -> None:
    """Add the value of an option."""
    kind = reader.kind
    if typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        found.setdefault(reader.name, []).append(_value(inner, reader.option, text))
    else:
        found[reader.name] = _value(kind, reader.option, text)


def _value(kind: Any, option: OptionInfo, text: str) -> Any:  # noqa: ANN401  # as above
    if kind is str:
        return text
    if kind is Path and text:
        return Path(text)
    if kind is int and text.isascii() and text.isdigit() and len(text) <= _DIGITS:
        number = int(text)
        least, most = option.min, option.max
        if (least is None or number >= least) and (most is None or number <= most):
            return number
    if typing.get_origin(kind) is typing.Literal and text in typing.get_args(kind):
        return text
    raise _NotPlainError
