"""Plans for groups as files: JSON that people review before they apply it.

Invariant: what was written is read back equal. A file of another version is refused.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, Final

from logmirror.errors import UsageError
from logmirror.reports import GroupPlan, GroupStep, NextRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION: Final = 1

_NEXT: Final = "next_record"
"""A field that earlier files do not have. It is for people; `apply` does not use it."""


def plan_text(plans: Iterable[GroupPlan]) -> str:
    """Return plans as the text of a file."""
    groups = [plan_json(plan) for plan in plans]
    return json.dumps({"version": VERSION, "groups": groups}, indent=2) + "\n"


def plan_json(plan: GroupPlan) -> dict[str, object]:
    """Return a plan as JSON. Fields may be added; none is renamed."""
    found = dataclasses.asdict(plan)
    found["steps"] = [
        {**dataclasses.asdict(step), "is_committed": step.is_committed} for step in plan.steps
    ]
    return found


def read_plan(text: str) -> list[GroupPlan]:
    """Read the text of a file.

    Raises:
        UsageError: It is not such a file, or of another version.
    """
    try:
        data = json.loads(text)
        version = data["version"]
        if version == VERSION:
            return [_plan(entry) for entry in data["groups"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            "not a plan for groups",
            hint="make one: logmirror groups plan -c FILE --output PLAN",
            cause=f"{type(error).__name__}: {error}",
        ) from error
    raise UsageError("a plan of another version", expected=VERSION, found=version)


def _plan(entry: dict[str, Any]) -> GroupPlan:
    steps = []
    for step in entry["steps"]:
        fields = [field.name for field in dataclasses.fields(GroupStep)]
        values = {name: step[name] for name in fields if name != _NEXT}
        values[_NEXT] = _next_record(step.get(_NEXT))
        for name in ("partition", "source_offset", "target_offset", "current_offset"):
            is_missing = values[name] is None and name.endswith("t_offset")
            if not is_missing and (type(values[name]) is not int or values[name] < 0):
                raise ValueError(f"{name} is not a number of 0 or more: {values[name]!r}")
        steps.append(GroupStep(**values))
    names = ("group", "destination", "cluster_id", "source_state", "target_state")
    if not all(isinstance(entry[name], str) for name in names):
        raise ValueError(f"{', '.join(names)} must be texts")
    as_of_ms = entry.get("as_of_ms")
    if as_of_ms is not None and type(as_of_ms) is not int:
        raise ValueError("as_of_ms must be a number")
    texts = {name: entry[name] for name in names}
    return GroupPlan(**texts, as_of_ms=as_of_ms, steps=tuple(steps))


def _next_record(entry: dict[str, Any] | None) -> NextRecord | None:
    if entry is None:
        return None
    found = NextRecord(
        **{field.name: entry[field.name] for field in dataclasses.fields(NextRecord)}
    )
    numbers = (found.offset, found.timestamp_ms)
    if not all(value is None or type(value) is int for value in numbers):
        raise ValueError(f"{_NEXT} has a number that is none: {entry!r}")
    if not (found.key is None or isinstance(found.key, str)):
        raise ValueError(f"the key of {_NEXT} must be a text")
    return found
