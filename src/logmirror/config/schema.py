"""The JSON Schema of the configuration file, for editors and for programs that generate files.

The schema covers keys, types, ranges and the two shapes of a file. It cannot express rules that
compare names or directories; `logmirror validate` checks them all.
"""

from __future__ import annotations

from typing import Any, Final

from logmirror.config.model import ConfigModel

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

_REFERENCE: Final = {"type": "string", "pattern": r"\$\{"}
"""A value from the environment, which a schema cannot validate."""


def json_schema() -> dict[str, Any]:
    """Return the schema of the whole file, draft 2020-12; a new copy at each call."""
    schema = _tidy(ConfigModel.model_json_schema(by_alias=True))
    schema["$schema"] = DIALECT
    schema["title"] = "logmirror configuration"
    mirror = schema["$defs"]["Mirror"]
    mirror["oneOf"] = [{"required": ["partition"]}, {"required": ["partitions"]}]
    mirror["if"] = {"properties": {"destinations": _SOME_FILES}, "required": ["destinations"]}
    mirror["then"] = {"required": ["flush"]}
    one_of_all = {"not": {"anyOf": [{"required": [key]} for key in _OF_ONE_DESTINATION]}}
    own = {
        "required": ["destinations"],
        "not": {"required": ["destination-name-override"]},
    }
    schema["anyOf"] = [{"required": ["mirrors"]}, {"required": ["broker"]}]
    schema["if"] = {"required": ["destination"]}
    schema["then"] = {"properties": {"mirrors": {"items": one_of_all}}}
    schema["else"] = {"properties": {"mirrors": {"items": own}}}
    return schema


_SOME_FILES: Final = {"contains": {"properties": {"type": {"enum": ["filesystem", "s3"]}}}}
_OF_ONE_DESTINATION: Final = (
    "destinations",
    "format",
    "compression",
    "encoding",
    "flush",
    "timestamp-mode",
)


_FIRST: Final = (
    *("name", "type", "enabled", "source", "topic", "partition", "partitions", "destinations"),
    *("destination-name-override", "bootstrap-servers", "root", "bucket"),
)
"""Keys in the order in which a reader expects them. The others follow in the order of the model."""


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Simplify pydantic's schema: no titles, no nulls, short names, references allowed."""
    tidied: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            names = sorted(value, key=lambda name: (*_FIRST, name).index(name))
            tidied[key] = {name: _tidy(value[name]) for name in names}
        elif key == "$defs":
            tidied[key] = {name.removesuffix("Model"): _tidy(item) for name, item in value.items()}
        elif key in {"items", "additionalProperties"} and isinstance(value, dict):
            tidied[key] = _tidy(value)
        elif key in {"anyOf", "oneOf"}:
            # Not oneOf: a type from the environment matches each of them.
            tidied["anyOf"] = [_tidy(item) for item in value if item != {"type": "null"}]
        elif key == "description":
            tidied[key] = " ".join(value.split())
        elif key == "$ref":
            tidied[key] = value.removesuffix("Model")
        elif key not in {"title", "discriminator"} and (key, value) != ("default", None):
            tidied[key] = value
    if len(tidied.get("anyOf", ())) == 1:
        tidied = {**tidied.pop("anyOf")[0], **tidied}
    return _or_reference(tidied)


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow `${VAR}` where the schema requires a number, a boolean or one of some words."""
    narrow = {"enum", "const", "pattern"} & schema.keys()
    if not narrow and schema.get("type") not in ("integer", "boolean"):
        return schema
    notes: dict[str, Any] = {
        key: schema.pop(key) for key in ("description", "default") if key in schema
    }
    return {"anyOf": [schema, dict(_REFERENCE)], **notes}
