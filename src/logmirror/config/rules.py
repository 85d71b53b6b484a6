"""What makes a configuration wrong: wrong keys and types, and settings that contradict each other.

The rules look at the values as they were read, not at a model that must first be valid as a whole:
a typing error in the first mirror must not hide that the second and the third write one folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from logmirror.config import kafka_rules, s3_rules, values
from logmirror.config.model import DESTINATION_TYPES, ConfigModel
from logmirror.config.source import SourceMap
from logmirror.config.suggestions import did_you_mean, suggest_key, suggest_value, without_type

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from logmirror.config.source import Source

PropertyCheck = Callable[[Mapping[str, str]], Iterable[tuple[str, str, str]]]
"""Finds what is wrong with connection properties: (property name, message, suggestion) of each."""

_NOT_OFFERED: Final = {
    "encryption": "remove it, and let the file system or the bucket (`sse`) encrypt",
    "http-access": "remove it: there is no cache to ask; readers read the topic, or the archive",
    "notify": "remove it: nobody is called; let whoever waits consume the topic",
    "topics": "write one mirror for each topic",
}
"""Settings of other versions and of mirror-v3, and what to do instead."""

_INSTEAD_OF_DESTINATIONS: Final = ("http-access", "notify")
"""With one of these, mirror-v3 needs no destination."""

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
    """Add everything that is wrong to `source.problems`; the model if nothing is.

    Args:
        source: A parsed file. Settings that this version does not offer are removed from it.
        environ: Where variables are looked up that a setting names.
        check_properties: Judges the connection properties of each source.
        needs_variables: Whether a variable that a setting names must be set; see `Source.unset`.
    """
    if source.is_broken(""):
        return None
    if not isinstance(source.root, dict):
        source.complain("", "the file must be a mapping with the key mirrors", "see examples/")
        return None
    for path, part in _mappings(source.root):
        _refuse_not_offered(source, path, part)
        s3_rules.check_destination(source, path, part, environ, needs_variables=needs_variables)
    model = None
    try:
        model = ConfigModel.model_validate(source.root)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            _report(source, details)
    _check_mirrors(source, source.root)
    kafka_rules.check_copies(source, source.root)
    _check_properties(source, source.root, check_properties)
    return None if source.problems else model


def _mappings(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The mirrors, their destinations and the shared destination, as far as they are mappings."""
    if isinstance(shared := root.get("destination"), dict):
        yield "destination", shared
    for path, mirror in values.items(root, "mirrors", ""):
        yield path, mirror
        yield from values.items(mirror, "destinations", path)


def _refuse_not_offered(source: Source, path: str, part: dict[str, Any]) -> None:
    kind = values.text(part, "type") if "destination" in path else None
    if kind == "s3" and part.get("encryption") == "none":
        del part["encryption"]
    refused = [key for key in part if key in _NOT_OFFERED]
    for key in refused:
        if part[key] is not None or source.is_broken(f"{path}.{key}"):
            source.refuse(f"{path}.{key}", "is not offered by this version", _NOT_OFFERED[key])
        del part[key]
    if part.get("destinations") == [] and set(_INSTEAD_OF_DESTINATIONS) & set(refused):
        source.broken |= {f"{path}.destinations", f"{path}.flush"}  # told already
    if kind == "kafka":
        kafka_rules.refuse_misplaced(source, path, part)


def _path_of(loc: Iterable[str | int]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _report(source: Source, details: ErrorDetails) -> None:
    """Turn one finding of pydantic into a problem in our words."""
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
        message = "is required" if chosen is None else f"must be {' or '.join(DESTINATION_TYPES)}"
        suggestion = did_you_mean(chosen, DESTINATION_TYPES)
    elif kind == "value_error":
        message, suggestion = str(context["error"]), suggest_value(loc, found)
    elif kind in _MESSAGES:
        message = _MESSAGES[kind].format(**context)
        suggestion = suggest_value(loc, found) if kind != "missing" else ""
    else:
        message = details["msg"]
    source.complain(_path_of(without_type(loc)), message, suggestion)


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


# Rules across settings. A value of the wrong type is somebody else's finding: here it is absent.


@dataclass(frozen=True, slots=True)
class _Flow:
    """Some partitions of a mirror on their way into one folder."""

    path: str
    mirror: str
    folder: str
    partitions: frozenset[int] | None


def _check_mirrors(source: Source, root: dict[str, Any]) -> None:
    shared, one = root.get("destination"), values.mapping(root, "destination")
    if one is not None:
        _check_encoding(source, "destination", one)
        kafka_rules.check_destination(source, "destination", one)
    names: dict[str, str] = {}
    groups: dict[tuple[object, ...], list[tuple[str, frozenset[int] | None]]] = {}
    flows: list[_Flow] = []
    for path, mirror in values.items(root, "mirrors", ""):
        name = values.text(mirror, "name")
        if name is not None and names.setdefault(name, path) != path:
            source.complain(f"{path}.name", f"{names[name]} has the name {name!r} too")
        _check_partition_keys(source, path, mirror)
        if shared is None:
            _check_own_destinations(source, path, mirror)
        else:
            kafka = one is not None and values.text(one, "type") == "kafka"
            _check_shared_destination(source, path, mirror, files=not kafka)
        if kafka_rules.types_of(mirror, one, path) != {"kafka"}:
            _check_encoding(source, path, mirror)
        kafka_rules.check_mirror(source, path, mirror, one)
        layout = one if one is not None else mirror
        _check_types(source, path, mirror, layout)
        if layout.get("compaction") is not None and mirror.get("chain-start") is not None:
            message = "has no meaning with compaction: log, which begins where the source begins"
            source.complain(f"{path}.chain-start", message, "remove it")
        _check_group(source, path, mirror, groups)
        flows.extend(_flows(path, mirror, one))
    _check_folders(source, [flow for flow in flows if not source.is_broken(flow.path)])


def _check_partition_keys(source: Source, path: str, mirror: dict[str, Any]) -> None:
    given = [
        key
        for key in ("partition", "partitions")
        if mirror.get(key) is not None or source.is_broken(f"{path}.{key}")
    ]
    if not given:
        source.complain(f"{path}.partition", "is required", "write partition: 0 or partitions: all")
    elif len(given) > 1:
        source.complain(f"{path}.partitions", "partition is given too", "keep one of them")


def _check_own_destinations(source: Source, path: str, mirror: dict[str, Any]) -> None:
    if mirror.get("destinations") is None:
        source.complain(f"{path}.destinations", "is required")
    types = kafka_rules.types_of(mirror, None, path)
    if mirror.get("flush") is None and (not types or types & {"filesystem", "s3"}):
        source.complain(f"{path}.flush", "is required")
    if mirror.get("destination-name-override") is not None:
        message = "is only for files with one destination for all mirrors"
        suggestion = "give the destination a name"
        source.complain(f"{path}.destination-name-override", message, suggestion)
    items = list(values.items(mirror, "destinations", path))
    names: dict[str, str] = {}
    for item_path, item in items:
        name = values.text(item, "name")
        if name is None and len(items) > 1 and item.get("name") is None:
            message = "is required where a mirror has several destinations"
            source.complain(f"{item_path}.name", message)
        if name is not None and names.setdefault(name, item_path) != item_path:
            source.complain(f"{item_path}.name", f"{names[name]} has the name {name!r} too")


def _check_shared_destination(
    source: Source, path: str, mirror: dict[str, Any], *, files: bool
) -> None:
    for key in _ONLY_IN_SHARED if files else ("destinations", "timestamp-mode"):
        if mirror.get(key) is not None:
            message = "the file has one destination for all mirrors"
            suggestion = (
                "remove one of the two" if key == "destinations" else "move it to destination"
            )
            source.complain(f"{path}.{key}", message, suggestion)


_FORMATS_OF: Final = (
    # mirror-v3 takes a compression beside ndjson, and so do we: it has no meaning there.
    *(("compression", ("parquet", "ndjson")), ("compaction", ("parquet",))),
    ("encoding", ("ndjson",)),
)


def _check_encoding(source: Source, path: str, mapping: dict[str, Any]) -> None:
    """An option that would do nothing is refused: whoever wrote it expects something of it."""
    chosen = mapping.get("format") or "parquet"
    for key, formats in _FORMATS_OF:
        if mapping.get(key) is not None and chosen not in formats:
            source.complain(f"{path}.{key}", f"is only for format: {formats[0]}", "remove it")
    if mapping.get("compaction") is None and mapping.get("snapshots") is not None:
        source.complain(f"{path}.snapshots", "is only for compaction: log", "remove it")


_NOT_IN_LINES: Final = ("bytes", "json", "json-parseable")


def _check_types(source: Source, path: str, mirror: dict[str, Any], layout: dict[str, Any]) -> None:
    """Lines of JSON hold text; what their `encoding` makes of it is no type."""
    if layout.get("format") != "ndjson":
        return
    for key in ("keys", "values"):
        if values.text(values.mapping(mirror, key) or {}, "type") in _NOT_IN_LINES:
            message, suggestion = "must be utf8 with format: ndjson", "write utf8, or remove it"
            source.complain(f"{path}.{key}.type", message, suggestion)


_OF_SOURCE: Final = {
    "bootstrap.servers": "write bootstrap-servers below source",
    "metadata.broker.list": "write bootstrap-servers below source",
    "group.id": "write group-id below source",
}
_OF_DESTINATION: Final = {
    "bootstrap.servers": "write bootstrap-servers in the destination",
    "metadata.broker.list": "write bootstrap-servers in the destination",
}
"""Properties for which the file has a key."""


def _check_properties(source: Source, root: dict[str, Any], judge: PropertyCheck | None) -> None:
    for path, mirror in values.items(root, "mirrors", ""):
        origin = values.mapping(mirror, "source")
        if origin is not None:
            _check_connection(source, f"{path}.source", origin, judge)
    for path, part in _mappings(root):
        if values.text(part, "type") == "kafka":
            _check_connection(source, path, part, judge)
    spark = root.get("spark")
    properties = spark.get("properties") if isinstance(spark, dict) else None
    for key in properties if isinstance(properties, dict) else ():
        if key == "spark.master":
            source.complain(
                f"spark.properties.{key}", "the file has a key for this", "write master"
            )
        elif not key.startswith("spark."):
            source.complain(f"spark.properties.{key}", "must begin with spark.")


def _check_connection(
    source: Source, path: str, cluster: dict[str, Any], judge: PropertyCheck | None
) -> None:
    """Check the properties of one cluster."""
    properties = cluster.get("properties")
    if not isinstance(properties, SourceMap):
        return
    own_keys = _OF_SOURCE if path.endswith(".source") else _OF_DESTINATION
    for key, suggestion in own_keys.items():
        if key in properties:
            message = "the file has a key for this"
            source.complain(f"{path}.properties.{key}", message, suggestion)
    others = {
        key: text
        for key, text in properties.texts.items()
        if key not in own_keys and properties[key] is not None
    }
    for key, message, suggestion in judge(others) if judge else ():
        source.complain(f"{path}.properties.{key}", message, suggestion)


def _check_group(
    source: Source,
    path: str,
    mirror: dict[str, Any],
    groups: dict[tuple[object, ...], list[tuple[str, frozenset[int] | None]]],
) -> None:
    """Two mirrors under one group name would overwrite each other's progress in monitoring."""
    origin = mirror.get("source")
    if not isinstance(origin, dict):
        return
    group, servers = values.text(origin, "group-id"), values.text(origin, "bootstrap-servers")
    if group is None or servers is None or source.is_broken(f"{path}.source"):
        return
    own = values.partitions(mirror)
    cluster = frozenset(server.strip() for server in servers.split(","))
    others = groups.setdefault((cluster, group, values.text(mirror, "topic")), [])
    for other_path, other in others:
        if values.shared_partition(own, other) is not None:
            message = f"{other_path} has this group for the same topic and partition"
            source.complain(f"{path}.source.group-id", message, "remove it or choose another")
            break
    others.append((path, own))


def _flows(path: str, mirror: dict[str, Any], shared: dict[str, Any] | None) -> Iterator[_Flow]:
    """Every folder that a mirror writes, with links and `..` followed."""
    name = values.text(mirror, "name")
    if shared is not None:
        folder = values.text(mirror, "destination-name-override") or values.text(mirror, "topic")
        places = [(path, shared, folder)]
    else:
        places = [
            (item_path, item, values.text(item, "name") or name)
            for item_path, item in values.items(mirror, "destinations", path)
        ]
    for place, destination, folder in places:
        where = None if folder is None else _written(destination, folder)
        if where is not None and where.isprintable():
            yield _Flow(place, name or path, where, values.partitions(mirror))


def _written(destination: dict[str, Any], folder: str) -> str | None:
    """The folder that a destination writes below its root or bucket; None if that is not known."""
    if values.text(destination, "type") == "s3":
        return s3_rules.written(destination, folder)
    root = values.text(destination, "root")
    if root is None or "\0" in root + folder:
        return None
    return os.path.realpath(os.path.join(root, folder))  # noqa: PTH118  # compared as text


def _check_folders(source: Source, flows: list[_Flow]) -> None:
    """Two flows in one folder would each find the other's objects in its chain."""
    by_folder: dict[str, list[_Flow]] = {}
    for flow in flows:
        for other in by_folder.setdefault(flow.folder, []):
            partition = values.shared_partition(flow.partitions, other.partitions)
            if partition is not None:
                folder = os.path.join(flow.folder, str(partition))  # noqa: PTH118  # text for a message
                message = f"mirrors {other.mirror!r} and {flow.mirror!r} both write {folder!r}"
                source.complain(flow.path, message, "choose another root or name")
                break
        by_folder[flow.folder].append(flow)
    for flow in flows:
        _check_not_inside(source, flow, by_folder)


def _check_not_inside(source: Source, flow: _Flow, by_folder: dict[str, list[_Flow]]) -> None:
    """A folder inside a partition's folder would be a foreign name in that partition's chain."""
    inner = PurePath(flow.folder)
    for outer in inner.parents:
        child = inner.relative_to(outer).parts[0]
        if not child.isdecimal() or not child.isascii() or str(outer) not in by_folder:
            continue
        for other in by_folder[str(outer)]:
            if other.partitions is None or int(child) in other.partitions:
                message = f"{flow.folder!r} lies inside {str(outer / child)!r} of {other.mirror!r}"
                source.complain(flow.path, message, "choose another root or name")
                return
