"""Validation of a configuration: keys, types, and settings that contradict each other.

The rules check the values as parsed, not a model that is valid as a whole: a typing error in the
first mirror must not hide that the second and the third write one directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from logmirror.config import kafka_rules, s3_rules, secret_rules, values
from logmirror.config.destination_model import DESTINATION_TYPES
from logmirror.config.model import ConfigModel
from logmirror.config.source import SourceMap
from logmirror.config.suggestions import did_you_mean, suggest_key, suggest_value, without_type

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from logmirror.config.source import Source

PropertyCheck = Callable[[Mapping[str, str]], Iterable[tuple[str, str, str]]]
"""Validates connection properties; returns (property name, message, suggestion) per problem."""

_UNSUPPORTED: Final = {
    "encryption": "remove it, and encrypt with the file system or the bucket (`sse`)",
    "http-access": "remove it: logmirror has no HTTP cache; read the topic or the archive",
    "notify": "remove it: logmirror sends no notifications; consume the topic instead",
    "topics": "write one mirror for each topic",
}
"""Unsupported settings of other versions and of mirror-v3, with what to do instead."""

_INSTEAD_OF_DESTINATIONS: Final = ("http-access", "notify")
"""A mirror of mirror-v3 with one of these needs no destination."""

_ONLY_IN_SHARED: Final = (
    *("destinations", "format", "compression", "encoding", "compaction", "snapshots", "flush"),
)


def check(
    source: Source,
    *,
    environ: Mapping[str, str],
    check_properties: PropertyCheck | None = None,
    needs_variables: bool = True,
) -> ConfigModel | None:
    """Add all problems to `source.problems`; return the model if there are none.

    Args:
        source: A parsed file. Unsupported settings are removed from it.
        environ: The variables that settings name (`access-key-id-env`).
        check_properties: Validates the connection properties of each cluster.
        needs_variables: Whether a variable that a setting names must be set; see `Source.unset`.
    """
    if source.is_broken(""):
        return None
    if not isinstance(source.root, dict):
        source.add_problem("", "the file must be a mapping with the key mirrors", "see examples/")
        return None
    for path, part in _mappings(source.root):
        _refuse_unsupported(source, path, part)
        s3_rules.check_destination(source, path, part, environ, needs_variables=needs_variables)
    for path, archive in values.items(
        values.mapping(source.root, "broker") or {}, "archive", "broker"
    ):
        s3_rules.check_archive(source, path, archive, environ)
    model = None
    try:
        model = ConfigModel.model_validate(source.root)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            _report(source, details)
    if source.root.get("mirrors") is None and source.root.get("broker") is None:
        source.add_problem("mirrors", _MESSAGES["missing"])
    _check_mirrors(source, source.root)
    kafka_rules.check_replicas(source, source.root)
    kafka_rules.check_aliases(source, source.root)
    kafka_rules.check_cycles(source, source.root)
    _check_properties(source, source.root, check_properties)
    secret_rules.check_secrets(source, source.root)
    return None if source.problems else model


def _mappings(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the mirrors, their destinations and the shared destination that are mappings."""
    if isinstance(shared := root.get("destination"), dict):
        yield "destination", shared
    for path, mirror in values.items(root, "mirrors", ""):
        yield path, mirror
        yield from values.items(mirror, "destinations", path)


def _refuse_unsupported(source: Source, path: str, part: dict[str, Any]) -> None:
    kind = values.text(part, "type") if "destination" in path else None
    if kind == "s3" and part.get("encryption") == "none":
        del part["encryption"]
    refused = [key for key in part if key in _UNSUPPORTED]
    for key in refused:
        if part[key] is not None or source.is_broken(f"{path}.{key}"):
            source.refuse(f"{path}.{key}", "is not supported by this version", _UNSUPPORTED[key])
        del part[key]
    if part.get("destinations") == [] and set(_INSTEAD_OF_DESTINATIONS) & set(refused):
        source.broken |= {f"{path}.destinations", f"{path}.flush"}  # reported already
    if kind == "kafka":
        kafka_rules.refuse_misplaced(source, path, part)


def _path_of(loc: Iterable[str | int]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _report(source: Source, details: ErrorDetails) -> None:
    """Translate one of pydantic's errors into a problem."""
    kind, found, context = details["type"], details["input"], details.get("ctx", {})
    loc = details["loc"]
    suggestion = ""
    if kind == "extra_forbidden":
        message, suggestion = "unknown key", suggest_key(loc)
    elif kind == "literal_error":
        message = f"must be {context['expected'].replace(chr(39), '')}"
        suggestion = did_you_mean(found, re.findall(r"'([^']+)'", context["expected"]))
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        loc = (*loc, "type")
        chosen = found.get("type") if isinstance(found, dict) else None
        message = "is required" if chosen is None else "must be filesystem, kafka or s3"
        suggestion = did_you_mean(chosen, DESTINATION_TYPES)
    elif kind == "value_error":
        message, suggestion = str(context["error"]), suggest_value(loc, found)
    elif kind in _MESSAGES:
        message = _MESSAGES[kind].format(**context)
        suggestion = suggest_value(loc, found) if kind != "missing" else ""
    else:
        message = details["msg"]
    source.add_problem(_path_of(without_type(loc)), message, suggestion)


_MESSAGES: Final = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "greater_than_equal": "must be {ge} or more",
    "int_type": "must be a whole number",
    "less_than_equal": "must be {le} or less",
    "list_type": "must be a list",
    "missing": "is required",
    "model_attributes_type": "must be a mapping",
    "model_type": "must be a mapping",
    "string_type": "must be text",
    "too_short": "must list at least one",
}


# Rules across settings. A value of the wrong type counts as absent: `_report` reports it.


@dataclass(frozen=True, slots=True)
class _Flow:
    """Partitions of a mirror and the directory to which they are written."""

    path: str
    mirror: str
    directory: str
    partitions: frozenset[int] | None


def _check_mirrors(source: Source, root: dict[str, Any]) -> None:
    shared, one = root.get("destination"), values.mapping(root, "destination")
    if one is not None:
        _check_encoding(source, "destination", one)
        kafka_rules.check_destination(source, "destination", one)
    names: dict[str, str] = {}
    flows: list[_Flow] = []
    for path, mirror in values.items(root, "mirrors", ""):
        name = values.text(mirror, "name")
        if name is not None and names.setdefault(name, path) != path:
            source.add_problem(f"{path}.name", f"{names[name]} also has the name {name!r}")
        _check_partition_keys(source, path, mirror)
        if shared is None:
            _check_own_destinations(source, path, mirror)
        else:
            is_kafka = one is not None and values.text(one, "type") == "kafka"
            _check_shared_destination(source, path, mirror, is_archive=not is_kafka)
        if kafka_rules.types_of(mirror, one, path) != {"kafka"}:
            _check_encoding(source, path, mirror)
        kafka_rules.check_mirror(source, path, mirror, one)
        layout = one if one is not None else mirror
        _check_types(source, path, mirror, layout)
        if layout.get("compaction") is not None and mirror.get("chain-start") is not None:
            message = "has no effect with compaction: log, which starts at the log start offset"
            source.add_problem(f"{path}.chain-start", message, "remove it")
        is_archive = kafka_rules.types_of(mirror, one, path) != {"kafka"}
        if is_archive and layout.get("format") == "native" and mirror.get("until") is not None:
            message = "would split a batch, and native objects hold whole batches"
            source.add_problem(f"{path}.until", message, "use format: parquet or ndjson")
        flows.extend(_flows(path, mirror, one))
    _check_directories(source, [flow for flow in flows if not source.is_broken(flow.path)])


def _check_partition_keys(source: Source, path: str, mirror: dict[str, Any]) -> None:
    given = [
        key
        for key in ("partition", "partitions")
        if mirror.get(key) is not None or source.is_broken(f"{path}.{key}")
    ]
    if not given:
        source.add_problem(
            f"{path}.partition", "is required", "write partition: 0 or partitions: all"
        )
    elif len(given) > 1:
        source.add_problem(f"{path}.partitions", "partition is set too", "keep one of them")


def _check_own_destinations(source: Source, path: str, mirror: dict[str, Any]) -> None:
    if mirror.get("destinations") is None:
        source.add_problem(f"{path}.destinations", "is required")
    types = kafka_rules.types_of(mirror, None, path)
    if mirror.get("flush") is None and (not types or types & {"filesystem", "s3"}):
        source.add_problem(f"{path}.flush", "is required")
    if mirror.get("destination-name-override") is not None:
        message = "is only for files with one destination for all mirrors"
        suggestion = "give the destination a name"
        source.add_problem(f"{path}.destination-name-override", message, suggestion)
    items = list(values.items(mirror, "destinations", path))
    names: dict[str, str] = {}
    for item_path, item in items:
        name = values.text(item, "name")
        if name is None and len(items) > 1 and item.get("name") is None:
            message = "is required if a mirror has several destinations"
            source.add_problem(f"{item_path}.name", message)
        if name is not None and names.setdefault(name, item_path) != item_path:
            source.add_problem(f"{item_path}.name", f"{names[name]} also has the name {name!r}")


def _check_shared_destination(
    source: Source, path: str, mirror: dict[str, Any], *, is_archive: bool
) -> None:
    for key in _ONLY_IN_SHARED if is_archive else ("destinations", "timestamp-mode"):
        if mirror.get(key) is not None:
            message = "the file has one destination for all mirrors"
            suggestion = (
                "remove one of the two" if key == "destinations" else "move it to destination"
            )
            source.add_problem(f"{path}.{key}", message, suggestion)


_FORMATS_OF: Final = (
    # As in mirror-v3, a compression is accepted and ignored with ndjson.
    *(("compression", ("parquet", "ndjson")), ("compaction", ("parquet",))),
    ("encoding", ("ndjson",)),
)


def _check_encoding(source: Source, path: str, mapping: dict[str, Any]) -> None:
    """Refuse an option without effect: the user who wrote it expects an effect."""
    chosen = mapping.get("format") or "parquet"
    for key, formats in _FORMATS_OF:
        if mapping.get(key) is not None and chosen not in formats:
            source.add_problem(f"{path}.{key}", f"is only for format: {formats[0]}", "remove it")
    if mapping.get("compaction") is None and mapping.get("snapshots") is not None:
        source.add_problem(f"{path}.snapshots", "is only for compaction: log", "remove it")


_NOT_IN_NDJSON: Final = ("bytes", "json", "json-parseable")


def _check_types(source: Source, path: str, mirror: dict[str, Any], layout: dict[str, Any]) -> None:
    """Refuse types other than utf8 with NDJSON, which holds text; `encoding` is not a type."""
    if layout.get("format") != "ndjson":
        return
    for key in ("keys", "values"):
        if values.text(values.mapping(mirror, key) or {}, "type") in _NOT_IN_NDJSON:
            message, suggestion = "must be utf8 with format: ndjson", "write utf8, or remove it"
            source.add_problem(f"{path}.{key}.type", message, suggestion)


_HAS_KEY: Final = "the file has a key for this"
_REFUSED_IN_SOURCE: Final = {
    "bootstrap.servers": (_HAS_KEY, "write bootstrap-servers below source"),
    "metadata.broker.list": (_HAS_KEY, "write bootstrap-servers below source"),
    "group.id": ("has no effect: logmirror uses no consumer group", "remove it"),
}
_REFUSED_IN_DESTINATION: Final = {
    "bootstrap.servers": (_HAS_KEY, "write bootstrap-servers in the destination"),
    "metadata.broker.list": (_HAS_KEY, "write bootstrap-servers in the destination"),
}
"""Connection properties that the file does not accept, with message and suggestion."""


def _check_properties(source: Source, root: dict[str, Any], validate: PropertyCheck | None) -> None:
    for path, mirror in values.items(root, "mirrors", ""):
        origin = values.mapping(mirror, "source")
        if origin is not None:
            _check_connection(source, f"{path}.source", origin, validate)
    for path, part in _mappings(root):
        if values.text(part, "type") == "kafka":
            _check_connection(source, path, part, validate)
    spark = root.get("spark")
    properties = spark.get("properties") if isinstance(spark, dict) else None
    for key in properties if isinstance(properties, dict) else ():
        if key == "spark.master":
            source.add_problem(f"spark.properties.{key}", _HAS_KEY, "write master")
        elif not key.startswith("spark."):
            source.add_problem(f"spark.properties.{key}", "must begin with spark.")


def _check_connection(
    source: Source, path: str, cluster: dict[str, Any], validate: PropertyCheck | None
) -> None:
    """Check the properties of one cluster."""
    properties = cluster.get("properties")
    if not isinstance(properties, SourceMap):
        return
    refused = _REFUSED_IN_SOURCE if path.endswith(".source") else _REFUSED_IN_DESTINATION
    for key, (message, suggestion) in refused.items():
        if key in properties:
            source.add_problem(f"{path}.properties.{key}", message, suggestion)
    others = {
        key: text
        for key, text in properties.texts.items()
        if key not in refused and properties[key] is not None
    }
    for key, message, suggestion in validate(others) if validate else ():
        source.add_problem(f"{path}.properties.{key}", message, suggestion)


def _flows(path: str, mirror: dict[str, Any], shared: dict[str, Any] | None) -> Iterator[_Flow]:
    """Yield the directories that a mirror writes, with links and `..` resolved."""
    name = values.text(mirror, "name")
    if shared is not None:
        child = values.text(mirror, "destination-name-override") or values.text(mirror, "topic")
        places = [(path, shared, child)]
    else:
        places = [
            (item_path, item, values.text(item, "name") or name)
            for item_path, item in values.items(mirror, "destinations", path)
        ]
    for place, destination, child in places:
        directory = None if child is None else _directory(destination, child)
        if directory is not None and directory.isprintable():
            yield _Flow(place, name or path, directory, values.partitions(mirror))


def _directory(destination: dict[str, Any], child: str) -> str | None:
    """Return the directory that a destination writes below its root or bucket; None if unknown."""
    if values.text(destination, "type") == "s3":
        return s3_rules.directory(destination, child)
    root = values.text(destination, "root")
    if root is None or "\0" in root + child:
        return None
    return os.path.realpath(os.path.join(root, child))  # noqa: PTH118  # compared as text


def _check_directories(source: Source, flows: list[_Flow]) -> None:
    """Refuse two flows in one directory: each would find the other's objects in its chain."""
    by_directory: dict[str, list[_Flow]] = {}
    for flow in flows:
        for other in by_directory.setdefault(flow.directory, []):
            partition = values.shared_partition(flow.partitions, other.partitions)
            if partition is not None:
                path = f"{flow.directory}/{partition}"
                message = f"mirrors {other.mirror!r} and {flow.mirror!r} both write {path!r}"
                source.add_problem(flow.path, message, "choose another root or name")
                break
        by_directory[flow.directory].append(flow)
    for flow in flows:
        _check_not_inside(source, flow, by_directory)


def _check_not_inside(source: Source, flow: _Flow, by_directory: dict[str, list[_Flow]]) -> None:
    """Refuse a directory inside a partition's directory: its name is foreign to that chain."""
    inner = PurePath(flow.directory)
    for outer in inner.parents:
        child = inner.relative_to(outer).parts[0]
        if not child.isdecimal() or not child.isascii() or str(outer) not in by_directory:
            continue
        for other in by_directory[str(outer)]:
            if other.partitions is None or int(child) in other.partitions:
                message = f"{flow.directory!r} is inside {str(outer / child)!r} of {other.mirror!r}"
                source.add_problem(flow.path, message, "choose another root or name")
                return
