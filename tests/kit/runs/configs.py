"""Configurations for tests: a valid mirror to change, and the problems of a text."""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any, Final

from logmirror.config.settings import ConfigError, load_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from logmirror.config.settings import Problem, PropertyCheck, Settings

ABSENT: Final = object()
"""As a value: leave the key out."""

_MIRROR: Final[dict[str, Any]] = {
    "name": "orders",
    "source": {"bootstrap-servers": "localhost:9092"},
    "topic": "orders",
    "partition": 0,
    "destinations": [{"type": "filesystem", "root": "/archive"}],
    "flush": {"max-time-ms": 60000, "max-bytes": 1048576, "max-offsets": 1000},
}
_SHARED_KEYS: Final = ("destinations", "flush")


def mirror(name: str = "orders", /, **changes: object) -> dict[str, Any]:
    """A valid mirror with some keys changed; `max_bytes` stands for `max-bytes`."""
    return _changed({**copy.deepcopy(_MIRROR), "name": name}, changes)


def shared_mirror(name: str = "orders", /, **changes: object) -> dict[str, Any]:
    """A valid mirror of a file with one destination for all."""
    return mirror(name, **dict.fromkeys(_SHARED_KEYS, ABSENT), **changes)


def shared_destination(**changes: object) -> dict[str, Any]:
    """A valid destination for all mirrors."""
    base = {"type": "filesystem", "root": "/archive", "flush": copy.deepcopy(_MIRROR["flush"])}
    return _changed(base, changes)


def folder(**changes: object) -> dict[str, Any]:
    """A valid destination of one mirror."""
    return _changed({"type": "filesystem", "root": "/archive"}, changes)


def _changed(mapping: dict[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    mapping |= {key.replace("_", "-"): value for key, value in changes.items()}
    return {key: value for key, value in mapping.items() if value is not ABSENT}


def text_of(*mirrors: object, **top: object) -> str:
    """A file with these mirrors; JSON, which YAML 1.2 contains."""
    return json.dumps({"mirrors": list(mirrors), **top}, indent=1)


def settings_of(*mirrors: object, **top: object) -> Settings:
    """The settings of a file with these mirrors."""
    return load_text(text_of(*mirrors, **top), environ={})


def problems_of(
    text: str,
    environ: Mapping[str, str] | None = None,
    check_properties: PropertyCheck | None = None,
) -> list[Problem]:
    """Return the problems of a text."""
    try:
        load_text(text, environ=environ or {}, check_properties=check_properties)
    except ConfigError as error:
        if not error.problems:
            message = "an error must have a problem"
            raise AssertionError(message) from error
        return list(error.problems)
    return []


def complaints(*mirrors: object, **top: object) -> dict[str, str]:
    """Return the messages of all problems of a file with these mirrors, by path."""
    problems = problems_of(text_of(*mirrors, **top))
    found = {problem.path: problem.message for problem in problems}
    assert len(found) == len(problems), f"one thing said twice: {problems}"
    return found


def with_files(example: Path, folder: Path) -> Path:
    """Return a copy of an example whose `${file:...}` references are files in `folder`."""
    text = example.read_text(encoding="utf-8")
    for path in set(re.findall(r"\$\{file:([^}]+)\}", text)):
        there = folder / path.replace("/", "-")
        there.write_text("put-in\n", encoding="utf-8")
        text = text.replace(f"${{file:{path}}}", f"${{file:{there}}}")
    copy = folder / example.name
    copy.write_text(text, encoding="utf-8")
    return copy
